"""Tool call formats of model families, named as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from frontend.parsers.json_call import json_arguments, json_call
from frontend.parsers.pythonic import PYTHON_END, PYTHON_START, pythonic
from frontend.parsers.qwen_xml import qwen3_coder
from frontend.parsers.scanner import Reading, Scanner

Format: TypeAlias = Callable[[Scanner], Reading[None]]

GENERIC = "generic"
_MAX_NAME = 128
_JSON_BEGINS = tuple(f"{fence}\n{bracket}" for fence in ("```json", "```", "") for bracket in "[{")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - DeepSeek's own bars
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_DEEPSEEK_SEP = "<｜tool▁sep｜>"  # noqa: RUF001


def hermes(scan: Scanner) -> Reading[None]:
    """Hermes, Qwen 2.5, Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, once for each call."""
    while (yield from scan.text_until("<tool_call>")):
        if (yield from json_call(scan)):
            yield from scan.optional("</tool_call>")


def llama3_json(scan: Scanner) -> Reading[None]:
    """Llama 3.1 and later: {"name": …, "parameters": {…}}, alone or after <|python_tag|>, separated by semicolons."""
    is_call = yield from scan.next_is("{")
    while is_call or (yield from scan.text_until("<|python_tag|>")):
        while (yield from json_call(scan)) and (yield from scan.optional(";")):
            pass
        is_call = False


def generic(scan: Scanner) -> Reading[None]:
    """[{"name": …, "arguments": {…}}, …] or one such object, at the beginning of the answer or of a line, and possibly
    in a fence: the format that frontend.chat.tools_as_text asks for."""
    fence = "```" if (yield from scan.optional("```json")) or (yield from scan.optional("```")) else ""
    bracket = "[" if (yield from scan.optional("[")) else "{" if (yield from scan.optional("{")) else ""
    opening = fence + bracket if bracket else ""
    if not bracket:
        scan.give_up()
    while opening or (opening := (yield from scan.text_until(*_JSON_BEGINS))):
        is_list = opening[-1] == "["
        is_call = yield from (_listed(scan) if is_list else json_call(scan, is_open=True))
        if is_call and opening.startswith("```"):
            yield from scan.optional("```")
        opening = ""


def mistral(scan: Scanner) -> Reading[None]:
    """[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]; since version 11 [TOOL_CALLS]name[ARGS]{…} for each call."""
    while (yield from scan.text_until("[TOOL_CALLS]")):
        if (yield from scan.optional("[")):
            yield from _listed(scan)
        else:
            yield from _named(scan)


def forced_calls(scan: Scanner) -> Reading[None]:
    """[{"name": …, "arguments": {…}}, …] and nothing else: an answer constrained to be calls."""
    if (yield from scan.optional("[")):
        yield from _listed(scan)
    yield from scan.all_text()


def forced_call(scan: Scanner, *, name: str) -> Reading[None]:
    """The arguments of one call and nothing else: an answer constrained to be a call of `name`."""
    yield from json_arguments(scan, name)
    yield from scan.all_text()


def _listed(scan: Scanner) -> Reading[bool]:
    """Read calls and the end of their list. Return whether all were calls."""
    is_call = yield from json_call(scan)
    while is_call and (yield from scan.optional(",")):
        is_call = yield from json_call(scan)
    if is_call:
        yield from scan.optional("]")
    return is_call


def _named(scan: Scanner) -> Reading[None]:
    name = yield from scan.before("[CALL_ID]", "[ARGS]", "{", most=_MAX_NAME)
    if (yield from scan.optional("[CALL_ID]")):
        yield from scan.before("[ARGS]", most=_MAX_NAME)
    yield from scan.optional("[ARGS]")
    yield from json_arguments(scan, name.strip())


def deepseek_v3(scan: Scanner) -> Reading[None]:
    """DeepSeek V3 and R1 (type, separator, name, then JSON between fences), and V3.1 (name, separator, JSON)."""
    while marker := (yield from scan.text_until(_DEEPSEEK_BEGIN, _DEEPSEEK_CALL)):
        if marker == _DEEPSEEK_BEGIN and not (yield from scan.optional(_DEEPSEEK_CALL)):
            scan.give_up()
            continue
        name = yield from scan.before(_DEEPSEEK_SEP, most=_MAX_NAME)
        yield from scan.optional(_DEEPSEEK_SEP)
        is_fenced = name.strip() == "function" and not (yield from scan.next_is("{"))
        if is_fenced:
            name = yield from scan.before("```json", most=_MAX_NAME)
            yield from scan.optional("```json")
        if (yield from json_arguments(scan, name.strip())):
            if is_fenced:
                yield from scan.optional("```")
            yield from scan.optional(_DEEPSEEK_CALL_END)
            yield from scan.optional(_DEEPSEEK_END)


@dataclass(frozen=True)
class CallFormat:
    """Parser of a format, with its markers."""

    read: Format
    begins: tuple[str, ...]  # texts with which a call begins; NAME stands for a tool's name
    markers: tuple[str, ...]  # may be special tokens, but belong to the text
    template_marks: tuple[str, ...]  # any of these in a chat template identifies the format
    first: tuple[str, ...] = ()  # if an answer begins with one of them, it may be a call


# In order of precedence: formats identified by a string that others contain as well come last.
CALL_FORMATS: Mapping[str, CallFormat] = {
    "deepseek_v3": CallFormat(
        deepseek_v3,
        (_DEEPSEEK_BEGIN, _DEEPSEEK_CALL),
        (_DEEPSEEK_BEGIN, _DEEPSEEK_CALL, _DEEPSEEK_SEP, _DEEPSEEK_CALL_END, _DEEPSEEK_END),
        (_DEEPSEEK_BEGIN, _DEEPSEEK_CALL),
    ),
    "mistral": CallFormat(mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",)),
    "qwen3_coder": CallFormat(
        qwen3_coder, ("<tool_call>", "<function="), ("<tool_call>", "</tool_call>"), ("<function=",)
    ),
    "hermes": CallFormat(hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
    "pythonic": CallFormat(
        pythonic, (PYTHON_START, "[NAME("), (PYTHON_START, PYTHON_END), (PYTHON_START, "func_name1("), first=("[",)
    ),
    "llama3_json": CallFormat(
        llama3_json,
        ("<|python_tag|>", '{"name"'),
        ("<|python_tag|>",),
        ("<|python_tag|>", '"parameters": dictionary'),
        first=("{",),
    ),
    GENERIC: CallFormat(generic, ("\n[", "\n{"), (), (), first=("[", "{", "`")),
}


def find_call_format(template: str) -> str | None:
    """Return the name of the format that a chat template instructs the model to use, or None if there is none."""
    return next(
        (name for name, kind in CALL_FORMATS.items() if any(mark in template for mark in kind.template_marks)), None
    )
