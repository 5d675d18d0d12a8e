"""Code questions, file search, documents and file checks, in a session program. Standard library only.

Start with: code_questions.
"""
