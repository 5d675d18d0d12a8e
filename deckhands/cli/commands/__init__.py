"""The commands of the command line, a file for each family. They are imported when they are called.

Start with: run.
"""
