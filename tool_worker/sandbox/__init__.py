"""Sandboxes around workspace hosts: which there are, how they start a program, and whether they hold."""
