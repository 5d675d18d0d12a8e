"""The secrets of conversations: kept encrypted, given to one command at a time, masked in everything else.

May import: contract, runtime, store.
Start with: secrets.
"""
