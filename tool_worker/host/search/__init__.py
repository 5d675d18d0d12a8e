"""Questions about the code of a workspace, answered by a program beside its shell. Standard library only.

Start with: code_questions.
"""
