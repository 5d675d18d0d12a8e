"""Conversations that have left the store: one compressed file each, at any place that fsspec reaches.

May import: reading.
Start with: archive.
"""
