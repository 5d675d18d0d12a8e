"""The browser of a workspace: a session program that keeps Chromium and acts in it (OpenHands 10.6)."""
