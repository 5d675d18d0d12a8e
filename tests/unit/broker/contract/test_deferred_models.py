"""Models that are built when they are first used."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Barrier
from typing import ClassVar

import pytest
from pydantic import BaseModel, Field, PydanticUserError, ValidationError

from broker.contract.actions import MessageAction
from broker.contract.deferred_models import DeferredModel
from broker.contract.kinds import EventValue

READ_ONE_EVENT = """
from pydantic import BaseModel
from broker.contract import MessageAction, codec
entry, _ = codec.to_entry(MessageAction(content="hello").wire())
assert codec.decode(entry, 1).content == "hello"

def find_all(kind):
    return [kind, *(each for child in type.__subclasses__(kind) for each in find_all(child))]

kinds = [kind for kind in find_all(codec.Event) if kind.__module__.startswith("broker.")]
print(len(kinds), sum(type(kind).__name__ == "_Waiting" for kind in kinds))
"""


UNPICKLE = """
import pickle, sys
event = pickle.load(sys.stdin.buffer)
print(event.wire()["content"], hash(event) == hash(type(event)(content="hello")), "__setstate__" in vars(type(event)))
"""


class Base(EventValue):
    note: ClassVar[str] = "of the class"
    size: int = Field(default=1, ge=1)


class Child(Base):
    at: datetime | None = None
    parts: tuple[Base, ...] = ()


class Several(EventValue):
    names: tuple[str, ...] = ("a", "b")


def test_reading_one_event_builds_few_kinds() -> None:
    done = subprocess.run([sys.executable, "-c", READ_ONE_EVENT], capture_output=True, text=True, check=True)
    defined, waiting = map(int, done.stdout.split())
    assert waiting > 30
    assert defined - waiting < 15


def test_unpickled_event_has_all_its_fields() -> None:
    pickled = pickle.dumps(MessageAction(content="hello"))
    done = subprocess.run([sys.executable, "-c", UNPICKLE], input=pickled, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["hello", "True", "False"]


def test_build_that_has_failed_is_tried_again() -> None:
    space = {"__module__": __name__, "__qualname__": "Odd", "unannotated": 1}
    odd = DeferredModel("Odd", (Base,), space)
    for _ in range(2):
        with pytest.raises(PydanticUserError):
            odd()


def test_built_model_validates_and_writes_as_any_other() -> None:
    found = Child.model_validate({"size": 3, "at": "2026-11-30T00:00:00Z", "parts": [{"size": 2}], "other": 1})
    assert found == Child(size=3, at=datetime(2026, 11, 30, tzinfo=UTC), parts=(Base(size=2),))
    assert found.model_dump(mode="json") == {"size": 3, "at": "2026-11-30T00:00:00Z", "parts": [{"size": 2}]}
    assert hash(found) == hash(found.model_copy())
    with pytest.raises(ValidationError):
        Child(size=0)
    with pytest.raises(ValidationError):
        found.size = 4  # type: ignore[misc]


def test_class_variables_are_read_without_a_build() -> None:
    class_of_tests = DeferredModel("Fresh", (Base,), {"__module__": __name__, "__qualname__": "Fresh"})
    assert class_of_tests.note == "of the class"
    assert type(class_of_tests) is not DeferredModel
    assert issubclass(class_of_tests, BaseModel)
    assert list(class_of_tests.model_fields) == ["size"]
    assert type(class_of_tests) is DeferredModel


def test_class_in_a_function_may_name_local_types() -> None:
    class Local(EventValue):
        size: int

    class Holder(EventValue):
        part: Local

    assert Holder.model_validate({"part": {"size": 2}}).part == Local(size=2)


def test_threads_build_a_model_once() -> None:
    barrier = Barrier(8)

    def use(_: int) -> tuple[str, ...]:
        barrier.wait()
        return Several().names

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(8))) == {("a", "b")}
