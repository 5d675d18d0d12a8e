"""Messages to and from a model, and how tool calls are written into them where a model has no function calling.

May import: nothing of this package.
Start with: messages.
"""
