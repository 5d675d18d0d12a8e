"""Wire formats of providers: requests, replies, streams, headers, errors.

Start with: chat_wire.
"""
