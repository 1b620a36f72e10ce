"""A grammar is compiled before its request goes anywhere: a wrong one is refused here, and holds up nobody."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from core.grammar.compiler import GrammarCompiler
from core.types.constraints import Grammar
from core.types.errors import CapacityError, RequestError
from core.types.thinking_budget import ThinkingBudget
from frontend.text.completion_request import CompletionRequest
from frontend.text.text_threads import TextThreads

_COMPILE_S = 0.9  # a client hears within a second
_NUM_THREADS = 2  # of which one key has one
_MAX_KNOWN = 1024  # grammars of which the outcome is known; 64 MiB at most


class GrammarCheck:
    """Belongs to an event loop, which compiling lets run.

    What is quick is known from then on. What is not is compiled for each request again, in its key's turn: so one key
    gives replicas, which compile it too, no more of it at a time than one thread here can.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = TextThreads(num_threads=_NUM_THREADS)
        self._known: OrderedDict[Grammar, str] = OrderedDict()  # what is wrong with each, the latest last

    async def check(self, request: CompletionRequest) -> None:
        """Raises RequestError that names the client's field, and CapacityError where too many are compiled already."""
        grammar, param = request.grammar, request.grammar_field
        if grammar is None:
            return
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported here", param=param)
        grammar.check(param)
        if grammar not in self._known:
            await self._compile(request.key_id, self._compiler, grammar, param)
        elif problem := self._known[grammar]:
            raise RequestError(f"{param}: {problem}", param=param)
        else:
            self._known.move_to_end(grammar)

    def check_thinking(self, budget: ThinkingBudget | None, param: str) -> None:
        """Raises RequestError that names the client's field where replicas could not keep to it."""
        if budget is None:
            return
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported here", param=param)
        self._compiler.bounded(budget, param=param)

    def close(self) -> None:
        self._threads.close()

    async def _compile(self, key_id: str, compiler: GrammarCompiler, grammar: Grammar, param: str) -> None:
        loop = asyncio.get_running_loop()

        def compile_it() -> None:  # to its end, and what is found out counts, though nobody may wait for it any more
            try:
                compiled = compiler.compile(grammar, param=param)
            except RequestError as error:
                loop.call_soon_threadsafe(self._learn, grammar, str(error).removeprefix(f"{param}: "))
                raise
            if compiled.is_quick:
                loop.call_soon_threadsafe(self._learn, grammar, "")

        try:
            async with asyncio.timeout(_COMPILE_S):
                await self._threads.run(key_id, compile_it)
        except TimeoutError:
            text = f"{param}: is not compiled within {_COMPILE_S} s, while others are"
            raise CapacityError(text, retry_after_s=1.0) from None

    def _learn(self, grammar: Grammar, problem: str) -> None:
        self._known[grammar] = problem
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
