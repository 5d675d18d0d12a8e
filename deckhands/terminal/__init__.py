"""What a person lives in: `deckhands top`, `deckhands chat`, and the completion of a shell.

May import: cli, client, cluster, monitoring, reading, reasons, runs, tasks, verbs.
Start with: top.
"""
