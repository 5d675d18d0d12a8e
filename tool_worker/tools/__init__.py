"""The tools: built-in ones, custom tools, MCP servers.

Start with: registry.
"""
