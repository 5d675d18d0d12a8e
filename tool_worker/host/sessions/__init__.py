"""Session programs: processes beside the shell; each runs the calls of one tool.

Start with: programs.
"""
