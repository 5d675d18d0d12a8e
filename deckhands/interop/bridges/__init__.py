"""Bridges: Deckhands' agents inside the programs of other frameworks.

Start with: inspect_solver.
"""
