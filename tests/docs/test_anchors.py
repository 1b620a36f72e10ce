"""Links between documents lead to headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate.__main__ import ROOT, documents

_LINK = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")


def _anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_headings(path: Path) -> None:
    text = " ".join(path.read_text().split())
    missing = [
        f"{target}#{anchor}"
        for target, anchor in _LINK.findall(text)
        if "://" not in target and anchor not in _anchors((path.parent / target) if target else path)
    ]
    assert not missing
