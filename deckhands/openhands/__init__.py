"""Conversations recorded by OpenHands, V0 and V1, read and written.

May import: client, reading.
Start with: trajectory_import.
"""
