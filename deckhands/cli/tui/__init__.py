"""What people use at a terminal: `deckhands top`, `deckhands chat`, and shell completion.

Start with: top.
"""
