"""Sandboxes around workspace hosts: which there are, how they start a program, whether they hold.

May import: host.
Start with: sandbox.
"""
