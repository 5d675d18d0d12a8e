"""The two kinds of agents: those whose loop is ours, and those whose loop is the Claude Agent SDK; which one is chosen.

May import: runtime, specs.
Start with: pairs.
"""
