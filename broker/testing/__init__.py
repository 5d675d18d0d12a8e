"""A store in memory that runs the real functions, for tests and simulations.

May import: runtime, store.
Start with: memory_store.
"""
