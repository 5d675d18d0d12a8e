"""Conversations that have left the store: one compressed file each, on any file system that fsspec supports.

Start with: archive.
"""
