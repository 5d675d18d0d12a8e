"""The command line: its commands, their options, their output, and their connection to a cluster.

Start with: main.
"""
