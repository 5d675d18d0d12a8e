"""The verbs of the command line that concern conversations: a file for each family, imported at a call.

May import: cli, client, cluster, conversation, openhands, reading, runs, schedules, task_files, tasks, transfers.
Start with: submit.
"""
