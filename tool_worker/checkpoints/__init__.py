"""Saved copies of workspaces, and when they are saved and restored.

May import: workspace.
Start with: checkpointing.
"""
