"""Tool call formats of model families, named as in vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from frontend.parsers.gemma4 import GEMMA4_MARKERS, gemma4
from frontend.parsers.harmony import HARMONY, Frame
from frontend.parsers.json_call import json_arguments, json_call
from frontend.parsers.pythonic import PYTHON_END, PYTHON_START, pythonic
from frontend.parsers.scanner import MAX_NAME, Format, Reading, Scanner
from frontend.parsers.xml_call import DSML, GLM, MINIMAX_M2, QWEN3_CODER, XmlTags, xml_calls

GENERIC = "generic"
_JSON_BEGINS = tuple(f"{fence}\n{bracket}" for fence in ("```json", "```", "") for bracket in "[{")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - DeepSeek's own bars
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_DEEPSEEK_SEP = "<｜tool▁sep｜>"  # noqa: RUF001
_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_ID = re.compile(r"^functions\.|:\d+$")  # the parts around a name
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def hermes(scan: Scanner) -> Reading[None]:
    """Hermes, Qwen 2.5, Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, for each call or around all."""
    while (yield from scan.text_until("<tool_call>")):
        while (yield from json_call(scan)):
            scan.forget_taken()
            if not (yield from scan.next_is("{")):
                yield from scan.optional("</tool_call>")
                break


def llama3_json(scan: Scanner) -> Reading[None]:
    """Llama 3.1 and later: {"name": …, "parameters": {…}}, alone or after <|python_tag|>, separated by semicolons or
    space."""
    is_call = yield from scan.next_is("{")
    while is_call or (yield from scan.text_until("<|python_tag|>")):
        while (yield from json_call(scan)):
            scan.forget_taken()
            if not (yield from scan.optional(";")) and not (yield from scan.next_is("{")):
                break
        is_call = False


def generic(scan: Scanner) -> Reading[None]:
    """[{"name": …, "arguments": {…}}, …] or one such object, at the beginning of the answer or of a line, and possibly
    in a fence: the format that frontend.chat.history.tools_as_text asks for."""
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
        elif (yield from scan.next_is("{")):
            yield from json_call(scan)
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
    name = yield from scan.before("[CALL_ID]", "[ARGS]", "{", most=MAX_NAME)
    if (yield from scan.optional("[CALL_ID]")):
        yield from scan.before("[ARGS]", most=MAX_NAME)
    yield from scan.optional("[ARGS]")
    yield from json_arguments(scan, name.strip())


def deepseek_v3(scan: Scanner) -> Reading[None]:
    """DeepSeek V3 and R1 (type, separator, name, then JSON between fences), and V3.1 (name, separator, JSON)."""
    while (yield from scan.next_call(_DEEPSEEK_CALL, _DEEPSEEK_BEGIN)):
        name = yield from scan.before(_DEEPSEEK_SEP, most=MAX_NAME)
        yield from scan.optional(_DEEPSEEK_SEP)
        is_fenced = name.strip() == "function" and not (yield from scan.next_is("{"))
        if is_fenced:
            name = yield from scan.before("```json", most=MAX_NAME)
            yield from scan.optional("```json")
        if (yield from json_arguments(scan, name.strip())):
            if is_fenced:
                yield from scan.optional("```")
            yield from scan.optional(_DEEPSEEK_CALL_END)
            yield from scan.optional(_DEEPSEEK_END)


def kimi_k2(scan: Scanner) -> Reading[None]:
    """<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section."""
    while (yield from scan.next_call(_KIMI_CALL, _KIMI_BEGIN)):
        id = yield from scan.before(_KIMI_ARGUMENTS, most=MAX_NAME)
        yield from scan.optional(_KIMI_ARGUMENTS)
        if (yield from json_arguments(scan, _KIMI_ID.sub("", id.strip()))):
            yield from scan.optional(_KIMI_CALL_END)
            yield from scan.optional(_KIMI_END)


@dataclass(frozen=True)
class CallFormat:
    """Parser of a format, with its markers."""

    read: Format
    begins: tuple[str, ...]  # texts with which a call begins; NAME stands for a tool's name
    markers: tuple[str, ...]  # texts whose special tokens belong to the text
    template: str  # pattern of a chat template that instructs the model to use the format
    first: tuple[str, ...] = ()  # texts that may begin a call at the start of an answer
    has_named_ids: bool = False  # ids of calls are functions.NAME:INDEX
    frame: Frame | None = None  # of a model whose whole answers are messages; `read` also reads thinking then


def _xml(tags: XmlTags, template: str) -> CallFormat:
    texts = (*tags.blocks, tags.call, tags.parameter, tags.key_end, tags.value, tags.value_end, tags.call_end)
    markers = (*texts, *tags.block_ends)
    return CallFormat(partial(xml_calls, tags=tags), (*tags.blocks, tags.call), markers, template)


_DEEPSEEK = (_DEEPSEEK_BEGIN, _DEEPSEEK_CALL)
_DEEPSEEK_MARKERS = (*_DEEPSEEK, _DEEPSEEK_SEP, _DEEPSEEK_CALL_END, _DEEPSEEK_END)

# In order of precedence: formats identified by a string that others contain as well come last.
CALL_FORMATS: Mapping[str, CallFormat] = {
    "openai": CallFormat(HARMONY.read, (), HARMONY.markers, re.escape("<|channel|>"), frame=HARMONY),
    "deepseek_v32": _xml(DSML, "｜DSML｜"),  # noqa: RUF001
    "deepseek_v31": CallFormat(deepseek_v3, _DEEPSEEK, _DEEPSEEK_MARKERS, f"{_DEEPSEEK_SEP}[^<`]*{_DEEPSEEK_CALL_END}"),
    "deepseek_v3": CallFormat(deepseek_v3, _DEEPSEEK, _DEEPSEEK_MARKERS, "|".join(_DEEPSEEK)),
    "mistral": CallFormat(mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), r"\[TOOL_CALLS\]"),
    "kimi_k2": CallFormat(
        kimi_k2,
        (_KIMI_BEGIN, _KIMI_CALL),
        (_KIMI_BEGIN, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END, _KIMI_END),
        re.escape(_KIMI_BEGIN),
        has_named_ids=True,
    ),
    "minimax_m2": _xml(MINIMAX_M2, "<minimax:tool_call>"),
    "gemma4": CallFormat(gemma4, GEMMA4_MARKERS[:1], GEMMA4_MARKERS, re.escape(GEMMA4_MARKERS[0])),
    "glm47": _xml(GLM, "</arg_key><arg_value>"),
    "glm45": _xml(GLM, "<arg_key>"),
    "qwen3_coder": _xml(QWEN3_CODER, "<function="),
    "hermes": CallFormat(hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>"), "<tool_call>"),
    "llama4_pythonic": CallFormat(
        pythonic,
        (PYTHON_START, "[NAME(", '{"name"'),
        (PYTHON_START, PYTHON_END),
        re.escape("<|header_start|>"),
        first=("[", "{"),
    ),
    "pythonic": CallFormat(pythonic, ("[NAME(",), (), r"func_name1\(", first=("[",)),
    "llama3_json": CallFormat(
        llama3_json,
        ("<|python_tag|>", '{"name"'),
        ("<|python_tag|>",),
        r'<\|python_tag\|>|"parameters": dictionary',
        first=("{",),
    ),
    GENERIC: CallFormat(generic, ("\n[", "\n{"), (), "", first=("[", "{", "`")),  # for every template
}


def find_call_format(template: str) -> str:
    """Return the name of the format that a chat template instructs the model to use; `generic` if it names none."""
    return next(name for name, kind in CALL_FORMATS.items() if re.search(kind.template, template))


def named_id(name: str, index: int) -> str:
    """Return the call id for a model that reads the tool's name from it. index: among all calls of the chat."""
    return f"functions.{name}:{index}"
