"""The models themselves: wire formats of the providers, streams, batches, errors, and models without a provider.

May import: llm, messages, wires, wrappers.
Start with: registry.
"""
