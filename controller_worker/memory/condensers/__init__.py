"""Condensers: strategies that shorten a long history for the model (OpenHands section 8).

Start with: condenser.
"""
