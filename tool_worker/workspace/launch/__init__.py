"""Workspace hosts as the tool worker sees them: what they are started with, how they are reached and ended.

May import: egress, files, host, sandbox, sessions.
Start with: host_launch.
"""
