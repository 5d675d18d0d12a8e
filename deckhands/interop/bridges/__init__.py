"""Bridges: Deckhands' agents inside the programs of other frameworks.

May import: attempts, client, datasets, evaluation, exports, reading.
Start with: inspect_solver.
"""
