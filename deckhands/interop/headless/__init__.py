"""The headless hand-off: what a program that launched OpenHands headless launches instead, and a bridge that does so.

Start with: command.
"""
