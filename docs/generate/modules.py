"""Every module in one line, for docs/MODULES.md: the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path

from docs.generate.table import table

_ROOT = Path(__file__).parent.parent.parent
_PACKAGES = ("cluster", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router")
_SENTENCE = re.compile(r"(.*?[.?:])(?=\s|$)", re.DOTALL)


def index() -> str:
    parts = []
    for package in _PACKAGES:
        paths = sorted(
            (path for path in (_ROOT / package).rglob("*.py") if _is_shown(path)), key=lambda p: (p.parent, p)
        )
        for folder, inside in groupby(paths, key=lambda path: path.parent):
            rows = [(f"`{path.stem}`", _first_sentence(path)) for path in inside]
            parts.append(f"## `{folder.relative_to(_ROOT)}/`\n\n{table(('module', 'what it is'), rows)}")
    return "\n\n".join(parts)


def _is_shown(path: Path) -> bool:
    return not path.name.startswith("__") and path.parent.name != "rpc"


def _first_sentence(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = _SENTENCE.match(doc.split("\n\n")[0])
    return found[1].removesuffix(":") if found else doc.split("\n\n")[0]
