"""Sandboxes around workspace hosts: which ones exist, how each starts a program, and whether it holds.

May import: host.
Start with: sandbox.
"""
