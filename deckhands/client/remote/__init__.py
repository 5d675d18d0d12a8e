"""A server's conversations over HTTP, with the methods of the client that `Conversation` uses.

May import: client, reading, reasons, tasks, transfers.
Start with: remote_client.
"""
