"""Jinja sandbox for chat templates, with the globals and filters that transformers provides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from frontend.chat.template_bounds import (
    bounded_filter,
    bounded_format,
    check_format,
    check_method,
    check_repetition,
    check_sum,
)

_BOUNDED = ("center", "indent", "format", "replace", "slice", "batch", "truncate", "wordwrap", "join")  # filters


def environment() -> ImmutableSandboxedEnvironment:
    """Create an environment. Templates cannot modify their inputs, nor access attributes that start with an underscore.

    Jinja limits range() to 100,000; nested loops without output are not interrupted.
    """
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.filters |= {name: bounded_filter(name, sandbox.filters[name]) for name in _BOUNDED}
    del sandbox.globals["lipsum"]
    sandbox.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_dict, namespace=_Namespace
    )
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
                check_repetition(left, right)
            case "%":
                check_format(left, right)
            case "+":
                check_sum((left, right))
        return super().call_binop(context, operator, left, right)

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        check_sum(parts)
        return "".join(map(str, parts))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return wrapped and bounded_format(value.__self__, wrapped)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_method(__obj, args, kwargs)
        return ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}, which marks training targets; renders its content."""

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
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode plain JSON. Jinja's own filter escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """Return the values of a generator, such as the filter `map` makes. Raises TypeError for other values."""
    if isinstance(value, Iterator):
        return [*value]
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
