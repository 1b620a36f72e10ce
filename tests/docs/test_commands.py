"""Every command that a document names exists, with its options; specs are valid, and Python compiles."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.app import app as benchmarks
from cluster.cli.app import app
from core.spec.loader import load_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from docs.generate.__main__ import ROOT, documents

_BENCHMARKS = "python -m benchmarks"
_PROGRAM = rf"(?:cluster|make|{_BENCHMARKS}) "
_SPAN = re.compile(rf"(?<!`)`({_PROGRAM}[^`]+)`(?!`)")
_BLOCK_LINE = re.compile(rf"^\s*(?:[A-Z_]+=\S+ |\$ )*({_PROGRAM}.*)$")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SET = re.compile(r"--set '?([\w.]+=[^\s`'|]+)")
# Such as `speculation: {method: eagle}` and `router.keys: required` of prose.
_SPEC_SPAN = re.compile(rf"`((?:{'|'.join(Spec.model_fields)})(?:\.\w+)*): ([^`…]+)`")
_COMMANDS = {"cluster": typer.main.get_command(app), "benchmarks": typer.main.get_command(benchmarks)}
# It names commands of earlier versions.
_HISTORY = "CHANGELOG.md"
_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_specs_are_valid_and_python_compiles(path: Path) -> None:
    if path.name == _HISTORY:
        return
    text = path.read_text()
    problems = []
    for language, block in _FENCE.findall(text):
        if language == "python":
            compile(block, str(path), "exec")
        elif language == "yaml":
            tree = yaml.safe_load(block)
            problems += [_spec_problem(f"{key}={value}") for key, value in tree.items()]
    spans = (f"{key}={value}" for key, value in _SPEC_SPAN.findall(" ".join(text.split())))
    problems += [_spec_problem(override) for override in (*_SET.findall(text), *spans)]
    assert not [problem for problem in problems if problem]


@pytest.mark.parametrize("override", ["decode.max_runing=3", "router.keys=maybe", "sppeculation.method=auto"])
def test_wrong_spec_is_found(override: str) -> None:
    assert _spec_problem(override)


def _spec_problem(override: str) -> str:
    """Return the error of this key. Others are about keys that the page sets beside it."""
    key, _, value = override.partition("=")
    if key.isupper() or value.isupper():  # placeholders
        return ""
    try:
        load_spec("1P1D", overrides=[override])
    except SpecError as error:
        return str(error) if str(error).startswith(f"1P1D: {key}: ") or "unknown key" in str(error) else ""
    return ""


def _commands(path: Path) -> list[str]:
    """Return the commands in code spans and in code blocks, where a backslash continues a line."""
    text = path.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^    .*$", text, re.MULTILINE)
    lines = [match[1] for block in blocks for line in block.splitlines() if (match := _BLOCK_LINE.match(line))]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*lines, *(" ".join(span.split()) for span in _SPAN.findall(prose))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_exists(path: Path) -> None:
    if path.name != _HISTORY:
        assert not {line: problem for line in _commands(path) if (problem := _problem(line))}


@pytest.mark.parametrize(
    "line",
    [
        "cluster deplay 2P4D",
        "cluster status --jsn",
        "cluster bench knl",
        "make tset",
        "python -m benchmarks kvv",
        "cluster down now",
    ],
)
def test_wrong_command_is_found(line: str) -> None:
    assert _problem(line)


def _problem(line: str) -> str:
    # Comments, pipes and ellipses are not part of the command.
    line = re.sub(r"\s+#.*|\s+\|.*|(\s--\S+)?\s*…", "", line).replace(_BENCHMARKS, "benchmarks")
    words = shlex.split(re.sub(r"[\[\]]", "", line))
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in _TARGETS]
        return f"no target {unknown}" if unknown else ""
    return _check(_COMMANDS[words[0]], words[1:])


def _check(command: Any, words: list[str]) -> str:
    """Return the parser's error: unknown options or commands, too many or missing arguments."""
    context = command.context_class(command, info_name="cluster")
    try:
        _, rest, given = command.make_parser(context).parse_args(list(words))
    except Exception as error:  # typer carries a copy of click's errors
        is_a_name = "requires an argument" in str(error) and words[-1].startswith("-")  # an option named in prose
        return "" if is_a_name else str(error) or type(error).__name__
    if commands := getattr(command, "commands", None):
        if not rest:
            if any(option.callback for option in given):  # such as --version
                return ""
            return "" if command.invoke_without_command or not words else "a command is missing"
        return _check(commands[rest[0]], rest[1:]) if rest[0] in commands else f"no {rest[0]}"
    places = [param for param in command.params if param.param_type_name == "argument"]
    takes_many = any(place.nargs == -1 for place in places)
    given = [word for word in words if not word.startswith("-")]
    if any(place.required for place in places) and not given and len(words) > 0:
        return "an argument is missing"
    return f"unexpected {rest}" if rest and not takes_many and len(rest) > len(places) else ""
