"""Tests that must pass on both event loops: asyncio's own, and uvloop, which Ray uses for routers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once on each event loop. It cannot use async fixtures."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    @wraps(test)
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **given: Any) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**given))

    parameters = inspect.signature(test).parameters.values()
    new_loop = inspect.Parameter("new_loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([*parameters, new_loop])  # type: ignore[attr-defined]
    return run
