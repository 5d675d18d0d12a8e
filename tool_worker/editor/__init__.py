"""File editing inside the workspace host: what the tools `edit`, `read` and `write` do. Standard library only.

May import: nothing of this package.
Start with: file_editor.
"""
