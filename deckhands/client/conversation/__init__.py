"""One conversation as an object, asynchronous and blocking, on a private cluster or on one that runs.

Start with: async_conversation.
"""
