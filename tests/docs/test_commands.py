"""Every command that a document names exists, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.app import app as benchmarks
from cluster.cli.app import app
from docs.generate.__main__ import ROOT, documents

_SPAN = re.compile(r"(?<!`)`((?:cluster|make|python -m benchmarks) [^`]+)`(?!`)")
_BLOCK_LINE = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*((?:cluster|make|python -m benchmarks) .*)$")
_COMMANDS = typer.main.get_command(app)
_BENCHMARKS = typer.main.get_command(benchmarks)
_OLD = {"docs/LOG.md"}  # its commands are those of that time
_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _said(path: Path) -> list[str]:
    """The commands in code spans, and the lines of code blocks, which may go on behind a backslash."""
    text = path.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^    .*$", text, re.MULTILINE)
    lines = [match[1] for block in blocks for line in block.splitlines() if (match := _BLOCK_LINE.match(line))]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*lines, *(" ".join(span.split()) for span in _SPAN.findall(prose))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_exists(path: Path) -> None:
    if str(path.relative_to(ROOT)) in _OLD:
        return
    wrong = {line: why for line in _said(path) if (why := _what_is_wrong(line))}
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "cluster deplay 2P4D",
        "cluster status --jsn",
        "cluster bench kv",
        "python -m benchmarks knl",
        "make tset",
        "cluster down now",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    assert _what_is_wrong(line)


def _what_is_wrong(line: str) -> str:
    line = re.sub(r"\s+#.*|\s+\|.*|(\s--\S+)?\s*…", "", line)  # comments, pipes and alternatives, and so on
    words = shlex.split(re.sub(r"[\[\]]", "", line))
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in _TARGETS]
        return f"no target {unknown}" if unknown else ""
    return _check(_BENCHMARKS, words[3:]) if words[0] == "python" else _check(_COMMANDS, words[1:])


def _check(command: Any, words: list[str]) -> str:
    """What the parser says of it: unknown options, commands, and arguments that are too many or missing."""
    context = command.context_class(command, info_name="cluster")
    try:
        _, rest, given = command.make_parser(context).parse_args(list(words))
    except Exception as error:  # typer has a copy of click's errors
        is_a_name = "requires an argument" in str(error) and words[-1].startswith("-")  # of an option, in prose
        return "" if is_a_name else str(error) or type(error).__name__
    if commands := getattr(command, "commands", None):
        if not rest:
            if any(option.callback for option in given):  # such as --version
                return ""
            return "" if command.invoke_without_command or not words else "which command?"
        return _check(commands[rest[0]], rest[1:]) if rest[0] in commands else f"no {rest[0]}"
    places = [param for param in command.params if param.param_type_name == "argument"]
    takes_many = any(place.nargs == -1 for place in places)
    given = [word for word in words if not word.startswith("-")]
    if any(place.required for place in places) and not given and len(words) > 0:
        return "an argument is missing"
    return f"what is {rest}?" if rest and not takes_many and len(rest) > len(places) else ""
