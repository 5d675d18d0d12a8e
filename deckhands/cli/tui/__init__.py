"""What people use at a terminal: `deckhands top`, `deckhands chat`, and shell completion.

May import: cli, client, cluster, monitoring, reading, reasons, runs, tasks, verbs.
Start with: top.
"""
