"""What goes over the wire to providers and comes back: requests, replies, streams, headers, errors.

Start with: chat_wire.
"""
