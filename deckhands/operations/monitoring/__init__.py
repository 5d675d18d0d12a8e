"""Metrics of a cluster for Prometheus: read from the store, served at one address.

Start with: exposition.
"""
