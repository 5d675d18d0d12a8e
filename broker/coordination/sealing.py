"""Encrypts bytes for one receiver, so that they pass through the store without being readable there.

Each receiver makes a key pair for one message and publishes its public half. The sender makes another pair, and both
derive a key by X25519. The key encrypts one message by AES-256-GCM.

Does not: authenticate the sender, or prove that a public key is the receiver's. A process that may write to the store
could replace it.
"""

from __future__ import annotations

from broker.runtime import CorruptEntry

PUBLIC_BYTES = 32
SEALED_BYTES = PUBLIC_BYTES + 16
"""Bytes that encryption adds to a message."""


class Receiver:
    """The receiver of one message. The sender needs `public`."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, about: str) -> bytes:
        """Decrypt a sealed message.

        Args:
            about: the sender's description of the message, which is authenticated.

        Raises:
            CorruptEntry: it was sealed for another receiver, or is another message.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        theirs = sealed[:PUBLIC_BYTES]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
            key = _derive_key(shared, theirs, self.public, about)
            return AESGCM(key).decrypt(bytes(12), memoryview(sealed)[PUBLIC_BYTES:], None)
        except (InvalidTag, ValueError) as error:
            raise CorruptEntry("The files in the store cannot be opened here.", remedy="Copy them again.") from error


def seal(public: bytes, content: bytes, about: str) -> bytes:
    """Encrypt content so that only the receiver with this public key can decrypt it.

    Raises:
        CorruptEntry: the public key is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    mine = X25519PrivateKey.generate()
    theirs = mine.public_key().public_bytes_raw()
    try:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise CorruptEntry("The other side of a transfer has no valid public key.") from error
    return theirs + AESGCM(_derive_key(shared, theirs, public, about)).encrypt(bytes(12), content, None)


def _derive_key(shared: bytes, sender: bytes, receiver: bytes, about: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"deckhands transfer" + sender + receiver + about.encode()).derive(shared)
