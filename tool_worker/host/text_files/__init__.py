"""Text files of a workspace, inside its host: bytes, encodings, earlier versions. Standard library only.

Start with: versioned_files.
"""
