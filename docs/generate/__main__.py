"""Write the generated blocks of the documents (`make docs`): text between `<!-- NAME: ... -->` and `<!-- end -->`.

`tests/docs/test_generated.py` fails if a document differs from this output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from docs.generate import clients, families, metrics, spec
from tests.support.import_graph import picture

ROOT = Path(__file__).parent.parent.parent


def _packages() -> str:
    return f"```\n{picture()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    "spec": spec.sections,
    "errors": clients.errors,
    "fields": clients.fields,
    "responses": clients.responses,
    "anthropic-fields": clients.anthropic_fields,
    "limits": clients.limits,
    "metrics": metrics.table_text,
    "packages": _packages,
    "families": families.families,
    "family": families.example,
}

_BLOCK = re.compile(r"(<!-- (?P<name>[a-z-]+): [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> Iterable[Path]:
    """Return the paths of all Markdown documents of the project."""
    return sorted(
        [
            ROOT / "README.md",
            ROOT / "AGENTS.md",
            ROOT / "CHANGELOG.md",
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "deploy").rglob("*.md"),
        ]
    )


def fresh(text: str) -> str:
    """Return a document with its generated blocks up to date. Raises KeyError for an unknown block."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block['name']]()}\n\n{block[3]}", text)


def main() -> None:
    for path in documents():
        text = path.read_text()
        if text != fresh(text):
            path.write_text(fresh(text))
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
