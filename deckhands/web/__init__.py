"""The web page of a server: what one sees of conversations in a browser, as plain files without a build.

May import: access, cli, client, reading, server.
Start with: pages.
"""
