"""The browser of a workspace: a session program that runs Chromium and acts in it.

May import: host, sessions.
Start with: session.
"""
