"""The verbs of those who operate a cluster: start it, examine it, its budgets, notes and dead letters.

May import: cli, client, cluster, monitoring, reading, runs.
Start with: serve.
"""
