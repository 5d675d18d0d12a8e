"""The way out of a sandbox: a proxy that reaches the hosts on a list and nothing else.

May import: nothing of this package.
Start with: proxy.
"""
