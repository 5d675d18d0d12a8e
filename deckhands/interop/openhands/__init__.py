"""Recorded conversations: of OpenHands, V0 and V1, read and written; exported by Deckhands, read.

Start with: trajectory_import.
"""
