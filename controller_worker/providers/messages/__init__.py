"""Messages to and from a model, and how tool calls are written into them where a model has no function calling.

Start with: messages.
"""
