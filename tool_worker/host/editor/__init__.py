"""File editing inside the workspace host: the tools `edit`, `patch`, `read` and `write`. Standard library only.

Start with: file_editor.
"""
