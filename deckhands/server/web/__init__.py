"""The web page of a server: conversations and evaluations in a browser, as plain files.

May import: access, attempts, cli, client, monitoring, reading, server.
Start with: pages.
"""
