"""Sandboxes around workspace hosts, their self-test, and the proxy for network access.

Start with: sandbox.
"""
