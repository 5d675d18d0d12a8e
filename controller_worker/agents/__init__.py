"""Agents: what the model is told, which tools it gets, and what its tool calls mean.

May import: llm.
Start with: codeact.
"""
