"""What wraps a model: a cache, batches, a router, and tools or images for models that lack them.

May import: llm, messages.
Start with: router.
"""
