"""The secrets of conversations: kept encrypted, given to one command at a time, masked in everything else.

Start with: secrets.
"""
