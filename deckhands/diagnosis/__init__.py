"""What is wrong with a running cluster, and what to do about it: settings, functions, workers, queues, logs, orphans.

May import: cli, cluster, monitoring, reading.
Start with: examination.
"""
