"""What goes over the wire to providers and comes back: requests, replies, streams, headers, errors.

May import: llm, messages.
Start with: chat_wire.
"""
