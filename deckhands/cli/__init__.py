"""The command line: one file for each family of verbs, imported when one of its verbs is called.

May import: client, cluster, openhands, reading, runs.
Start with: main.
"""
