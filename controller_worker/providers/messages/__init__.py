"""Messages to and from a model, and the text format of tool calls for models without function calling.

Start with: messages.
"""
