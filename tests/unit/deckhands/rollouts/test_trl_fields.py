"""The fields that TRL's trainer gets for a trajectory."""

from __future__ import annotations

import math
from array import array

from broker.contract import TokenRecord
from deckhands.client import Segment, Trajectory
from deckhands.rollouts.run import Rollout
from deckhands.rollouts.trl import to_fields


def test_an_unknown_log_probability_is_none() -> None:
    segment = Segment()
    segment.add(1, TokenRecord(array("i", [1, 2]), array("i", [3, 4]), array("f", [math.nan, -1.0]), ((2, 0),)))
    segment.add(2, TokenRecord(array("i", [5]), array("i", [6]), array("f", [-2.0]), ((1, 0),)))
    fields = to_fields(["task"], {"task": [Rollout(Trajectory("c", [segment]), 1.0)]})
    assert fields["completion_ids"] == [[3, 4, 5, 6]]
    assert fields["env_mask"] == [[1, 1, 0, 1]]
    assert fields["logprobs"] == [[None, -1.0, 0.0, -2.0]]
