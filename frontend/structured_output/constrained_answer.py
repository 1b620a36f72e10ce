"""Grammar of a constrained answer, including what may come besides: thinking before it, or tool calls instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from core.types.constraints import Grammar, GrammarKind
from core.types.errors import RequestError
from core.types.json_schema import DROPPED, rewritten
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.parsers.formats import GENERIC
from frontend.parsers.thinking import Start, Tags
from frontend.structured_output.json_schema import LOOKING_AROUND, in_lark, lenient, moved, weakened
from frontend.structured_output.special_tokens import SpecialTokens
from frontend.structured_output.structural_tag import structural_tag_rules
from frontend.text.completion_request import CompletionRequest

_SCHEMAS = (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)
_NOTES = ("description", "title", "default", "examples", "x-guidance")  # annotations in a tool's schema


@dataclass(frozen=True)
class _Calls:
    """Syntax of tool calls of a model family."""

    opening: str
    arguments: str  # name of the arguments member
    closing: str
    between: str


_CALLS = {
    "hermes": _Calls("<tool_call>\n", "arguments", "\n</tool_call>", "\n"),
    "llama3_json": _Calls("", "parameters", "", "; "),
    GENERIC: _Calls("[", "arguments", "]", "\n"),
}


def may_think(grammar: Grammar | None, start: Start) -> bool:
    """Return whether the answer has room for thinking first. start: the end of its prompt."""
    return grammar is None or (grammar.kind in (*_SCHEMAS, GrammarKind.STRUCTURAL_TAG) and start != "after")


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
    grammar, chat, tags = request.grammar, request.prompt, output_format.tags
    start = output_format.start(chat if isinstance(chat, Chat) else None, prompt)
    if grammar is not None and grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA:
        grammar.check(request.grammar_field)
        schema = lenient(_object(grammar.text, request.grammar_field))
        grammar = Grammar(kind=grammar.kind, text=json.dumps(schema))
    if grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG:
        thinks = isinstance(chat, Chat) and may_think(grammar, start)
        rules = [f"start: {'thought ' if tags and thinks else ''}answer"]
        if tags and thinks:
            rules += _thought(tags, output_format.special, is_open=start == "inside")
        # Structural tags describe calls as well.
        rules += structural_tag_rules(grammar.text, request.grammar_field, output_format.special)
        return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))
    if grammar is None or not isinstance(chat, Chat):
        return grammar
    tools = chat.tools if chat.forced is None else ()
    thinks = tags is not None and may_think(grammar, start)
    if not tools and not thinks:
        return grammar
    grammar.check(request.grammar_field)
    rules = [f"start: {'thought ' if thinks else ''}body", f"body: {'answer | calls' if tools else 'answer'}"]
    if tags and thinks:
        rules += _thought(tags, output_format.special, is_open=start == "inside")
    if tools:
        rules += _calls(request, chat, output_format)
    schema = _object(grammar.text, request.grammar_field)
    rules.append(_rule("answer", schema, is_lenient=grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA))
    return Grammar(kind=GrammarKind.LARK, text="\n".join(rules))


def _too_deep(param: str) -> RequestError:
    return RequestError(f"{param}: it, or a tool's schema, is nested too deeply", param=param)


def _thought(tags: Tags, special: SpecialTokens, *, is_open: bool) -> Iterator[str]:
    yield f"thought: {'said' if is_open else '(opening said)?'}"
    if not is_open:
        token = special.begun(tags.opening)
        yield f"opening: opened {f'| {token[0]}' if token else ''}"
        yield f"opened[lazy]: {json.dumps(tags.opening)}"  # lazy, because an answer may begin with any text
    yield "said: thinking gap"
    token = special.begun(tags.closing)
    yield f"thinking: ended {f'| anything {token[0]}' if token else ''}"
    yield f"ended[suffix={json.dumps(tags.closing)}]: /(?s:.*)/"
    yield "anything: /(?s:.*)/"
    yield r"gap: /\n{0,2}/"


def _calls(request: CompletionRequest, chat: Chat, output_format: OutputFormat) -> Iterator[str]:
    assert request.grammar is not None
    form = _CALLS.get(output_format.calls or "")
    if form is None or request.grammar.kind not in _SCHEMAS:
        text = f"tools: cannot be combined with {request.grammar_field} here; set tool_choice to none or required"
        raise RequestError(text, param="tools")
    opening, closing, between = map(output_format.special.literal, (form.opening, form.closing, form.between))
    yield f"calls: call ({between} call)*" if chat.is_parallel else "calls: call"
    yield f"call: {' | '.join(f'{opening} call{number} {closing}' for number in range(len(chat.tools)))}"
    for number, (name, parameters) in enumerate(chat.parameters.items()):
        lean = rewritten(lenient(parameters), lambda key, value: DROPPED if key in _NOTES else value)
        yield _rule(f"call{number}", _call(name, {"type": "object", **lean}, form), is_lenient=True)


def _call(name: str, arguments: dict[str, Any], form: _Calls) -> dict[str, Any]:
    properties = {"name": {"const": name}, form.arguments: moved(arguments, f"#/properties/{form.arguments}")}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


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
