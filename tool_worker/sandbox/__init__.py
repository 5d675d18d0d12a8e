"""Sandboxes around workspace hosts: which ones exist, how each starts a program, and whether it holds.

May import: nothing of this package.
Start with: sandbox.
"""
