# SPDX-License-Identifier: Apache-2.0
"""Checks data against a schema, with the keywords of JSON Schema that our schemas use."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from .read_file import shown
from .validate import quoted

Schema = Mapping[str, Any]

LONGEST_TEXT = 2**16  # characters, unless a schema says otherwise
LONGEST_ARRAY = 2**20
ANNOTATIONS = {"$schema", "$id", "title", "description", "then", "properties", "maxLength", "maxItems"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and abs(value) <= 1e308


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
    "array": lambda value: isinstance(value, (list, tuple)),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_finite,
    "integer": _is_integer,
    "any number": _is_number,  # NaN and infinity included; not of JSON Schema
}

# keyword -> (does it hold, the words for a value for which it does not); the value has the right type
Rule = tuple[Callable[[Any, Any], bool], str]
RULES: dict[str, Rule] = {
    "const": (lambda rule, value: value == rule and type(value) is type(rule), "must be {}"),
    "enum": (lambda rule, value: value in rule, "must be one of {}"),
    "minimum": (lambda rule, value: not _is_number(value) or value >= rule or math.isnan(value), "must be at least {}"),
    "maximum": (lambda rule, value: not _is_number(value) or value <= rule or math.isnan(value), "must be at most {}"),
    "exclusiveMinimum": (lambda rule, value: not _is_number(value) or value > rule, "must be above {}"),
    "exclusiveMaximum": (lambda rule, value: not _is_number(value) or value < rule, "must be below {}"),
    "pattern": (lambda rule, value: not isinstance(value, str) or bool(re.fullmatch(rule, value)), "must match {}"),
    "minItems": (lambda rule, value: not isinstance(value, (list, tuple)) or len(value) >= rule, "must have {} items"),
}


def violation(schema: Schema, value: Any, where: str = "") -> str:
    """Returns what is wrong with a value, in words, such as ``privacy.delta is 7: must be below 1``; "" if nothing is.

    A number must be finite, texts have at most 65,536 characters and arrays 1,048,576 items, unless ``maxLength`` or
    ``maxItems`` allow more. An unknown keyword is an error of the schema.
    """
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(TYPES[kind](value) for kind in kinds):
        return _said(where, value, f"must be {' or '.join(kinds)}")
    if isinstance(value, str) and len(value) > schema.get("maxLength", LONGEST_TEXT):
        return f"{where or 'it'} has {len(value)} characters"
    if isinstance(value, (list, tuple)) and len(value) > schema.get("maxItems", LONGEST_ARRAY):
        return f"{where or 'it'} has {len(value)} items"
    for keyword, rule in schema.items():
        found = _violation_of(keyword, rule, schema, value, where)
        if found:
            return found
    return ""


def _violation_of(keyword: str, rule: Any, schema: Schema, value: Any, where: str) -> str:
    """Returns what is wrong with a value by one keyword."""
    if keyword in RULES:
        holds, words = RULES[keyword]
        return "" if holds(rule, value) else _said(where, value, words.format(_shown_rule(rule)))
    if keyword == "required":
        lacking = [name for name in rule if isinstance(value, dict) and name not in value]
        return f"{where} has no {quoted(lacking, at_most=5)}".lstrip() if lacking else ""
    if keyword == "items":
        parts = enumerate(value if isinstance(value, (list, tuple)) else ())
        return _first(violation(rule, part, f"{where}[{number}]") for number, part in parts)
    if keyword == "oneOf":
        holds = sum(not violation(one, value, where) for one in rule) == 1
        return "" if holds else f"{where or 'it'} must be of one of {len(rule)} kinds"
    if keyword == "if":
        return violation(schema["then"], value, where) if not violation(rule, value, where) else ""
    if keyword == "additionalProperties":
        known = schema.get("properties", {})
        others = [name for name in value if name not in known] if isinstance(value, dict) else []
        if rule is False:
            return f"{where} has an unknown entry {shown(others[0])}".lstrip() if others else ""
        return _first(violation(rule, value[name], _below(where, name)) for name in others)
    assert keyword == "type" or keyword in ANNOTATIONS, f"the validator does not know {keyword!r}"
    if keyword != "properties" or not isinstance(value, dict):
        return ""
    return _first(violation(rule[name], value[name], _below(where, name)) for name in rule if name in value)


def _first(found: Any) -> str:
    return next(filter(None, found), "")


def _below(where: str, name: str) -> str:
    name = name if name.isidentifier() and name.isascii() and len(name) < 60 else shown(name)
    return f"{where}.{name}" if where else name


def _said(where: str, value: Any, words: str) -> str:
    return f"{where or 'it'} is {shown(value)}: {words}"


def _shown_rule(rule: Any) -> str:
    """Returns what a keyword asks for, for a message."""
    return ", ".join(map(repr, rule)) if isinstance(rule, (list, tuple)) else f"{rule!r}"
