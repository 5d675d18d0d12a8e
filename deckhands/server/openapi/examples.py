"""Examples for whole bodies, assembled from the examples of their parts.

Holds: no value is invented: each is an example, a default or the only choice of a schema.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

PARTS = "#/components/schemas/"


class NoExample(Exception):
    """A part has no example; the text names the part."""


class Examples:
    """Builds examples for the schemas of a document.

    Args:
        schemas: the components of the document, by name.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas

    def of(self, schema: Mapping[str, Any], where: str = "body") -> Any:
        """Return an example of a schema.

        Raises:
            NoExample: a required part has none.
        """
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix(PARTS)
            return self.of({**self._schemas[name], **{k: v for k, v in schema.items() if k != "$ref"}}, name)
        for found in ("example", "const", "default"):
            if found in schema:
                return copy.deepcopy(schema[found])
        for several in ("examples", "enum"):
            if schema.get(several):
                return copy.deepcopy(schema[several][0])
        for choices in ("anyOf", "oneOf", "allOf"):
            if choices in schema:
                return self.of(schema[choices][0], where)
        if schema.get("type") == "object" and "properties" in schema:
            return self._object(schema, where)
        if schema.get("type") == "array" and "items" in schema:
            return [self.of(schema["items"], f"{where}[]")]
        if schema.get("type") == "boolean":
            return True
        if schema.get("type") == "null":
            return None
        raise NoExample(where)

    def _object(self, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the required properties, and the optional ones that have an example."""
        needed = schema.get("required", ())
        shown = {
            name: part
            for name, part in schema["properties"].items()
            if name in needed or {"example", "examples"} & part.keys()
        }
        return {name: self.of(part, f"{where}.{name}") for name, part in shown.items()}
