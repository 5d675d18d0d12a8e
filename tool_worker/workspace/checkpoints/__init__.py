"""Saved copies of workspaces: saves, stores and restores them.

Start with: checkpointing.
"""
