"""File editing inside the workspace host: what the tools `edit`, `read` and `write` do. Standard library only.

Start with: file_editor.
"""
