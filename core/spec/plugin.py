"""Resolution of names in the spec: a built-in, or a plugin given as MODULE:NAME (docs/EXTENDING.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar, cast

from core.types.errors import SpecError

T = TypeVar("T")

PLUGIN = "MODULE:NAME"
IS_PLUGIN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def find(name: str, ours: Mapping[str, T]) -> T:
    """Return the entry of `ours` named `name`, or import the object that MODULE:NAME refers to. Raises SpecError.

    Names come from an operator (spec or command line), never from a request.
    """
    if name in ours:
        return ours[name]
    if not IS_PLUGIN.fullmatch(name):
        raise SpecError(f"{name}: must be {one_of(ours)}")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise SpecError(f"{name}: cannot be imported: {error}; put it on PYTHONPATH, or pip install it") from error
    except (Exception, SystemExit) as error:  # importing a module can raise anything
        raise SpecError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise SpecError(f"{name}: must be a class or a factory function")
    return cast(T, found)


def made(name: str, make: Callable[..., T], **arguments: object) -> T:
    """Call `make`, the object named `name`, with these arguments. Raises SpecError if it does not accept them."""
    try:
        return make(**arguments)
    except TypeError as error:
        raise SpecError(f"{name}: cannot be created: {error}; see docs/EXTENDING.md") from error


def one_of(names: Mapping[str, object] | tuple[str, ...]) -> str:
    """Return the accepted names, for error messages."""
    return f"{', '.join(names)} or a {PLUGIN} of your own"
