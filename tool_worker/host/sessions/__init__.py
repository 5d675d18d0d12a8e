"""Session programs: processes beside the shell that carry out the calls of one tool each.

May import: shell.
Start with: programs.
"""
