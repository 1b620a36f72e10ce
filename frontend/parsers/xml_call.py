"""Tool calls whose arguments become JSON: in XML-like tags, where the tool's schema types bare text, and Gemma 4's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from core.types.json_schema import target
from frontend.parsers.json_call import JsonValue
from frontend.parsers.scanner import MAX_NAME, Reading, Scanner, overlap

_BY_JSON = {"integer", "number", "boolean", "object", "array", "null"}
_BY_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
            dict: "object", list: "array"}  # fmt: skip
_MAX_DEPTH = 16  # of references
_MAX_PARTS = 64  # of a schema, in which a parameter is searched


@dataclass(frozen=True, kw_only=True)
class XmlTags:
    """Tags of one model family, in the order in which a call has them."""

    blocks: tuple[str, ...] = ()  # a block of calls begins with any of these
    call: str  # before the name
    name_end: str = ">"  # a tag that begins here is left for what follows
    parameter: str  # before a parameter's name
    key_end: str = ">"
    value: str = ""  # between the parameter's name and its value
    value_end: str
    call_end: str
    block_ends: tuple[str, ...] = ()
    padding: str = ""  # at each end of a value


QWEN3_CODER = XmlTags(  # Seed-OSS names its block differently
    blocks=("<tool_call>", "<seed:tool_call>"), call="<function=", parameter="<parameter=", value_end="</parameter>",
    call_end="</function>", block_ends=("</tool_call>", "</seed:tool_call>"), padding="\n",
)  # fmt: skip
GLM = XmlTags(
    call="<tool_call>", name_end="<", parameter="<arg_key>", key_end="</arg_key>", value="<arg_value>",
    value_end="</arg_value>", call_end="</tool_call>",
)  # fmt: skip
MINIMAX_M2 = XmlTags(
    blocks=("<minimax:tool_call>",), call='<invoke name="', parameter='<parameter name="', value_end="</parameter>",
    call_end="</invoke>", block_ends=("</minimax:tool_call>",),
)  # fmt: skip
_DSML = "｜DSML｜"  # noqa: RUF001 - DeepSeek's own bars
DSML = XmlTags(  # V3.2 names a block function_calls, V4 tool_calls
    blocks=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"), call=f'<{_DSML}invoke name="',
    parameter=f'<{_DSML}parameter name="', value_end=f"</{_DSML}parameter>", call_end=f"</{_DSML}invoke>",
    block_ends=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
)  # fmt: skip


def xml_calls(scan: Scanner, *, tags: XmlTags) -> Reading[None]:
    """Read calls such as <function=NAME><parameter=KEY>value</parameter>…</function>, alone or in a block."""
    while (yield from scan.next_call(tags.call, *tags.blocks)):
        name = _name((yield from scan.before(tags.name_end, most=MAX_NAME)))
        if name not in scan.tools:
            scan.give_up()
            continue
        yield from scan.optional(">")
        scan.begin(name)
        if (yield from _parameters(scan, tags, _Types(scan.tools[name]))):
            scan.end_call()
            for end in tags.block_ends:
                yield from scan.optional(end)
        else:
            scan.give_up()


def _parameters(scan: Scanner, tags: XmlTags, types: _Types) -> Reading[bool]:
    """Read up to the end of the call. Return whether it was found."""
    opening = "{"
    while (yield from scan.optional(tags.parameter)):
        named = yield from scan.before(tags.key_end, most=MAX_NAME)
        if not (yield from scan.optional(tags.key_end)) or (tags.value and not (yield from scan.optional(tags.value))):
            return False
        key = _name(named)
        head, kinds = f"{opening}{json.dumps(key)}: ", _marked(named) or types.of_parameter(key)
        if kinds <= {"string"}:
            scan.emit_arguments(head + '"')
            yield from _streamed_string(scan, tags.value_end, padding=tags.padding)
        else:
            value = (yield from scan.before(tags.value_end)).removeprefix(tags.padding).removesuffix(tags.padding)
            if scan.rest.startswith(tags.value_end):
                text = _as_json(value, kinds)
            else:  # the answer ends here; to read the value again would be quadratic
                begun = _take_begun(scan, tags.value_end, padding=tags.padding).removeprefix(tags.padding)
                text = _begun_as_json(begun, kinds)
            scan.emit_arguments(head + text)
        if not (yield from scan.optional(tags.value_end)):
            return False
        opening = ", "
    if not (yield from scan.optional(tags.call_end)):
        return False
    scan.emit_arguments("{}" if opening == "{" else "}")
    return True


def _name(text: str) -> str:
    """Return a name, without the quote and the attributes behind it."""
    return text.partition('"')[0].strip()


def _marked(text: str) -> set[str]:
    """Return the types that a parameter's own attribute allows; empty if it has none."""
    marked = text.partition('"')[2]
    return {"string"} if 'string="true"' in marked else _BY_JSON if 'string="false"' in marked else set()


GEMMA4_MARKERS = _CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_MAX_NESTED = 64
_MAX_WORD = 1024  # characters of a key or a number
_NESTED = {"{": "}", "[": "]"}
_ENDS = (",", *"{}[]", _QUOTE, _CALL_END)  # of a key or a number


def gemma4(scan: Scanner) -> Reading[None]:
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, once for each call: JSON but
    for bare keys, and strings without escapes."""
    while (yield from scan.next_call(f"{_CALL}call:")):
        name = (yield from scan.before("{", most=MAX_NAME)).strip()
        if name not in scan.tools:
            scan.give_up()
            continue
        scan.begin(name)
        if (yield from _value(scan, 0)):
            scan.end_call()
            yield from scan.optional(_CALL_END)
        else:
            scan.give_up()


def _value(scan: Scanner, depth: int) -> Reading[bool]:
    """Emit a value as JSON. Return whether it is whole."""
    if (yield from scan.optional(_QUOTE)):
        scan.emit_arguments('"')
        yield from _streamed_string(scan, _QUOTE)
        return (yield from scan.optional(_QUOTE))
    for opening, closing in _NESTED.items():
        if (yield from scan.optional(opening)):
            return depth < _MAX_NESTED and (yield from _members(scan, opening, closing, depth + 1))
    word = (yield from scan.before(*_ENDS, most=_MAX_WORD)).strip()
    if word:
        scan.emit_arguments(_as_json(word, _BY_JSON))
    elif scan.is_ended and not any(end in scan.rest for end in _ENDS):
        scan.emit_arguments(_begun_as_json(_take_begun(scan, *_ENDS), _BY_JSON))
    return bool(word)


def _members(scan: Scanner, opening: str, closing: str, depth: int) -> Reading[bool]:
    scan.emit_arguments(opening)
    is_over = yield from scan.optional(closing)
    while not is_over:
        if opening == "{":
            is_quoted = yield from scan.optional(_QUOTE)
            key = yield from scan.before(*((_QUOTE,) if is_quoted else (":", *_ENDS)), most=_MAX_WORD)
            if is_quoted and not (yield from scan.optional(_QUOTE)):
                return False
            if not (yield from scan.optional(":")):
                return False
            scan.emit_arguments(f"{json.dumps(key if is_quoted else key.strip(), ensure_ascii=False)}: ")
        if not (yield from _value(scan, depth)):
            return False
        is_over = yield from scan.optional(closing)
        if not is_over:
            if not (yield from scan.optional(",")):
                return False
            scan.emit_arguments(", ")
    scan.emit_arguments(closing)
    return True


def _streamed_string(scan: Scanner, end: str, *, padding: str = "") -> Reading[None]:
    """Emit a string without its padding, as it arrives, up to `end`, and its closing quote."""
    while padding and not scan.rest and not scan.is_ended:
        yield
    if scan.rest.startswith(padding):
        scan.take(len(padding))
    while True:
        at = scan.rest.find(end)
        is_whole = at >= 0
        text = scan.take(at).removesuffix(padding) if is_whole else _take_begun(scan, end, padding=padding)
        scan.emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if is_whole else ""))
        if is_whole or scan.is_ended:
            return
        yield


def _take_begun(scan: Scanner, *ends: str, padding: str = "") -> str:
    """Consume and return a value's text so far, without characters that may belong to one of its ends."""
    held = max(overlap(scan.rest, text) for end in ends for text in (end, padding + end))
    return scan.take(len(scan.rest) - held)


def _as_json(value: str, types: set[str]) -> str:
    """Return the value as JSON: a string, unless its schema allows another type and the value parses as one."""
    text = value.strip()
    if types & _BY_JSON and ("string" not in types or text == "null"):
        lowered = text.lower()
        for word in (text, "null" if lowered == "none" else lowered):  # accept Python's True, False and None
            try:
                json.loads(word, parse_constant=_reject)
            except (ValueError, RecursionError):
                continue
            return word
    return json.dumps(value, ensure_ascii=False)


def _begun_as_json(value: str, types: set[str]) -> str:
    """Return the beginning of a value as the beginning of JSON."""
    text = value.strip()
    is_json = "string" not in types and JsonValue().feed(text) == len(text)
    return text if is_json else json.dumps(value, ensure_ascii=False)[:-1]


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
