"""Pieces of the source, as they stand there."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

_ROOT = Path(__file__).parent.parent.parent


def methods(path: str, owner: str, *names: str) -> str:
    """A code block with these methods of a class, in this order."""
    text = (_ROOT / path).read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner)
    of_name = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    parts = [ast.get_source_segment(text, of_name[name], padded=True) or "" for name in names]
    return "```python\n" + "\n\n".join(textwrap.dedent(part) for part in parts) + "\n```"


def loop() -> str:
    return methods("engine/engine.py", "Engine", "step", "launch", "complete")
