"""The egress proxy: connects a sandbox to the hosts on a list and to nothing else.

Start with: proxy.
"""
