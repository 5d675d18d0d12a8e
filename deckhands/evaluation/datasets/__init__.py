"""Datasets: what agents are evaluated on, in the formats in which benchmarks are published, as instances.

Start with: dataset.
"""
