"""What a conversation is made of: one file for each concern, with its part of the state, its handlers and its wants.

Start with: greeting.
"""
