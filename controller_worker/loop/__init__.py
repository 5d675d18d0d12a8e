"""The shell around the core: claims conversations, performs what the core wants, appends the outcome.

May import: agents, calls, concerns, core, llm, security, sdk.
Start with: conversation_loop.
"""
