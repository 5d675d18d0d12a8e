"""How dangerous an action is, and whether a person is asked before it runs.

Start with: assessment.
"""
