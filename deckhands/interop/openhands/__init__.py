"""Recorded conversations: reads and writes those of OpenHands (V0 and V1), and reads those exported by Deckhands.

Start with: trajectory_import.
"""
