"""Clusters on this machine: a private store and workers that are restarted when they die; the demo.

May import: archive, client, reading.
Start with: embedded_cluster.
"""
