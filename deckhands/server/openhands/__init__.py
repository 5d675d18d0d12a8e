"""The API of OpenHands' agent server, below `/api` and `/sockets`: one more client of a cluster.

Start with: conversations.
"""
