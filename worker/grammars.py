"""Grammar masks of a replica's requests, compiled in worker threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from core.grammar.compiler import GrammarCompiler
from core.grammar.mask import GrammarMask, ThinkingMask
from core.types.request import SequenceRequest


class Grammars:
    """Compiler threads of rank 0, used on its event loop.

    Routers compile every grammar first and serialize slow ones per API key, so compilation here is short.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammars")

    async def mask_of(self, request: SequenceRequest) -> GrammarMask | ThinkingMask | None:
        """Return the request's mask, advanced over its tokens. Raises RequestError."""
        if request.grammar is None and request.thinking is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._make, request)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make(self, request: SequenceRequest) -> GrammarMask | ThinkingMask | None:
        mask = None
        if request.grammar is not None:
            mask = self._compiler.compile(request.grammar).mask(request.sampling.stop_token_ids)
            mask.take(request.token_ids, request.num_prompt_tokens)
        if request.thinking is None:
            return mask
        bounded = self._compiler.bounded(request.thinking, mask)
        bounded.take(request.token_ids, request.num_prompt_tokens)
        return bounded
