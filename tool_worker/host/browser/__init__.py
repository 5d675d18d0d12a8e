"""The browser of a workspace: a session program that runs Chromium and performs actions in it.

Start with: session.
"""
