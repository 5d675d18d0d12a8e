"""The command line around its verbs: how they are found, their options, their output, their way to a cluster.

May import: archive, client, reading, runs, tasks.
Start with: main.
"""
