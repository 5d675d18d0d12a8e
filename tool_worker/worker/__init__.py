"""The tool worker: takes actions from the streams, runs each of them once, transfers files.

May import: checkpoints, files, host, launch, mcp, node, opening, sandbox, sessions, tools, workspace.
Start with: consumer.
"""
