# SPDX-License-Identifier: Apache-2.0
"""Validates data against a JSON schema with the keywords that our schema uses; refuses other keywords."""

import re
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
ANNOTATIONS = {"$schema", "$id", "title", "description", "then", "maxLength"}


def _is(kind: str, value: Any) -> bool:
    if kind in ("number", "integer"):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and (kind == "number" or value == int(value))
    return isinstance(value, TYPES[kind])


def _number(value: Any) -> bool:
    return _is("number", value)


RULES = {  # keyword -> function that is true if a value satisfies it
    "type": lambda rule, value: any(_is(kind, value) for kind in ([rule] if isinstance(rule, str) else rule)),
    "const": lambda rule, value: value == rule and type(value) is type(rule),
    "enum": lambda rule, value: value in rule,
    "minimum": lambda rule, value: not _number(value) or value >= rule,
    "maximum": lambda rule, value: not _number(value) or value <= rule,
    "exclusiveMinimum": lambda rule, value: not _number(value) or value > rule,
    "exclusiveMaximum": lambda rule, value: not _number(value) or value < rule,
    "pattern": lambda rule, value: not isinstance(value, str) or re.search(rule, value) is not None,
    "oneOf": lambda rule, value: sum(not violations(one, value) for one in rule) == 1,
    "required": lambda rule, value: not isinstance(value, dict) or set(rule) <= set(value),
}


def violations(schema: dict[str, Any], value: Any, path: str = "$") -> list[str]:
    """Returns every violation of the schema, as ``path: keyword``."""
    found = []
    for keyword, rule in schema.items():
        if keyword in RULES:
            found += [] if RULES[keyword](rule, value) else [f"{path}: {keyword}"]
        elif keyword == "properties":
            parts = value if isinstance(value, dict) else {}
            found += [
                bad
                for name in parts.keys() & rule.keys()
                for bad in violations(rule[name], parts[name], f"{path}.{name}")
            ]
        elif keyword == "additionalProperties":
            others = value.keys() - schema.get("properties", {}).keys()
            found += [bad for name in others for bad in violations(rule, value[name], f"{path}.{name}")]
        elif keyword == "items":
            parts = value if isinstance(value, list) else []
            found += [bad for index, part in enumerate(parts) for bad in violations(rule, part, f"{path}[{index}]")]
        elif keyword == "if":
            found += violations(schema["then"], value, path) if not violations(rule, value, path) else []
        else:
            assert keyword in ANNOTATIONS, f"the validator does not know {keyword!r}"
    return found
