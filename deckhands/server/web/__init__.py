"""The web page of a server: conversations and evaluations in a browser, as plain files.

Start with: pages.
"""
