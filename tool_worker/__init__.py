"""The tool worker, the only package that touches workspaces: runs actions and appends their observations."""
