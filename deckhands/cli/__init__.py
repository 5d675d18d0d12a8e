"""The command line: one file for each family of verbs, loaded when one of its verbs is called."""
