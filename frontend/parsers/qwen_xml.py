"""Tool calls of Qwen3-Coder: XML-like tags with arguments as bare text, converted to JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from core.types.json_schema import target
from frontend.parsers.scanner import Reading, Scanner, overlap

_MAX_NAME = 128
_END = "</parameter>"
_BY_JSON = {"integer", "number", "boolean", "object", "array", "null"}
_BY_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
            dict: "object", list: "array"}  # fmt: skip
_MAX_DEPTH = 16  # of references
_MAX_PARTS = 64  # of a schema, in which a parameter is searched


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
    types, opening = _Types(schema), "{"
    while (yield from scan.optional("<parameter=")):
        key = yield from scan.before(">", most=_MAX_NAME)
        if not (yield from scan.optional(">")):
            return False
        head, kinds = f"{opening}{json.dumps(key)}: ", types.of_parameter(key)
        if kinds <= {"string"}:
            yield from _streamed_string(scan, head)
        else:
            value = yield from scan.before(_END)
            if scan.rest.startswith(_END):
                scan.emit_arguments(head + _as_json(value, kinds))
            elif scan.is_ended:
                begun = scan.take(len(scan.rest) - _end_overlap(scan.rest)).removeprefix("\n")
                scan.emit_arguments(head + (json.dumps(begun, ensure_ascii=False)[:-1] if "string" in kinds else begun))
        if not (yield from scan.optional(_END)):
            return False
        opening = ", "
    if not (yield from scan.optional("</function>")):
        return False
    scan.emit_arguments("{}" if opening == "{" else "}")
    return True


def _streamed_string(scan: Scanner, head: str) -> Reading[None]:
    """Emit `head` and a string, as it arrives, up to the end of the parameter. One line break at each end is markup."""
    while not scan.rest and not scan.is_ended:
        yield
    if scan.rest.startswith("\n"):
        scan.take(1)
    head += '"'
    while True:
        at = scan.rest.find(_END)
        is_whole = at >= 0
        if not is_whole:
            at = len(scan.rest) - _end_overlap(scan.rest)
        text = scan.take(at)
        if is_whole:
            text = text.removesuffix("\n")
        scan.emit_arguments(head + json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if is_whole else ""))
        if is_whole or scan.is_ended:
            return
        head = ""
        yield


def _end_overlap(text: str) -> int:
    """Return how many of the last characters may belong to the end of a parameter."""
    return max(overlap(text, f"\n{_END}"), overlap(text, _END))


def _as_json(value: str, types: set[str]) -> str:
    """Return the value as JSON: a string, unless its schema allows another type and the value parses as one.

    One line break at each end is markup.
    """
    text = value.removeprefix("\n").removesuffix("\n")
    if types & _BY_JSON and ("string" not in types or text.strip() == "null"):
        for word in (text.strip(), text.strip().lower()):  # accept Python's True and False
            try:
                json.loads(word, parse_constant=_reject)
            except (ValueError, RecursionError):
                continue
            return word
    return json.dumps(text, ensure_ascii=False)


class _Types:
    """JSON types of a call's parameters. The client's schema is not validated."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._known: dict[str, set[str]] = {}  # by reference

    def of_parameter(self, name: str) -> set[str]:
        """Return all types that a parameter's schema allows, or an empty set if it allows any."""
        return self._of(self._found(name), 0)

    def _found(self, name: str) -> Any:
        """Return the schema of a parameter; None if there is none."""
        parts = [self._document]
        for part in parts:
            properties = part.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                return properties[name]
            more = (self._target(part), *_listed(part.get("allOf")))
            parts += [one for one in more if isinstance(one, Mapping)][: max(0, _MAX_PARTS - len(parts))]
        return None

    def _of(self, schema: Any, depth: int) -> set[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return set()
        named = schema.get("type")
        rules = [{named} if isinstance(named, str) else {one for one in _listed(named) if isinstance(one, str)}]
        rules.append(self._of_reference(schema, depth + 1))
        rules += [self._of(one, depth + 1) for one in _listed(schema.get("allOf"))]
        for choice in ("anyOf", "oneOf"):
            found = [self._of(one, depth + 1) for one in _listed(schema.get(choice))]
            rules.append(set().union(*found) if all(found) else set())
        constants = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        rules.append({_TYPE_OF[type(one)] for one in constants if type(one) in _TYPE_OF})
        if not any(rules):
            return {name for key, name in _BY_KEYWORD.items() if key in schema}
        return set.intersection(*({*rule, "integer"} if "number" in rule else rule for rule in rules if rule))

    def _of_reference(self, schema: Mapping[str, Any], depth: int) -> set[str]:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return set()
        if reference not in self._known:
            self._known[reference] = set()  # until it is known, for cycles
            self._known[reference] = self._of(self._target(schema), depth)
        return self._known[reference]

    def _target(self, schema: Mapping[str, Any]) -> Any:
        reference = schema.get("$ref")
        with suppress(LookupError):
            return target(self._document, reference) if isinstance(reference, str) else None
        return None


def _listed(value: Any) -> list[Any]:
    """Return a list, or an empty one for another type: the client's schema is not validated."""
    return value if isinstance(value, list) else []


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
