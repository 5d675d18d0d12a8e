"""What a cluster does, as metrics for Prometheus: read from the store, served at one address.

Start with: exposition.
"""
