"""One conversation as an object, asynchronous or blocking, on a private cluster or on a running one.

Start with: async_conversation.
"""
