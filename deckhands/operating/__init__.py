"""The verbs of those who operate a cluster: start it, examine it, its budgets, notes, keys and dead letters.

May import: access, cli, client, cluster, conversation, monitoring, protocols, reading, runs, server, web, webhooks.
Start with: serve.
"""
