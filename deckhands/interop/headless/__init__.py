"""The headless hand-off: what a program that launched OpenHands headless launches instead, and a bridge that does so.

May import: cli, client, cluster, openhands, reading, runs, tasks.
Start with: command.
"""
