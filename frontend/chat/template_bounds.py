"""What a template may make of few characters: nothing that is longer than a prompt could be.

Python's text can grow by widths, by repetition, by replacement and by joining. Each is refused before it is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

MAX_TEXT_CHARS = 16 * 1024 * 1024  # of a rendered prompt, and of any text on the way; no context is that long
_MAX_WIDTH = 4096
_WIDTH = re.compile(r"\d{5,}")  # in a format string
_BY_WIDTH = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "wordwrap", "slice",
             "batch", "truncate"}  # fmt: skip


def check_repetition(left: Any, right: Any) -> None:
    """Of left * right."""
    for sized, count in ((left, right), (right, left)):
        if isinstance(count, int) and _size(sized) * count > MAX_TEXT_CHARS:
            raise SecurityError("a repetition is too long")


def check_sum(parts: Iterable[Any]) -> None:
    """Of texts or lists that are put together."""
    if sum(map(_size, parts)) > MAX_TEXT_CHARS:
        raise SecurityError("a text is too long")


def check_format(pattern: Any, arguments: Any) -> None:
    """Of pattern % arguments: widths in the pattern, and those that it takes from the arguments."""
    if isinstance(pattern, str):
        if _WIDTH.search(pattern):
            raise SecurityError("a width is too large")
        _check_widths(arguments if isinstance(arguments, tuple) else (arguments,), only_if="*" in pattern)


def check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of a call: most are no method of a text, and may be made."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(text, str):
        check_text_call(name, text, args, kwargs)


def check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of a method, or a filter, of that name."""
    if name in _BY_WIDTH:
        if name.startswith("format") and _WIDTH.search(text):
            raise SecurityError("a width is too large")
        _check_widths((*args, *kwargs.values()))
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        if len(text) + text.count(args[0]) * len(args[1]) > MAX_TEXT_CHARS:
            raise SecurityError("a replacement is too long")
    if name == "join" and args and isinstance(args[0], list | tuple):
        check_repetition(text, len(args[0]))
        check_sum(args[0])


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that is asked as a method of the text would be."""

    @wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        plain = [argument for argument in args if isinstance(argument, str | int | float | list | tuple)]
        if plain and isinstance(plain[0], str):
            check_text_call(name, plain[0], tuple(plain[1:]), kwargs)
        return function(*args, **kwargs)

    return asked


def bounded_format(pattern: str, function: Callable[..., str]) -> Callable[..., str]:
    """`pattern.format`, as Jinja has wrapped it."""

    def asked(*args: Any, **kwargs: Any) -> str:
        check_text_call("format", pattern, args, kwargs)
        return function(*args, **kwargs)

    return asked


def _size(value: Any) -> int:
    """Characters, or as many bytes; 0 of what cannot grow."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple) else 0


def _check_widths(values: Iterable[Any], *, only_if: bool = True) -> None:
    if only_if and any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise SecurityError("a width is too large")
