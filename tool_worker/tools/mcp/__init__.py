"""MCP servers: their configuration, start and calls, and the offering of their tools.

Start with: servers.
"""
