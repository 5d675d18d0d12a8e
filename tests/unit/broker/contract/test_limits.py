"""What a conversation may use up, as somebody writes it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from broker.contract.specs import Limits


@pytest.mark.parametrize("name", Limits.model_fields)
@pytest.mark.parametrize("flag", [False, True])
def test_a_flag_is_no_limit(name: str, flag: bool) -> None:
    with pytest.raises(ValidationError, match="is not a number"):
        Limits.model_validate({name: flag})


def test_a_table_has_its_numbers_as_texts() -> None:
    assert Limits.model_validate({"max_iterations": "40", "max_budget_usd": "0.5"}) == Limits(
        max_iterations=40, max_budget_usd=0.5
    )
