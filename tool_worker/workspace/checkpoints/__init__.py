"""Saved copies of workspaces: when they are made, where they are kept, how they are restored.

Start with: checkpointing.
"""
