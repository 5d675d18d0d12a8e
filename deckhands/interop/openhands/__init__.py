"""Conversations recorded elsewhere: by OpenHands, V0 and V1, read and written; exported by Deckhands, read.

May import: client, reading, tasks.
Start with: trajectory_import.
"""
