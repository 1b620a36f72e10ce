"""Compilation of grammars before dispatch, so that an invalid or expensive one is rejected at the router."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict

from core.grammar.compiler import GrammarCompiler
from core.types.errors import CapacityError, RequestError
from core.types.request import Grammar, ThinkingBudget
from frontend.chat.chat import Chat
from frontend.text.completion_request import CompletionRequest
from frontend.text.text_threads import TextThreads

_COMPILE_S = 0.9  # so that a client gets an error within a second
_NUM_THREADS = 2  # of which one key can occupy one
_MAX_KNOWN = 1024  # cached outcomes; 64 MiB at most


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
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported by this router", param=param)
        grammar.check(param)
        chat = request.prompt if isinstance(request.prompt, Chat) else None
        key = grammar, chat.forced if chat else None
        if key not in self._known:
            await self._compile(request.key_id, self._compiler, key, chat, param)
        elif problem := self._known[key]:
            raise RequestError(f"{param}: {problem}", param=param)
        else:
            self._known.move_to_end(key)

    def check_thinking(self, budget: ThinkingBudget | None, param: str) -> None:
        """Check that replicas can enforce the budget. Raises RequestError with the client's field."""
        if budget is None:
            return
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported by this router", param=param)
        self._compiler.bounded(budget, param=param)

    def close(self) -> None:
        self._threads.close()

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
