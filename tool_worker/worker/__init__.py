"""The tool worker: takes up actions, carries each out once, answers requests for files.

May import: checkpoints, host, sandbox, sessions, tools, workspace.
Start with: consumer.
"""
