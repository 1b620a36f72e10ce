"""Triton's interpreter without the patches that it repeats for each call of a device function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def language_patched_once() -> Iterator[None]:
    """Patch `triton.language` once per launch and module of device functions.

    The interpreter does it in every call, which takes as long as the rest of a call.
    """
    from triton.runtime.interpreter import InterpretedFunction

    run, call = InterpretedFunction.run, InterpretedFunction.__call__
    patched: set[str] = set()  # modules

    def launch(kernel: Any, *arguments: Any, **options: Any) -> None:
        try:
            run(kernel, *arguments, **options)
        finally:
            patched.clear()

    def call_device_function(function: Any, *arguments: Any, **options: Any) -> Any:
        if (module := function.fn.__module__) in patched:
            return function.rewrite()(*arguments, **options)
        patched.add(module)
        return call(function, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(InterpretedFunction, "__call__", call_device_function)
        yield
