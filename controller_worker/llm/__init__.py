"""The model layer: one protocol, a native Anthropic backend, litellm for all others, and scripts for tests."""
