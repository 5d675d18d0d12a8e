"""Agents: what the model reads, which tools it gets, and what its tool calls mean.

Start with: codeact.
"""
