"""What a request of a tool worker may hold, and how it is refused."""

from __future__ import annotations

FINGERPRINT_LIMIT_CHARS = 64


class Refused(Exception):
    """A request that begins nothing."""

    def __init__(self, code: str, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.answer: dict[str, object] = {"code": code, "message": message, "retryable": is_retryable}


def action_id_of(message: dict[str, object]) -> int:
    """Return the number of the action that a request is about.

    Raises:
        Refused: it has none.
    """
    action_id = message.get("action_id")
    if not isinstance(action_id, int) or isinstance(action_id, bool) or action_id < 0:
        raise Refused("bad_arguments", "`action_id` is not a number from 0 on")
    return action_id


def fingerprint_in(message: dict[str, object]) -> str:
    """Return the fingerprint of the action that a request is about; empty where an older tool worker gives none.

    Raises:
        Refused: it is none; it is going to stand in the journal as it is.
    """
    found = message.get("fingerprint", "")
    if not isinstance(found, str) or len(found) > FINGERPRINT_LIMIT_CHARS or (found and not found.isalnum()):
        raise Refused("bad_arguments", "`fingerprint` is not made of up to 64 letters and digits")
    if not found.isascii():
        raise Refused("bad_arguments", "`fingerprint` is not in ASCII")
    return found
