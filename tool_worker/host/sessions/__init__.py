"""Session programs: processes beside the shell that carry out the calls of one tool each.

Start with: programs.
"""
