"""Protocols of other programs: OpenAI's two APIs, AG-UI, A2A, MCP, ACP. Each is one more client of a cluster.

Start with: chat.
"""
