"""Programs that live beside the shell in a workspace and carry out the calls of one tool each."""
