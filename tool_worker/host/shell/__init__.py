"""The persistent bash of a workspace host: its terminal, its commands and their output. Standard library only.

May import: host.
Start with: bash_session.
"""
