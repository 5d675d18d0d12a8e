"""The command line around its verbs: how they are found, their options, their output, their way to a cluster.

May import: archive, client, cluster, reading, runs, task_files.
Start with: main.
"""
