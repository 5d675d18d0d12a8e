"""Condensers: strategies for showing a model less of a long history (OpenHands section 8).

May import: memory, messages.
Start with: condenser.
"""
