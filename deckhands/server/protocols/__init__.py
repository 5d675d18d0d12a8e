"""Protocols that other programs already speak: OpenAI's two APIs, A2A, MCP, ACP. Each is one more client of a cluster.

May import: access, client, conversation, openapi, reading, server, tasks, webhooks.
Start with: chat.
"""
