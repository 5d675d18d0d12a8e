"""What every test shares: how Hypothesis runs, and the stores.

Holds: no example is failed for being slow on a busy machine, and a failure prints what reproduces it.
"""

from hypothesis import settings

from tests.stores import (  # noqa: F401  (fixtures)
    clock,
    connect,
    lossy_wire,
    memory_store,
    redis_server,
    store,
    valkey_server,
    valkey_store,
)

settings.register_profile("deckhands", deadline=None, print_blob=True)
settings.load_profile("deckhands")
