"""Bridges: Deckhands' agents inside the programs of other frameworks.

May import: client, datasets, evaluation, exports, reading.
Start with: inspect_solver.
"""
