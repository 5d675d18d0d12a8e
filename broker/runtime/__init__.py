"""What every process needs before it speaks to anybody: settings, clock, ids, errors, child processes, failpoints.

May import: nothing of this package.
Start with: settings.
"""
