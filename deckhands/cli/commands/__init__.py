"""The commands of the command line, one file per family. Each is imported when it is called.

Start with: run.
"""
