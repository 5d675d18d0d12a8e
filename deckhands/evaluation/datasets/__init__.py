"""Datasets: what agents are evaluated on, in the formats in which benchmarks are published, as instances.

May import: tasks.
Start with: dataset.
"""
