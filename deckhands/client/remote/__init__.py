"""A server's conversations over HTTP, with the client methods that `Conversation` uses.

Start with: remote_client.
"""
