"""What each kind of action does in a workspace, and what is observed of it."""
