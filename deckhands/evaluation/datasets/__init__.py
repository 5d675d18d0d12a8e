"""Datasets for evaluations, in the formats in which benchmarks are published, as instances.

Start with: dataset.
"""
