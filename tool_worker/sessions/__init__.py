"""Programs that live beside the shell and carry out the calls of one tool each.

May import: host.
Start with: programs.
"""
