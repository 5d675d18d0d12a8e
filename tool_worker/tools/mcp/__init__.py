"""MCP servers: how they are configured, started and called, and how their tools are offered.

Start with: servers.
"""
