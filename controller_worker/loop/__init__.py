"""The shell around the core: claims conversations, performs what the core wants, appends the outcome.

Start with: conversation_loop.
"""
