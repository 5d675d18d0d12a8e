"""The version of the events' schema, which a process reads without loading the events."""

SCHEMA_VERSION = 2
"""Version 2 has the fields of version 1; its entries are compressed with a dictionary, which earlier versions of
Deckhands do not have. They leave a conversation with such an entry to a newer worker.
"""
