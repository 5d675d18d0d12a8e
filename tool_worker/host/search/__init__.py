"""Questions about the code of a workspace, answered by a program beside its shell. Standard library only.

May import: nothing of this package.
Start with: code_questions.
"""
