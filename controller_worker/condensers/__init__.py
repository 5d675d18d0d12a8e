"""Condensers: strategies for showing a model less of a long history, one file each (OpenHands section 8)."""
