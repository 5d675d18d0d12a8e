"""What an owner does whose log no longer holds what it has folded: it names the gap and lets go.

Holds: after that nothing of what it remembers decides anything; the next owner reads the log.
"""

from __future__ import annotations

import logging

from broker.log.follower import check_remembered
from broker.log.lost_tails import name_gap
from broker.runtime.errors import DeckhandsError, EventsLost
from controller_worker.services import Services

NOTICED_BY = "a controller worker"

_log = logging.getLogger(__name__)


async def name_lost_tail(
    services: Services, conversation_id: str, version: int, checksum: str, error: Exception | None = None
) -> bool:
    """Return whether the log has lost its end, and name the gap in it if so.  Raises nothing.

    Args:
        version: the last event that was folded.
        checksum: its, see `codec.checksum_of`.
        error: what went wrong, where it may be for that reason.
    """
    try:
        try:
            if isinstance(error, EventsLost) and error.conversation_id == conversation_id:
                raise error
            await check_remembered(services.store, conversation_id, version, checksum)
        except EventsLost as lost:
            _log.warning("conversation %s: %s", conversation_id, lost.message)
            await name_gap(services.log, lost, noticed_by=NOTICED_BY)
            return True
    except DeckhandsError as other:  # the conversation is gone as a whole, or the store is
        _log.warning("conversation %s: %s", conversation_id, other)
    return False
