"""The version of the events' schema, which a process reads without loading the events."""

SCHEMA_VERSION = 1
