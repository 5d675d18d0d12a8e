"""What every test shares: how Hypothesis runs.

Holds: no example is failed for being slow on a busy machine, and a failure prints what reproduces it.
"""

from hypothesis import settings

settings.register_profile("deckhands", deadline=None, print_blob=True)
settings.load_profile("deckhands")
