"""Size limits for operations of chat templates: no value may grow longer than any prompt could be.

Python strings can grow by widths, repetition, replacement and joining. Each is checked before it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

MAX_TEXT_CHARS = 16 * 1024 * 1024  # of a rendered prompt and of any intermediate text; exceeds every context
_MAX_WIDTH = 4096
_WIDTH = re.compile(r"\d{5,}")  # of a format string
_BY_WIDTH = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "wordwrap", "slice",
             "batch", "truncate"}  # fmt: skip


def check_repetition(left: Any, right: Any) -> None:
    """Check left * right. Raises SecurityError."""
    for sized, count in ((left, right), (right, left)):
        if isinstance(count, int) and _size(sized) * count > MAX_TEXT_CHARS:
            raise SecurityError("a repetition is too long")


def check_sum(parts: Iterable[Any]) -> None:
    """Check the concatenation of texts or lists. Raises SecurityError."""
    if sum(map(_size, parts)) > MAX_TEXT_CHARS:
        raise SecurityError("a text is too long")


def check_format(pattern: Any, arguments: Any) -> None:
    """Check pattern % arguments: widths in the pattern, and those taken from the arguments. Raises SecurityError."""
    if isinstance(pattern, str):
        if _WIDTH.search(pattern):
            raise SecurityError("a width is too large")
        _check_widths(arguments if isinstance(arguments, tuple) else (arguments,), only_if="*" in pattern)


def check_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call, if it is one of a string method. Raises SecurityError."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(text, str):
        check_text_call(name, text, args, kwargs)


def check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a string method or filter of that name. Raises SecurityError."""
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
    """Wrap a Jinja filter with the check of the string method of that name."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        plain = [argument for argument in args if isinstance(argument, str | int | float | list | tuple)]
        if plain and isinstance(plain[0], str):
            check_text_call(name, plain[0], tuple(plain[1:]), kwargs)
        return function(*args, **kwargs)

    return checked


def bounded_format(pattern: str, function: Callable[..., str]) -> Callable[..., str]:
    """Wrap `pattern.format`, as returned by Jinja, with its check."""

    def checked(*args: Any, **kwargs: Any) -> str:
        check_text_call("format", pattern, args, kwargs)
        return function(*args, **kwargs)

    return checked


def _size(value: Any) -> int:
    """Return the size in characters; 0 for a value that cannot grow."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple) else 0


def _check_widths(values: Iterable[Any], *, only_if: bool = True) -> None:
    if only_if and any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise SecurityError("a width is too large")
