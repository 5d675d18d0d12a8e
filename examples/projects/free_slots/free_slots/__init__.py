"""Free slots in a working day."""
