"""The browser of a workspace: a session program that runs Chromium and acts in it.

Start with: session.
"""
