"""Tool calls of Qwen3-Coder: XML-like tags with arguments as bare text, converted to JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from frontend.parsers.scanner import Reading, Scanner

_MAX_NAME = 128
_BY_JSON = {"integer", "number", "boolean", "object", "array", "null"}


def qwen3_coder(scan: Scanner) -> Reading[None]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>, once for each call."""
    while marker := (yield from scan.text_until("<tool_call>", "<function=")):
        if marker == "<tool_call>" and not (yield from scan.optional("<function=")):
            scan.give_up()
            continue
        name = yield from scan.before(">", most=_MAX_NAME)
        if name not in scan.tools or not (yield from scan.optional(">")):
            scan.give_up()
            continue
        scan.begin(name)
        if (yield from _parameters(scan, scan.tools[name])):
            scan.end_call()
            yield from scan.optional("</tool_call>")
        else:
            scan.give_up()


def _parameters(scan: Scanner, schema: Mapping[str, Any]) -> Reading[bool]:
    """Read up to the end of the function. Return whether it was found."""
    properties = schema.get("properties")
    opening = "{"
    while (yield from scan.optional("<parameter=")):
        key = yield from scan.before(">", most=_MAX_NAME)
        yield from scan.optional(">")
        value = yield from scan.before("</parameter>")
        if not (yield from scan.optional("</parameter>")):
            return False
        about = properties.get(key) if isinstance(properties, Mapping) else None
        scan.emit_arguments(f"{opening}{json.dumps(key)}: {_as_json(value, about)}")
        opening = ", "
    if not (yield from scan.optional("</function>")):
        return False
    scan.emit_arguments("{}" if opening == "{" else "}")
    return True


def _as_json(value: str, schema: Any) -> str:
    """Return the value as JSON: a string, unless the schema allows another type and the value parses as one.

    One line break at each end is markup.
    """
    text = value.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if types & _BY_JSON and ("string" not in types or text.strip() == "null"):
        for word in (text.strip(), text.strip().lower()):  # accept Python's True and False
            try:
                json.loads(word, parse_constant=_reject)
            except (ValueError, RecursionError):
                continue
            return word
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """Return all types that a schema allows, directly or in anyOf and oneOf."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else {one for one in _listed(named) if isinstance(one, str)}
    for choice in ("anyOf", "oneOf"):
        for one in _listed(schema.get(choice)):
            types |= {one["type"]} if isinstance(one, Mapping) and isinstance(one.get("type"), str) else {"object"}
    return types


def _listed(value: Any) -> list[Any]:
    """Return a list, or an empty one for another type: the client's schema is not validated."""
    return value if isinstance(value, list) else []


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
