"""Acts: the only package that touches a workspace. Takes actions from streams and appends one observation for each."""
