"""Why a conversation does not get on: from what one sees to its cause, for the command, the server and Python.

May import: access, cli, client, monitoring, reading, server.
Start with: chain.
"""
