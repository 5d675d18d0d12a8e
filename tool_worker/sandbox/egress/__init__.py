"""The egress proxy: connects a sandbox to the hosts on a list and to nothing else.

May import: nothing of this package.
Start with: proxy.
"""
