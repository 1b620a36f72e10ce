"""The masks of the requests that reach a replica: made off its event loop, and off its step thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cluster.grammar.compiler import CompiledGrammar, GrammarCompiler
from cluster.grammar.mask import GrammarMask
from cluster.words.request import SequenceRequest


class Grammars:
    """Belongs to rank 0's event loop. A router has compiled each before, so that here none takes long."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def mask_of(self, request: SequenceRequest) -> GrammarMask | None:
        """As far as the request's tokens go. Raises RequestError."""
        if request.grammar is None:
            return None
        compiled = self._compiler.kept(request.grammar)
        if compiled and not request.num_generated:
            return compiled.mask(request.sampling.stop_token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._make, request, compiled)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, request: SequenceRequest, compiled: CompiledGrammar | None) -> GrammarMask:
        assert request.grammar
        compiled = compiled or self._compiler.compile(request.grammar)
        mask = compiled.mask(request.sampling.stop_token_ids)
        mask.take(request.token_ids, request.num_prompt_tokens)
        return mask
