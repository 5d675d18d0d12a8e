"""Diagnosis of a running cluster: settings, functions, workers, queues, logs and orphans, with remedies.

Start with: examination.
"""
