"""`python -m deckhands.headless`: the headless mode of OpenHands on the command line.

Start with: command.
"""
