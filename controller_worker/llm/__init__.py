"""The model layer: one protocol over Claude, OpenAI-compatible servers, everything litellm speaks, and scripts."""
