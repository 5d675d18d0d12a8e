"""An embedded cluster on this machine: a private store and workers which are restarted when they die.

Start with: embedded_cluster.
"""
