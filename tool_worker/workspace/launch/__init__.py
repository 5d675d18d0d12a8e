"""Starts, reaches and ends workspace hosts, on the tool worker's side.

Start with: host_launch.
"""
