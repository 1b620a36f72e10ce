"""Generated blocks of the documents match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.__main__ import ROOT, documents, fresh


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_blocks_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert text == fresh(text), "run `make docs`"
