"""The doors that others already speak: OpenAI's chat completions, MCP, ACP; each is one more client of a cluster.

May import: access, client, conversation, reading, server, tasks.
Start with: chat.
"""
