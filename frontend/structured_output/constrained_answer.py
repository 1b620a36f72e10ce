"""Grammar of a constrained answer, including what may come besides: thinking before it, or tool calls instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from core.types.errors import RequestError
from core.types.json_schema import DROPPED, rewritten
from core.types.request import Grammar, GrammarKind
from frontend.chat.chat import Chat
from frontend.chat.output_format import SCHEMAS, OutputFormat, may_think
from frontend.parsers.formats import GENERIC
from frontend.parsers.harmony import HARMONY
from frontend.parsers.thinking import Tags
from frontend.structured_output.json_schema import LOOKING_AROUND, in_lark, lenient, weakened
from frontend.structured_output.structural_tag import structural_tag_rules
from frontend.text.completion_request import CompletionRequest

_NOTES = ("description", "title", "default", "examples", "x-guidance")  # annotations in a tool's schema


@dataclass(frozen=True)
class _Calls:
    """Syntax of tool calls of a model family whose arguments are JSON."""

    before: str  # the arguments; NAME stands for the tool's name, INDEX for a number
    after: str
    between: str = ""  # two calls
    begin: str = ""  # of all calls
    end: str = ""
    is_repeated: bool = True  # False: an answer has one call at most


_CALLS = {
    "hermes": _Calls('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": _Calls('{"name": "NAME", "parameters": ', "}", "; "),
    "kimi_k2": _Calls(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "deepseek_v31": _Calls(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",  # noqa: RUF001 - DeepSeek's own bars
        "<｜tool▁call▁end｜>",  # noqa: RUF001
        begin="<｜tool▁calls▁begin｜>",  # noqa: RUF001
        end="<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
    GENERIC: _Calls('{"name": "NAME", "arguments": ', "}", ", ", begin="[", end="]"),
    "openai": _Calls(HARMONY.call, "", is_repeated=False),
}
_CALLS["deepseek_v3"] = replace(
    _CALLS["deepseek_v31"],
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",  # noqa: RUF001
    after="\n```<｜tool▁call▁end｜>",  # noqa: RUF001
    between="\n",
)


def without_look_around(request: CompletionRequest) -> tuple[CompletionRequest, list[str]]:
    """Return the request with a strict schema that a grammar can follow, and the paths of patterns that were weakened.

    Raises RequestError.
    """
    grammar, param = request.grammar, request.grammar_field
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA or not LOOKING_AROUND.search(grammar.text):
        return request, []
    grammar.check(param)
    try:
        schema, paths = weakened(_object(grammar.text, param), param)
    except RecursionError:
        raise _too_deep(param) from None
    return replace(request, grammar=Grammar(kind=grammar.kind, text=json.dumps(schema))), paths


def bound_answer(request: CompletionRequest, output_format: OutputFormat, prompt: str) -> Grammar | None:
    """Return the grammar of the whole answer. Raises RequestError if there is none. prompt: its last characters
    suffice."""
    try:
        return _bound_answer(request, output_format, prompt)
    except RecursionError:
        raise _too_deep(request.grammar_field) from None


def _bound_answer(request: CompletionRequest, output_format: OutputFormat, prompt: str) -> Grammar | None:
    grammar, chat, tags, frame = request.grammar, request.prompt, output_format.tags, output_format.frame
    start = output_format.start(chat if isinstance(chat, Chat) else None, prompt)
    if grammar is not None and grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA:
        grammar.check(request.grammar_field)
        schema = lenient(_object(grammar.text, request.grammar_field))
        grammar = Grammar(kind=grammar.kind, text=json.dumps(schema))
    if grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG:
        thinks = isinstance(chat, Chat) and may_think(grammar, start)
        rules = [f"start: {'thought ' if tags and thinks else ''}answer"]
        if tags and thinks:
            rules += _thought(tags, output_format, is_open=start == "inside")
        # Structural tags describe calls as well.
        rules += structural_tag_rules(grammar.text, request.grammar_field, output_format.special)
        return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))
    if grammar is None or not isinstance(chat, Chat):
        return grammar
    head = output_format.special.literal(frame.text) if frame and start == "before" and grammar.kind in SCHEMAS else ""
    tools = chat.tools if chat.forced is None or head else ()
    thinks = tags is not None and may_think(grammar, start)
    if not tools and not thinks and not head:
        return grammar
    grammar.check(request.grammar_field)
    has_text = chat.forced is None or not head
    bodies = [*([f"{head} answer"] if has_text else []), *(["calls"] if tools else [])]
    rules = [f"start: {'thought ' if thinks else ''}body", f"body: {' | '.join(bodies)}"]
    if tags and thinks:
        rules += _thought(tags, output_format, is_open=start == "inside")
    if tools:
        rules += _calls(request, chat, output_format)
    if not has_text:
        return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))
    schema = _object(grammar.text, request.grammar_field)
    rules.append(_rule("answer", schema, is_lenient=grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA))
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))


def _too_deep(param: str) -> RequestError:
    return RequestError(f"{param}: it, or a tool's schema, is nested too deeply", param=param)


def _thought(tags: Tags, output_format: OutputFormat, *, is_open: bool) -> Iterator[str]:
    special, frame = output_format.special, output_format.frame
    yield f"thought: {'said' if is_open else '(opening said)?'}"
    if not is_open:
        token = special.begun(tags.opening)
        yield f"opening: opened {f'| {token[0]} {special.literal(token[1])}' if token else ''}"
        yield f"opened[lazy]: {json.dumps(tags.opening)}"  # lazy, because an answer may begin with any text
    yield f"said: thinking {special.literal(frame.resumes) if frame else 'gap'}"
    token = special.begun(tags.closing)
    yield f"thinking: ended {f'| anything {token[0]}' if token else ''}"
    yield f"ended[suffix={json.dumps(tags.closing)}]: /(?s:.*)/"
    yield "anything: /(?s:.*)/"
    yield r"gap: /\n{0,2}/"


def _calls(request: CompletionRequest, chat: Chat, output_format: OutputFormat) -> Iterator[str]:
    assert request.grammar is not None
    form = _CALLS.get(output_format.calls or "")
    if form is None or request.grammar.kind not in SCHEMAS:
        text = f"tools: cannot be combined with {request.grammar_field} here; set tool_choice to none or required"
        raise RequestError(text, param="tools")
    literal = output_format.special.literal
    literal = output_format.special.literal
    is_lenient = chat.forced is None or request.grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    tools = {name: schema for name, schema in chat.parameters.items() if chat.forced in (None, "", name)}
    more = f"({literal(form.between)} call)*" if chat.is_parallel and form.is_repeated else ""
    yield f"calls: {literal(form.begin)} call {more} {literal(form.end)}"
    yield f"call: {' | '.join(f'call{number}' for number in range(len(tools)))}"
    for number, (name, parameters) in enumerate(tools.items()):
        before = form.before.replace('"NAME"', json.dumps(name)).replace("NAME", name)
        opening = " /[0-9]{1,4}/ ".join(map(literal, before.split("INDEX")))
        yield f"call{number}: {opening} arguments{number} {literal(form.after)}"
        schema = lenient(parameters) if is_lenient else parameters
        lean = rewritten(schema, lambda key, value: DROPPED if key in _NOTES else value)
        yield _rule(f"arguments{number}", {"type": "object", **lean}, is_lenient=is_lenient)


def _rule(name: str, schema: dict[str, Any], *, is_lenient: bool) -> str:
    return f"{name}: {in_lark(schema, is_lenient=is_lenient)}"


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, bool):
        return {} if found else {"not": {}}
    if not isinstance(found, dict):
        raise RequestError(f"{param}: must be a JSON schema", param=param)
    return found
