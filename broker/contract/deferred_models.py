"""Pydantic models that are built when they are first used.

Pydantic collects the fields of a model while its class statement runs, which costs 2.6 million instructions. A command
that reads a log defines 150 models and uses 40, so these classes are built late.

Holds: once a class is built, it is an ordinary model at the usual speed. Before that, it has its methods, its class
variables and its bases. The first access to an attribute of Pydantic builds it, and so does the first object, even an
unpickled one.
Does not: defer classes inside functions, whose annotations may name local variables.
"""

from __future__ import annotations

import threading
from abc import ABCMeta
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name

_BUILDS = ("__pydantic_", "model_", "__get_pydantic_", "__class_vars__", "__private_attributes__", "__signature__")
"""How the names of attributes start that exist only when a class is built."""
_CLASS = "__deferred_class__"

_lock = threading.RLock()
_waiting: dict[type, dict[str, Any]] = {}
"""The namespaces of the classes that wait."""


class _KeepClass(ABCMeta):
    """Makes Pydantic complete an existing class instead of creating one."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        if (kept := namespace.pop(_CLASS, None)) is None:
            return super().__new__(mcs, name, bases, namespace, **kwargs)
        for key in ("model_config", "__class_vars__", "__private_attributes__"):
            setattr(kept, key, namespace[key])
        return kept


def _set_state(self: Any, state: dict[Any, Any]) -> None:
    """Restore an unpickled object whose class is not built yet: unpickling does not call the class."""
    _build(type(self))
    self.__setstate__(state)  # now Pydantic's


class DeferredModel(ModelMetaclass, _KeepClass):
    """The metaclass of models that are built when they are first used."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        """Create a class that waits."""
        if kwargs or "<locals>" in namespace["__qualname__"]:
            return super().__new__(mcs, name, bases, namespace, **kwargs)
        cls = ABCMeta.__new__(_Waiting, name, bases, {"__setstate__": _set_state} | namespace)
        _waiting[cls] = namespace
        return cls


class _Waiting(DeferredModel):
    """The metaclass of a class that is not built yet. Building the class removes it."""

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith(_BUILDS):
            _build(cls)
        return type.__getattribute__(cls, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _build(cls)
        return type.__call__(cls, *args, **kwargs)


def _build(cls: Any) -> None:
    """Build a class and its bases. Another thread waits until they are built. If it fails, the next use tries again."""
    with _lock:
        if (namespace := _waiting.pop(cls, None)) is None:
            return
        try:
            for base in cls.__mro__[1:]:
                if type(base) is _Waiting:
                    _build(base)
            build, content = super(DeferredModel, DeferredModel).__new__, namespace | {_CLASS: cls}
            build(DeferredModel, cls.__name__, cls.__bases__, content, __pydantic_reset_parent_namespace__=False)
        except BaseException:
            _waiting[cls] = namespace
            raise
        cls.__class__ = DeferredModel
        if cls.__dict__.get("__setstate__") is _set_state:
            del cls.__setstate__
