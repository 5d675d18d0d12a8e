"""Files of tasks: read and checked, submitted as a batch, waited for; the file of their results.

May import: client, reading, tasks.
Start with: task_file.
"""
