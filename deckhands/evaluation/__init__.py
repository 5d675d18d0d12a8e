"""Evaluations: a dataset tried by agents on a cluster, scored in fresh workspaces, and reported.

Start with: evaluation.
"""
