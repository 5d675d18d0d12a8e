"""How dangerous an action is, and whether a person is asked before it runs.

May import: nothing of this package.
Start with: assessment.
"""
