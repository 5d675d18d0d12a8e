"""What a workspace begins with: repositories are cloned and archives unpacked, in the sandbox.

Start with: workspace_opener.
"""
