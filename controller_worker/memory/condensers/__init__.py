"""Condensers: strategies for showing a model less of a long history (OpenHands section 8).

Start with: condenser.
"""
