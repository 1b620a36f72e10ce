"""Grammar of a constrained answer, including the thinking before it, or tool calls instead of it. The router compiles
it before dispatch, and rejects an invalid or expensive one."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from core.grammar.compiler import GrammarCompiler
from core.types.errors import CapacityError, RequestError
from core.types.json_schema import DROPPED, rewritten
from core.types.request import Grammar, GrammarKind, ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.output_format import SCHEMAS, OutputFormat, may_think
from frontend.parsers.formats import GENERIC
from frontend.parsers.harmony import HARMONY
from frontend.parsers.thinking import Tags
from frontend.structured_output.lark import MAY_BE_WEAKENED, in_lark, lenient, structural_tag_rules, weakened
from frontend.text.completion_request import CompletionRequest
from frontend.text.text_threads import TextThreads

_COMPILE_S = 0.9  # so that a client gets an error within a second
_NUM_THREADS = 2  # one key can occupy one of them
_MAX_KNOWN = 1024  # cached outcomes; 64 MiB at most
_NOTES = ("description", "title", "default", "examples", "x-guidance")  # annotations in a tool's schema


@dataclass(frozen=True)
class _Calls:
    """Syntax of tool calls of a model family whose arguments are JSON."""

    before: str  # text before the arguments; NAME: the tool's name, INDEX: a number
    after: str
    between: str = ""  # text between two calls
    begin: str = ""  # text before all calls
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


def with_weakened_schema(request: CompletionRequest) -> tuple[CompletionRequest, list[str]]:
    """Return the request, its strict schema weakened to what a grammar can enforce, and the paths of the changes.

    Raises RequestError.
    """
    grammar, param = request.grammar, request.grammar_field
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA or not MAY_BE_WEAKENED.search(grammar.text):
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
    grammar, chat, param = request.grammar, request.prompt, request.grammar_field
    tags, frame, special = output_format.tags, output_format.frame, output_format.special
    if grammar is None:
        return None
    is_lenient = grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    if is_lenient:
        grammar.check(param)
        grammar = replace(grammar, text=json.dumps(lenient(_object(grammar.text, param))))
    start = output_format.start(chat if isinstance(chat, Chat) else None, prompt)
    rules, thought = list[str](), ""
    if tags and isinstance(chat, Chat) and may_think(grammar, start):
        rules, thought = list(_thought(tags, output_format, is_open=start == "inside")), "thought "
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:  # describes calls as well
        return _lark(f"start: {thought}answer", *rules, *structural_tag_rules(grammar.text, param, special))
    if not isinstance(chat, Chat):
        return grammar
    head = special.literal(frame.text) if frame and start == "before" and grammar.kind in SCHEMAS else ""
    tools = chat.tools if chat.forced is None or head else ()
    if not (tools or thought or head):
        return grammar
    grammar.check(param)
    has_text = chat.forced is None or not head
    bodies = [*([f"{head} answer"] if has_text else []), *(["calls"] if tools else [])]
    rules = [f"start: {thought}body", f"body: {' | '.join(bodies)}", *rules]
    if tools:
        rules += _calls(request, chat, output_format)
    if has_text:
        rules.append(f"answer: {in_lark(_object(grammar.text, param), is_lenient=is_lenient)}")
    return _lark(*rules)


def _lark(*rules: str) -> Grammar:
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
        yield f"arguments{number}: {in_lark({'type': 'object', **lean}, is_lenient=is_lenient)}"


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


class GrammarCheck:
    """Checks grammars on threads, with a cache of outcomes. Bound to an event loop.

    Grammars that compile quickly are cached. Slow ones are compiled again for each request, in their key's turn: this
    limits the compilations that one key can cause on replicas to the rate of one thread here.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = TextThreads(num_threads=_NUM_THREADS)
        # Problem, or "" for a valid one, by grammar and forced tool; the latest last.
        self._known: OrderedDict[tuple[Grammar, str | None], str] = OrderedDict()

    async def check(self, request: CompletionRequest) -> None:
        """Check a request's grammar. Raises RequestError with the client's field, and CapacityError under load."""
        grammar, param = request.grammar, request.grammar_field
        if grammar is None:
            return
        compiler = self._available(param)
        grammar.check(param)
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        key = grammar, chat.forced if chat else None
        if key not in self._known:
            await self._compile(request.key_id, compiler, key, chat, param)
        elif problem := self._known[key]:
            raise RequestError(f"{param}: {problem}", param=param)
        else:
            self._known.move_to_end(key)

    def check_thinking(self, budget: ThinkingBudget | None, param: str) -> None:
        """Check that replicas can enforce the budget. Raises RequestError with the client's field."""
        if budget is not None:
            self._available(param).bounded(budget, param=param)

    def close(self) -> None:
        self._threads.close()

    def _available(self, param: str) -> GrammarCompiler:
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported by this router", param=param)
        return self._compiler

    async def _compile(
        self, key_id: str, compiler: GrammarCompiler, key: tuple[Grammar, str | None], chat: Chat | None, param: str
    ) -> None:
        loop, grammar = asyncio.get_running_loop(), key[0]

        def compile_it() -> None:  # runs to its end and caches the outcome even if the request is cancelled
            try:
                compiled = compiler.compile(grammar, param=param)
            except RequestError as error:
                problem = str(error).removeprefix(f"{param}: ")
                if chat and (tool := _uncompiled_tool(compiler, grammar, chat)):
                    problem = f"tool {tool!r}: {problem}"
                loop.call_soon_threadsafe(self._learn, key, problem)
                raise RequestError(f"{param}: {problem}", param=param) from None
            if compiled.is_quick:
                loop.call_soon_threadsafe(self._learn, key, "")

        try:
            async with asyncio.timeout(_COMPILE_S):
                await self._threads.run(key_id, compile_it)
        except TimeoutError:
            text = f"{param}: not compiled within {_COMPILE_S} s, because of other compilations; retry"
            raise CapacityError(text, retry_after_s=1.0) from None

    def _learn(self, key: tuple[Grammar, str | None], problem: str) -> None:
        self._known[key] = problem
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


def _uncompiled_tool(compiler: GrammarCompiler, grammar: Grammar, chat: Chat) -> str | None:
    """Return the name of the forced tool whose schema does not compile; None if no single one is the reason."""
    if chat.forced != "":
        return chat.forced
    for name, parameters in chat.parameters.items():
        try:
            compiler.compile(Grammar(kind=grammar.kind, text=json.dumps({"type": "object", **parameters})))
        except RequestError:
            return name
    return None
