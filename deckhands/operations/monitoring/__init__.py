"""What a cluster does, as metrics for Prometheus: read from the store, served at one address.

May import: nothing of this package.
Start with: exposition.
"""
