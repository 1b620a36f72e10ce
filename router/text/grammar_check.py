"""A grammar is compiled before its request goes anywhere: a wrong one is refused here, and holds up nobody."""

from __future__ import annotations

import asyncio

from cluster.grammar.compiler import GrammarCompiler
from cluster.words.errors import RequestError
from cluster.words.grammar import Grammar
from router.text.completion_request import CompletionRequest
from router.text.text_threads import TextThreads

_COMPILE_S = 0.9  # a client hears within a second
_NUM_THREADS = 2  # of which one key has one


class GrammarCheck:
    """Belongs to an event loop. Compiling lets it run; what takes too long goes on to its end, which the compiler's
    limits bring soon."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = TextThreads(num_threads=_NUM_THREADS)

    async def check(self, request: CompletionRequest, grammar: Grammar | None) -> None:
        """grammar: what is made of the request's. Raises RequestError that names the client's field, and CapacityError
        where too many are compiled already."""
        param = request.grammar_field
        if grammar is None:
            return
        if self._compiler is None:
            raise RequestError(f"{param}: is not supported here", param=param)
        grammar.check(param)
        if self._compiler.kept(grammar):
            return
        try:
            async with asyncio.timeout(_COMPILE_S):
                await self._threads.run(request.key_id, self._compiler.compile, grammar, param=param)
        except TimeoutError:
            raise RequestError(f"{param}: takes longer than {_COMPILE_S} s to compile", param=param) from None

    def close(self) -> None:
        self._threads.close()
