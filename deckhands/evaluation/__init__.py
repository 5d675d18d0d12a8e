"""Evaluations: a dataset tried by agents on a cluster, scored in fresh workspaces, and reported.

May import: attempts, cli, client, cluster, datasets, exports, monitoring, openhands, reading, tasks, transfers.
Start with: evaluation.
"""
