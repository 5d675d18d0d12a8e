"""What an agent remembers: the log as messages for a model, and what a recall finds."""
