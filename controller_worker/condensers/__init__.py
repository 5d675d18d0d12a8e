"""Condensers: strategies for showing a model less of a long history (OpenHands section 8).

May import: llm, memory.
Start with: condenser.
"""
