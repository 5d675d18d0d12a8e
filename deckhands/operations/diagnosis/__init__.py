"""Problems of a running cluster and how to solve them: settings, functions, workers, queues, logs, orphans.

Start with: examination.
"""
