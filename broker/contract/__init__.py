"""What goes into a log, as frozen Pydantic models: events, actions, observations, and the codec.

May import: agents, runtime, specs.
Start with: events.
"""
