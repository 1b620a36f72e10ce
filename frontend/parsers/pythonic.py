"""Tool calls in Python syntax: [get_weather(city="Paris", days=3), …]. They are parsed, never executed."""

from __future__ import annotations

import ast
import json
import warnings

from frontend.parsers.json_call import json_call
from frontend.parsers.scanner import MAX_NAME, Reading, Scanner

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"

_MAX_CALL = 64 * 1024  # characters
_JSONS_OWN = {"true": True, "false": False, "null": None}


def pythonic(scan: Scanner) -> Reading[None]:
    """Llama 3.2, Llama 4, ToolACE: a list of calls, as the whole answer or after <|python_start|>. Llama 4 may write
    calls in JSON instead."""
    is_call = (yield from scan.next_is("[")) or (yield from scan.next_is("{"))
    while is_call or (yield from scan.text_until(PYTHON_START)):
        is_call = False
        is_list = yield from scan.optional("[")
        while (yield from _call(scan) if is_list else json_call(scan)):
            if not (yield from scan.optional("," if is_list else ";")):
                if is_list:
                    yield from scan.optional("]")
                yield from scan.optional(PYTHON_END)
                break


def _call(scan: Scanner) -> Reading[bool]:
    name = (yield from scan.before("(", most=MAX_NAME)).strip()
    if name not in scan.tools:
        scan.give_up()
        return False
    source = yield from _brackets(scan)
    arguments = _arguments(f"f{source}") if source else ""  # a tool's name may be invalid in Python
    if not arguments:
        scan.give_up(is_text=True)  # rescanning markers inside it would be quadratic
        return False
    scan.begin(name)
    scan.emit_arguments(arguments)
    scan.end_call()
    return True


def _brackets(scan: Scanner) -> Reading[str]:
    """Read from the next opening bracket to its closing one; "" if it is not closed."""
    parts: list[str] = []
    depth, quote, is_escaped, num_chars = 0, "", False, 0
    while num_chars <= _MAX_CALL:
        text = scan.rest
        for at, character in enumerate(text):
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if not depth:
                    return "".join([*parts, scan.take(at + 1)])
        if text:
            parts.append(scan.take(len(text)))
            num_chars += len(text)
        if scan.is_ended:
            break
        yield
    return ""


def literal_as_json(source: str) -> str:
    """Return a list or dict in Python syntax as JSON; "" for other text."""
    try:
        if source.startswith(("[", "{")) and len(source) <= _MAX_CALL:
            value = _parsed(source)
            return _json(_value(value)) if isinstance(value, ast.List | ast.Dict) else ""
    except _INVALID:
        pass
    return ""


def _arguments(source: str) -> str:
    """Return a call's keyword arguments as a JSON object; "" if it is not a call with literal values."""
    try:
        call = _parsed(source)
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return ""
        return _json({keyword.arg: _value(keyword.value) for keyword in call.keywords})
    except _INVALID:
        return ""


_INVALID = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def _parsed(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unknown escape sequences
        return ast.parse(source.lstrip(), mode="eval").body


def _json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # reject lone surrogates
    return text


def _value(value: ast.expr) -> object:
    """Evaluate a literal. JSON's true, false and null, which are names in Python, count as constants."""
    return ast.literal_eval(_Words().visit(value))


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSONS_OWN:
            return ast.copy_location(ast.Constant(_JSONS_OWN[node.id]), node)
        return node
