"""Interactive terminal programs: `deckhands top`, `deckhands chat`, and shell completion.

Start with: top.
"""
