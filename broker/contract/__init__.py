"""Events, actions and observations as frozen Pydantic models, what a conversation is made of, and their bytes.

Start with: events.
"""
