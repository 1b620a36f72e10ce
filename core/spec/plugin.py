"""What a name in the spec stands for: something of ours, or a MODULE:NAME of somebody else (docs/EXTENDING.md)."""

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
    """The entry of `ours` that is called `name`, or the object that MODULE:NAME names, whose module is imported.

    The name is an operator's, from the spec or a command line, and never comes with a request. Raises SpecError.
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
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise SpecError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise SpecError(f"{name}: must be a class, or a function that makes what is asked for")
    return cast(T, found)


def made(name: str, make: Callable[..., T], **arguments: object) -> T:
    """What `make`, which `name` stands for, makes of these. Raises SpecError where it takes others."""
    try:
        return make(**arguments)
    except TypeError as error:
        raise SpecError(f"{name}: cannot be made: {error}; see docs/EXTENDING.md") from error


def one_of(names: Mapping[str, object] | tuple[str, ...]) -> str:
    """For messages: what may stand where a name is asked for."""
    return f"{', '.join(names)} or a {PLUGIN} of your own"
