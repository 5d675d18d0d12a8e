"""Conversations that have left the store: one compressed file each, at any place that fsspec reaches.

Start with: archive.
"""
