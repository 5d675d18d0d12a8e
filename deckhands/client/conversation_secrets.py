"""The client's access to secrets: stored before a task is queued, masked in text that users write.

Holds: the key is read when it is first needed, so a client whose conversations have no secrets needs none. A key is
created only when a secret is stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.runtime import BrokerSettings
from broker.secrets import Secrets, SecretValue, load_secret_key
from broker.store import Store


def open_secrets(store: Store) -> Secrets:
    """Return the secrets of a store's conversations, with the key that this environment names."""
    return Secrets(store, lambda: load_secret_key(BrokerSettings.from_env()))


async def store_secrets(secrets: Secrets, conversation_id: str, values: Mapping[str, SecretValue]) -> None:
    """Store secrets for a conversation, which need not have started.

    Raises:
        UsageError: a name or a value cannot be used.
    """
    if values:
        load_secret_key(BrokerSettings.from_env(), is_made=True)
    for name, value in values.items():
        await secrets.put(conversation_id, name, value)
