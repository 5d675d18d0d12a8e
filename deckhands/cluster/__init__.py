"""Clusters on this machine: a private store and workers, kept up; the demo.

May import: client, reading.
Start with: embedded_cluster.
"""
