"""Validates the structured output of an agent against a JSON Schema (2020-12).

Holds: a pure function of schema and value. References outside the schema are never fetched. No schema and no value can
block a worker: patterns match in linear time, and a validation has a bounded number of steps. The error texts are ours,
so a replay with another version of the library gives the same texts.
Does not: check `format`, which is optional in JSON Schema.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from broker.runtime import UsageError

if TYPE_CHECKING:
    import jsonschema
    from pydantic_core import SchemaValidator

MAX_VIOLATIONS = 10
MAX_SHOWN_CHARS = 300
MAX_ERRORS = 100
"""Errors of one validation that are looked for."""
MAX_STEPS = 50_000
"""Keywords of one validation, each with its parts and the size of its value: at most about half a second of CPU."""
SIZE_OF_VALUE = 200
"""Characters that cost as much as a value of any kind."""
SIZE_PER_STEP = 4_000
"""Characters of a value that cost as much as a keyword."""
MATCHES_PER_STEP = 2_000
"""Characters of a text, each compared with all places of a pattern, that cost as much as a keyword."""
PLACES_PER_STEP = 20
"""Places of a pattern whose compilation costs as much as a keyword."""
MAX_SCHEMA_DEPTH = 40
"""Levels of objects and lists in a schema."""
MAX_OUTPUT_DEPTH = 200
MAX_DEPTH = 100
"""Keywords checked within each other. Deeper recursion would end in a panic of the library, which is partly in Rust."""
LOCAL_REFERENCES = ("$ref", "$dynamicRef")
_TOO_DEEP = f"it has more than {MAX_SCHEMA_DEPTH} levels of objects and lists"
_FOR_THE_WHOLE = ("$schema", "$id")
_ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""Classes of JSON Schema's patterns that have more characters in Rust's."""
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_COMPARED = ("$dynamicRef", "$ref", "const", "dependentRequired", "enum", "not")
"""Keywords whose own value is read whole."""
_PATTERN_TOKEN = re.compile(
    r"(?P<unicode>\\[pP](?:\{[^}]*\}|.))|\\[xuU]\{[^}]*\}|\\.|\{\s*(?P<least>\d+)\s*(?P<more>,\s*(?P<most>\d*)\s*)?\}|.",
    re.DOTALL,
)
_VERBOSE_FLAG = re.compile(r"\(\?[a-zA-Z-]*x")
_UNICODE_PLACES = 20
_UNICODE_COMPILATION = 25
"""How much more the compilation of a class of Unicode costs than that of as many places."""

_Keyword = Callable[[Any, Any, Any, Any], Iterable["jsonschema.ValidationError"] | None]


class _UnusableSchemaError(ValueError):
    """The schema, or a validation by it, is not supported. The text is the reason."""


def check_output_schema(schema: Mapping[str, Any]) -> None:
    """Check that a schema can be used for validation.

    Raises:
        UsageError: it is not a JSON Schema, has external references, or does not describe an object.
    """
    remedy = "Write a JSON Schema (2020-12) of the type object that refers to nothing outside of itself."
    if schema.get("type") != "object":
        raise UsageError("The schema of the output is not of the type object.", remedy=remedy)
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise UsageError(f"The schema of the output cannot be used: {_TOO_DEEP}", remedy=remedy)
    outside = next((ref for ref in _find_references(schema) if not ref.startswith("#")), None)
    if outside is not None:
        raise UsageError(f"The schema of the output refers to {outside!r}.", remedy=remedy)
    try:
        _Validation(schema)
    except ValueError as error:
        raise UsageError(f"The schema of the output cannot be used: {error}", remedy=remedy) from error


def find_violations(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return the violations of a schema as texts for a model, sorted by location; empty if the value is valid.

    An invalid schema is reported as a violation, too.
    """
    try:
        found = list(islice(_Validation(schema).find_errors(value), MAX_ERRORS))
    except ValueError as error:
        return [f"the schema cannot be used: {error}"]
    problems = sorted({("/" + "/".join(map(str, error.absolute_path)), _describe_violation(error)) for error in found})
    shown = [f"{place}: {words}" for place, words in problems[:MAX_VIOLATIONS]]
    left = len(problems) - len(shown)
    return [*shown, f"and {'at least ' * (len(found) == MAX_ERRORS)}{left} more"] if left else shown


class _Validation:
    """One validation: the library's keywords with a bound on their steps, and those with patterns in linear time.

    Raises:
        _UnusableSchemaError: on creation, the schema is invalid.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        import jsonschema
        import referencing.exceptions
        from referencing.jsonschema import DRAFT202012, SchemaRegistry

        if _is_deeper(schema, MAX_SCHEMA_DEPTH):
            raise _UnusableSchemaError(_TOO_DEEP)
        self._steps_left = MAX_STEPS
        self._depth = 0
        self._in_progress: set[tuple[str, int]] = set()
        self._patterns: dict[str, tuple[SchemaValidator, int]] = {}
        self._sizes: dict[int, int] = {}
        # Another dialect could not be fetched, and an id is for references from outside.
        local = {name: part for name, part in schema.items() if name not in _FOR_THE_WHOLE}
        base = jsonschema.Draft202012Validator
        registry: SchemaRegistry = SchemaRegistry()
        self._resolver = registry.resolver_with_root(DRAFT202012.create_resource(local))
        try:
            base.check_schema(local, format_checker=jsonschema.FormatChecker(formats=()))
            self._check_parts(local)
        except jsonschema.SchemaError as error:
            raise _UnusableSchemaError(error.message[:MAX_SHOWN_CHARS]) from error
        except referencing.exceptions.Unresolvable as error:
            raise _UnusableSchemaError(f"{error.ref} is not part of the schema") from error
        own: dict[str, _Keyword] = {
            "additionalProperties": self._check_additional,
            "anyOf": _check_any,
            "multipleOf": partial(_check_multiple, base.VALIDATORS["multipleOf"]),
            "oneOf": _check_one,
            "pattern": self._check_pattern,
            "patternProperties": self._check_pattern_properties,
            "required": self._check_required,
            "unevaluatedItems": self._check_unevaluated_items,
            "unevaluatedProperties": self._check_unevaluated_properties,
            "uniqueItems": self._check_unique,
            **{name: partial(self._follow, base.VALIDATORS[name]) for name in LOCAL_REFERENCES},
        }
        keywords = {name: self._count(name, own.get(name, keyword)) for name, keyword in base.VALIDATORS.items()}
        self._validator = jsonschema.validators.extend(base, keywords)(local, registry=registry)

    def find_errors(self, value: Any) -> Iterator[jsonschema.ValidationError]:
        """Yield the errors of a value.

        Raises:
            _UnusableSchemaError: the schema and the value together need too many steps, or are nested too deeply.
        """
        if _is_deeper(value, MAX_OUTPUT_DEPTH):
            raise _UnusableSchemaError(f"the output has more than {MAX_OUTPUT_DEPTH} levels")
        _measure(value, self._sizes)  # by id, which holds as long as the value
        yield from self._validator.iter_errors(value)

    def _check_parts(self, schema: Any) -> None:
        """Check the references and patterns of a schema and of those in it."""
        from referencing.jsonschema import DRAFT202012

        parts = [schema]
        while parts:
            part = parts.pop()
            parts += [resource.contents for resource in DRAFT202012.create_resource(part).subresources()]
            if isinstance(part, bool):
                continue
            for name in _FOR_THE_WHOLE:
                if name in part:
                    raise _UnusableSchemaError(f"a part of it has {name}")
            for name in LOCAL_REFERENCES:
                if name in part:
                    self._resolver.lookup(part[name])
            for pattern in (*part.get("patternProperties", ()), *([part["pattern"]] if "pattern" in part else ())):
                self._is_match(pattern, "")

    def _count(self, name: str, keyword: _Keyword) -> _Keyword:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
            self._take_steps(1 + (len(value) if isinstance(value, list | dict) else 0))
            self._take_size(instance)
            if name in _COMPARED:
                self._take_steps(_measure(value, {}) // SIZE_PER_STEP)
            with self._one_deeper():
                for error in keyword(validator, value, instance, schema) or ():
                    self._take_steps(1)
                    # The library's text holds the whole instance, and the exception's arguments hold the text.
                    error.message = error.message[:MAX_SHOWN_CHARS]
                    error.args = ()
                    yield error

        return counted

    def _take_size(self, value: Any) -> None:
        self._take_steps(_measure(value, self._sizes) // SIZE_PER_STEP)

    def _take_steps(self, number: int) -> None:
        self._steps_left -= number
        if self._steps_left < 0:
            raise _UnusableSchemaError(f"it takes more than {MAX_STEPS:,} steps for this output")

    @contextmanager
    def _one_deeper(self) -> Iterator[None]:
        if self._depth == MAX_DEPTH:
            raise _UnusableSchemaError("it or the output is nested too deeply")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _is_match(self, pattern: str, text: str) -> bool:
        """Return whether a pattern is found in a text, in a time proportional to its length."""
        from pydantic_core import SchemaError, SchemaValidator, core_schema

        if pattern not in self._patterns:
            if _VERBOSE_FLAG.search(pattern):
                raise _UnusableSchemaError(f"{pattern[:MAX_SHOWN_CHARS]!r} has the flag x")
            places = _count_places(pattern)
            has_classes = "\\p" in pattern.lower()
            self._take_steps(places * (_UNICODE_COMPILATION if has_classes else 1) // PLACES_PER_STEP)
            translated = re.sub(
                r"\\(.)", lambda found: _ASCII_CLASSES.get(found[1], found[0]), pattern, flags=re.DOTALL
            )
            rule = core_schema.str_schema(pattern=translated, regex_engine="rust-regex")
            try:
                self._patterns[pattern] = SchemaValidator(rule), places
            except SchemaError as error:
                raise _UnusableSchemaError(f"{pattern[:MAX_SHOWN_CHARS]!r} is not a pattern in linear time") from error
        compiled, places = self._patterns[pattern]
        self._take_steps(1 + places * len(text) // MATCHES_PER_STEP)
        return compiled.isinstance_python(text)

    def _follow(self, keyword: _Keyword, validator: Any, ref: str, instance: Any, schema: Any) -> Any:
        """Follow a reference, except within itself for the same value."""
        step = (ref, id(instance))
        if step in self._in_progress:
            return
        self._in_progress.add(step)
        try:
            yield from keyword(validator, ref, instance, schema) or ()
        finally:
            self._in_progress.remove(step)

    def _check_pattern(self, validator: Any, pattern: str, instance: Any, _: Any) -> Any:
        if validator.is_type(instance, "string") and not self._is_match(pattern, instance):
            yield _build_error("the pattern is not found")

    def _check_pattern_properties(self, validator: Any, patterns: Mapping[str, Any], instance: Any, _: Any) -> Any:
        if not validator.is_type(instance, "object"):
            return
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if self._is_match(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)

    def _check_additional(self, validator: Any, part: Any, instance: Any, schema: Any) -> Any:
        if not validator.is_type(instance, "object"):
            return
        known = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        names = [
            name for name in instance if name not in known and not any(self._is_match(one, name) for one in patterns)
        ]
        yield from _check_rest(validator, part, {name: instance[name] for name in names})

    def _check_required(self, validator: Any, names: Iterable[str], instance: Any, _: Any) -> Any:
        if validator.is_type(instance, "object"):
            yield from (_build_error(f"{name!r} is missing") for name in names if name not in instance)

    def _check_unique(self, validator: Any, is_wanted: bool, instance: Any, _: Any) -> Any:
        if is_wanted and validator.is_type(instance, "array"):
            self._take_size(instance)  # twice, as it is written, too
            if len({json.dumps(_normalize(one), sort_keys=True) for one in instance}) < len(instance):
                yield _build_error("items are equal")

    def _check_unevaluated_properties(self, validator: Any, part: Any, instance: Any, schema: Any) -> Any:
        if validator.is_type(instance, "object"):
            others = {name: rule for name, rule in schema.items() if name != "unevaluatedProperties"}
            known = self._find_evaluated(validator, instance, others)
            rest = {name: value for name, value in instance.items() if name not in known}
            yield from _check_rest(validator, part, rest)

    def _check_unevaluated_items(self, validator: Any, part: Any, instance: Any, schema: Any) -> Any:
        if validator.is_type(instance, "array"):
            others = {name: rule for name, rule in schema.items() if name != "unevaluatedItems"}
            known = self._find_evaluated(validator, instance, others)
            rest = {place: value for place, value in enumerate(instance) if place not in known}
            yield from _check_rest(validator, part, rest)

    def _find_evaluated(self, validator: Any, instance: Any, schema: Any) -> set[Any]:
        """Return the names, or the places, of an instance that a schema and those it applies in place evaluate."""
        if isinstance(schema, bool):
            return set()
        self._take_steps(1 + len(schema))
        self._take_size(instance)
        with self._one_deeper():
            return self._collect_evaluated(validator, instance, schema)

    def _collect_evaluated(self, validator: Any, instance: Any, schema: Mapping[str, Any]) -> set[Any]:
        is_valid = partial(_is_valid, validator)
        applied = [part for name in _IN_PLACE for part in schema.get(name, ()) if is_valid(instance, part)]
        if "if" in schema:
            holds = is_valid(instance, schema["if"])
            applied += [schema["if"]] * holds + [schema.get("then" if holds else "else", True)]
        found: set[Any] = set()
        if isinstance(instance, dict):
            applied += [part for name, part in schema.get("dependentSchemas", {}).items() if name in instance]
            patterns = schema.get("patternProperties", {})
            if {"additionalProperties", "unevaluatedProperties"} & schema.keys():
                found |= instance.keys()
            found |= instance.keys() & schema.get("properties", {}).keys()
            found |= {name for name in instance for one in patterns if self._is_match(one, name)}
        else:
            if {"items", "unevaluatedItems"} & schema.keys():
                found |= set(range(len(instance)))
            found |= set(range(len(schema.get("prefixItems", ()))))
            if "contains" in schema:
                found |= {place for place, value in enumerate(instance) if is_valid(value, schema["contains"])}
        for name in LOCAL_REFERENCES:
            step = (f"evaluated {schema.get(name)}", id(instance))
            if name in schema and step not in self._in_progress:
                self._in_progress.add(step)
                try:
                    found |= self._find_evaluated(validator, instance, self._resolver.lookup(schema[name]).contents)
                finally:
                    self._in_progress.remove(step)
        return found.union(*(self._find_evaluated(validator, instance, part) for part in applied))


def _check_any(validator: Any, parts: Iterable[Any], instance: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
    if not any(_is_valid(validator, instance, part) for part in parts):
        yield _build_error("none of the schemas fits")


def _check_one(validator: Any, parts: Iterable[Any], instance: Any, _: Any) -> Iterator[jsonschema.ValidationError]:
    if len(list(islice((part for part in parts if _is_valid(validator, instance, part)), 2))) != 1:
        yield _build_error("not exactly one of the schemas fits")


def _check_multiple(
    keyword: _Keyword, validator: Any, divisor: Any, instance: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, float) and not math.isfinite(instance):
        yield _build_error("not a number of JSON")
        return
    if isinstance(instance, int) and isinstance(divisor, float) and abs(instance) > sys.float_info.max:
        divisor = Fraction(divisor)  # the library would make a float of the instance
    yield from keyword(validator, divisor, instance, schema) or ()


def _is_valid(validator: Any, instance: Any, part: Any) -> bool:
    return next(validator.descend(instance, part), None) is None


def _check_rest(validator: Any, part: Any, rest: Mapping[Any, Any]) -> Iterator[jsonschema.ValidationError]:
    """Check the properties or items that no other keyword has checked."""
    if part is False:
        if rest:
            yield _build_error(f"{', '.join(repr(name) for name in rest)} may not be there"[:MAX_SHOWN_CHARS])
        return
    for name, value in rest.items():
        yield from validator.descend(value, part, path=name)


def _build_error(text: str) -> jsonschema.ValidationError:
    import jsonschema

    return jsonschema.ValidationError(text)


def _normalize(value: Any) -> Any:
    """Return a value in which equal numbers of JSON are equal in Python's JSON, too."""
    if isinstance(value, dict):
        return {name: _normalize(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _measure(value: Any, sizes: dict[int, int]) -> int:
    """Return the size of a value: its characters, and `SIZE_OF_VALUE` for each value and name in it.

    Args:
        sizes: the known sizes of objects and lists by id; new ones are added.
    """
    if isinstance(value, str):
        return SIZE_OF_VALUE + len(value)
    if isinstance(value, int):
        return SIZE_OF_VALUE + 2 * value.bit_length()
    if not isinstance(value, Mapping | list | tuple):
        return SIZE_OF_VALUE
    if (known := sizes.get(id(value))) is not None:
        return known
    size = SIZE_OF_VALUE
    if isinstance(value, Mapping):
        for name, part in value.items():
            size += SIZE_OF_VALUE + len(name) + _measure(part, sizes)
    else:
        for part in value:
            size += _measure(part, sizes)
    sizes[id(value)] = size
    return size


def _count_places(pattern: str) -> int:
    """Return about how many places a pattern has once its repetitions are written out."""
    open_groups: list[int] = []
    size = last = depth = 0  # of the open group, and of the latest part, which a repetition multiplies
    is_first = False  # in brackets, where a closing one is a character
    for token in _PATTERN_TOKEN.finditer(pattern):
        text = token[0]
        is_start, was_first = False, is_first
        if text == "[" or (text == "(" and not depth):
            open_groups.append(size)
            size = last = 0
            depth += text == "["
            is_start = text == "["
        elif open_groups and ((text == "]" and depth and not was_first) or (text == ")" and not depth)):
            depth -= text == "]"
            last = max(1, size)
            size = open_groups.pop() + last
        elif token["least"] and not depth:
            times = max(1, int(token["least"]), int(token["most"] or 0)) + (token["more"] is not None)
            size += last * (times - 1)
            last *= times
        elif depth or text not in "*+?":
            last = _UNICODE_PLACES if token["unicode"] else len(text) if token["least"] else 1
            size += last
            is_start = was_first and text == "^"
        is_first = is_start
    return size + sum(open_groups)


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value has more than a number of levels of objects and lists."""
    parts = [value]
    while parts and levels >= 0:
        parts = [
            inner
            for part in parts
            if isinstance(part, Mapping | list | tuple)
            for inner in (part.values() if isinstance(part, Mapping) else part)
        ]
        levels -= 1
    return bool(parts) and levels < 0


def _find_references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name in LOCAL_REFERENCES and isinstance(part, str):
                yield part
            yield from _find_references(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_references(part)


def _describe_violation(error: jsonschema.ValidationError) -> str:
    keyword = error.validator
    text = _shorten_json(error.validator_value)
    if error.schema is False:
        return "may not be there"
    match keyword:
        case "required":
            return str(error.message)
        case "additionalProperties" | "unevaluatedProperties" | "unevaluatedItems" if error.validator_value is False:
            return str(error.message)
        case "type":
            return f"has to be of the type {text}"
    return f"does not satisfy {keyword}: {text}"


def _shorten_json(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
