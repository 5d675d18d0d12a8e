"""The headless hand-off: the replacement for programs that launch OpenHands headless, and a bridge that runs it.

Start with: bridge.
"""
