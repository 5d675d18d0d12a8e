"""MCP servers: how they are configured, started and called, and how their tools are offered.

May import: launch, opening, sandbox, tools.
Start with: servers.
"""
