"""What the documents take from the code is what the code says, and their prose has one width."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.__main__ import ROOT, documents, fresh
from docs.generate.prose import wrap


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_what_make_docs_would_write(path: Path) -> None:
    text = path.read_text()
    assert text == fresh(text), "run `make docs`"


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("a\nb\n", "a b\n"),
        ("- a\n  b\n- c\n", "- a b\n- c\n"),
        ("```\na\nb\n```\n", "```\na\nb\n```\n"),
        ("| a |\n| b |\n", "| a |\n| b |\n"),
        ("a:\n\n    code\n    more\n", "a:\n\n    code\n    more\n"),
        ("x" * 110 + " yyyyyy 12. z\n", "x" * 110 + "\nyyyyyy 12. z\n"),  # a line that began with 12. would be a list
        ("x" * 110 + " `a b c d e f`\n", "x" * 110 + "\n`a b c d e f`\n"),
    ],
)
def test_prose_is_filled_and_nothing_else(text: str, wrapped: str) -> None:
    assert wrap(text) == wrapped and wrap(wrapped) == wrapped
