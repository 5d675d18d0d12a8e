"""Measurements: Deckhands beside OpenHands' SDK, at the same work, in the same run. See README.md."""
