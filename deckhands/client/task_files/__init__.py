"""Task files: checked, submitted as a batch and awaited; and the file of their results.

Start with: task_file.
"""
