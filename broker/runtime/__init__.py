"""What every process needs before it speaks to anybody: settings, clock, ids, errors, child processes, failpoints.

Start with: settings.
"""
