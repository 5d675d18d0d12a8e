"""Bytes sealed for one receiver, who alone can open them: what passes through the store without being readable there.

Each receiver makes a key pair for one message and shows its public half. A sender makes another pair, and the two agree
on a key by X25519; it encrypts the message by AES-256-GCM and is used once.

Does not: prove who has sealed a message, or that the public half is the receiver's: who may write to the store could
put another in its place.
"""

from __future__ import annotations

from broker.runtime import CorruptEntry

PUBLIC_BYTES = 32
SEALED_BYTES = PUBLIC_BYTES + 16
"""How much longer a message is when it is sealed."""


class Receiver:
    """The receiver of one message; `public` is what a sender needs."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, about: str) -> bytes:
        """Return what was sealed.

        Args:
            about: what the message is, as its sender has said.

        Raises:
            CorruptEntry: it was sealed for another, or is another message.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        theirs = sealed[:PUBLIC_BYTES]
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
            key = _key(shared, theirs, self.public, about)
            return AESGCM(key).decrypt(bytes(12), memoryview(sealed)[PUBLIC_BYTES:], None)
        except (InvalidTag, ValueError) as error:
            raise CorruptEntry("The files in the store cannot be opened here.", remedy="Copy them again.") from error


def seal(public: bytes, content: bytes, about: str) -> bytes:
    """Return content that only the receiver with this public key can open.

    Raises:
        CorruptEntry: it is no such key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    mine = X25519PrivateKey.generate()
    theirs = mine.public_key().public_bytes_raw()
    try:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise CorruptEntry("The other side of a transfer has shown no usable key.") from error
    return theirs + AESGCM(_key(shared, theirs, public, about)).encrypt(bytes(12), content, None)


def _key(shared: bytes, sender: bytes, receiver: bytes, about: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"deckhands transfer" + sender + receiver + about.encode()).derive(shared)
