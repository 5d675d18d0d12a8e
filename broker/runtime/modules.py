"""Imports the modules of a folder for the classes that they define."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any


def import_modules(package: ModuleType) -> list[ModuleType]:
    """Import the modules of a package, in the order of their names. Subfolders are left out."""
    found = pkgutil.iter_modules(package.__path__)
    return [import_module(f"{package.__name__}.{module.name}") for module in found if not module.ispkg]


def find_classes(package: ModuleType) -> list[Any]:
    """Return the public classes that the modules of a package define."""
    return [
        value
        for module in import_modules(package)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
