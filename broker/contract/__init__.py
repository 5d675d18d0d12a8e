"""What goes into a log, as frozen Pydantic models: events, actions, observations, specifications, and the codec.

May import: runtime.
Start with: events.
"""
