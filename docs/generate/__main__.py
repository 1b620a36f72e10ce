"""`make docs`: what the documents say of the code, taken from the code, between `<!-- NAME: … -->` and `<!-- end -->`.

`tests/docs/test_generated.py` fails where a document is not what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from docs.generate import clients, metrics, modules, source, spec
from docs.generate.prose import wrap
from tests.support.import_graph import picture

ROOT = Path(__file__).parent.parent.parent


def _packages() -> str:
    return f"```\n{picture()}\n```"


BLOCKS: dict[str, Callable[[], str]] = {
    "spec": spec.sections,
    "errors": clients.errors,
    "fields": clients.fields,
    "messages": clients.messages,
    "responses": clients.responses,
    "batches": clients.batches,
    "items": clients.items,
    "anthropic-fields": clients.anthropic_fields,
    "limits": clients.limits,
    "metrics": metrics.table_text,
    "packages": _packages,
    "loop": source.loop,
    "modules": modules.index,
}

_BLOCK = re.compile(r"(<!-- (?P<name>[a-z-]+): [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> Iterable[Path]:
    """Every Markdown file that is ours to write."""
    return sorted(
        [ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    )


def fresh(text: str) -> str:
    """A document as it should be: its blocks from the code, its prose at one width."""
    return wrap(_BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block['name']]()}\n\n{block[3]}", text))


def main() -> None:
    for path in documents():
        text = path.read_text()
        if text != fresh(text):
            path.write_text(fresh(text))
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
