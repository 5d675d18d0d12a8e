"""What a workspace begins with: repositories are cloned and archives unpacked, in the sandbox.

May import: files, launch, sandbox.
Start with: workspace_opener.
"""
