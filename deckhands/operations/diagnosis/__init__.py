"""Problems of a running cluster and how to solve them: settings, functions, workers, queues, logs, orphans.

May import: cli, cluster, monitoring, reading.
Start with: examination.
"""
