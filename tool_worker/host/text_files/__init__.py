"""Text files of a workspace, inside its host: bytes, encodings, earlier versions. Standard library only.

May import: nothing of this package.
Start with: versioned_files.
"""
