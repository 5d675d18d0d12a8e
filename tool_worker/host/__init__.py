"""What runs inside the sandbox, one process per conversation, from the standard library alone."""
