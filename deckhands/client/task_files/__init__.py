"""Files of tasks: read and checked, submitted as a batch, waited for; the file of their results.

Start with: task_file.
"""
