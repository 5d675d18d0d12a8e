"""The protocol through which every model is called, and what is known of models: settings, features, prices, limits.

May import: messages.
Start with: llm.
"""
