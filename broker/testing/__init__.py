"""A store in memory that runs the real functions, for tests and simulations.

Start with: memory_store.
"""
