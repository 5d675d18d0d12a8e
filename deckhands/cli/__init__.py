"""The command line around its verbs: how they are found, their options, their output, their way to a cluster.

Start with: main.
"""
