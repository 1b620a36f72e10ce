"""Jinja sandbox for chat templates, with the globals and filters that transformers provides.

No value may grow longer than any prompt could be. Python strings can grow by widths, repetition, replacement and
joining. Each such operation is checked before it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_BOUNDED = ("center", "indent", "format", "replace", "slice", "batch", "truncate", "wordwrap", "join")  # filters


def environment() -> ImmutableSandboxedEnvironment:
    """Create an environment. Templates cannot modify their inputs, nor access attributes that start with an underscore.

    Jinja limits range() to 100,000; nested loops without output are not interrupted.
    """
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.filters |= {name: _bounded_filter(name, sandbox.filters[name]) for name in _BOUNDED}
    del sandbox.globals["lipsum"]
    own = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _dict, "namespace": _Namespace}
    sandbox.globals.update(own)
    return sandbox


class _Generator(CodeGenerator):
    """Code generator that routes `a ~ b` through the sandbox, like `a + b`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which additionally rejects powers and oversized values."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _Generator

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "**":
                raise SecurityError("operator ** is not available")
            case "*":
                _check_repetition(left, right)
            case "%":
                _check_format(left, right)
            case "+":
                _check_sum((left, right))
        return super().call_binop(context, operator, left, right)

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        _check_sum(parts)
        return "".join(map(str, parts))

    def wrap_str_format(self, value: Any) -> Any:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> Any:
            _check_text_call("format", value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return checked

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_text_call(getattr(__obj, "__name__", ""), text, args, kwargs)
        return ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """Tag {% generation %} … {% endgeneration %}, which marks training targets. Renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's namespace without names that start with an underscore, which could reach Python protocols."""

    def __init__(*args: Any, **values: Any) -> None:  # no parameter is named self, so that a template can use the name
        self, *rest = args
        merged = dict(*rest, **values)
        for name in merged:
            _check_name(name)
        Namespace.__init__(self, merged)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r} on a namespace")


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode plain JSON. Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, default=_listed, **options)


def _listed(value: Any) -> list[Any]:
    """Return the values of a generator, such as the filter `map` makes. Raises TypeError for other values."""
    if isinstance(value, Iterator):
        return [*value]
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


MAX_TEXT_CHARS = 16 * 1024 * 1024  # of a rendered prompt and of any intermediate text; exceeds every context
_MAX_WIDTH = 4096
_WIDTH = re.compile(r"\d{5,}")  # of a format string
_BY_WIDTH = {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "indent", "wordwrap", "slice",
             "batch", "truncate"}  # fmt: skip


def _check_repetition(left: Any, right: Any) -> None:
    """Check left * right. Raises SecurityError."""
    for sized, count in ((left, right), (right, left)):
        if isinstance(count, int) and _size(sized) * count > MAX_TEXT_CHARS:
            raise SecurityError("a repetition is too long")


def _check_sum(parts: Iterable[Any]) -> None:
    """Check the concatenation of texts or lists. Raises SecurityError."""
    if sum(map(_size, parts)) > MAX_TEXT_CHARS:
        raise SecurityError("a text is too long")


def _check_format(pattern: Any, arguments: Any) -> None:
    """Check pattern % arguments: widths in the pattern, and those taken from the arguments. Raises SecurityError."""
    if isinstance(pattern, str):
        if _WIDTH.search(pattern):
            raise SecurityError("a width is too large")
        _check_widths(arguments if isinstance(arguments, tuple) else (arguments,), only_if="*" in pattern)


def _check_text_call(name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a string method or filter of that name. Raises SecurityError."""
    if name in _BY_WIDTH:
        if name.startswith("format") and _WIDTH.search(text):
            raise SecurityError("a width is too large")
        _check_widths((*args, *kwargs.values()))
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        if len(text) + text.count(args[0]) * len(args[1]) > MAX_TEXT_CHARS:
            raise SecurityError("a replacement is too long")
    if name == "join" and args and isinstance(args[0], list | tuple):
        _check_repetition(text, len(args[0]))
        _check_sum(args[0])


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Jinja filter with the check of the string method of that name."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        plain = [argument for argument in args if isinstance(argument, str | int | float | list | tuple)]
        if plain and isinstance(plain[0], str):
            _check_text_call(name, plain[0], tuple(plain[1:]), kwargs)
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
