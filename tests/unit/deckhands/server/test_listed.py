"""A row of a page of conversations is equal to its model's output."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from broker.log.conversations import ConversationRow
from deckhands.server.models import ShownConversation, conversation_json

MOMENTS = (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC))


@pytest.mark.parametrize("not_before", [None, *MOMENTS])
def test_a_row_is_what_its_model_writes(not_before: datetime | None) -> None:
    row = ConversationRow(
        conversation_id="c-1",
        title='a "title" 你',
        state="running",
        wait_reason="quota",
        last_event_id=7,
        created=MOMENTS[0],
        updated=MOMENTS[1],
        owner="worker",
        node="node",
        is_closed=True,
        labels={"team": "poets"},
        not_before=not_before,
        tenant="acme",
        fields={"iterations": "3", "cost_usd": "0.1", "model": "m", "other": "x"},
    )
    found = conversation_json(row)
    assert ShownConversation.model_validate(found).model_dump(mode="json") == found
    assert json.loads(ShownConversation.model_validate(found).model_dump_json()) == found
    assert found.keys() == ShownConversation.model_fields.keys()
    assert found["numbers"] == {"iterations": "3", "cost_usd": "0.1"}
