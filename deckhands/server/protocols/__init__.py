"""Protocols of other programs: OpenAI's two APIs, A2A, MCP, ACP. Each is one more client of a cluster.

Start with: chat.
"""
