"""The persistent bash of a workspace host: its terminals, its commands and their output. Standard library only.

Start with: bash_session.
"""
