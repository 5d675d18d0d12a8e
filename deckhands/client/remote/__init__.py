"""A server's conversations over HTTP, with the methods of the client that `Conversation` uses.

Start with: remote_client.
"""
