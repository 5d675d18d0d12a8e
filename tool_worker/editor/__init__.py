"""Files as the editor tool reads and changes them, inside the workspace host. Standard library only.

May import: host.
Start with: file_editor.
"""
