"""Workspace hosts as the tool worker sees them: what they are started with, how they are reached and ended.

Start with: host_launch.
"""
