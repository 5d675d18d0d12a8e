"""The verbs of the command line: one file for each family, imported when one of its verbs is called.

May import: cli, client, cluster, openhands, reading, runs, schedules, task_files, tasks, transfers.
Start with: submit.
"""
