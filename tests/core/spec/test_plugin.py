"""Errors of plugin names: one line for every kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.spec.plugin import find, made
from core.types.errors import SpecError

_MODULES = {
    "plugin_good": "class Made:\n    def __init__(self, size: int) -> None: ...\nX = 3",
    "plugin_raises": "raise RuntimeError('not today')",
    "plugin_syntax": "def (",
    "plugin_exits": "import sys; sys.exit(3)",
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nosuch", "must be ours or a MODULE:NAME"),
        ("plugin_nosuch:X", "PYTHONPATH"),
        ("plugin_good:Y", "AttributeError"),
        ("plugin_good:X", "must be a class"),
        ("plugin_raises:X", "RuntimeError: not today"),
        ("plugin_syntax:X", "SyntaxError"),
        ("plugin_exits:X", "SystemExit: 3"),
    ],
)
def test_invalid_name_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    for module, text in _MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError) as rejected:
        find(name, {"ours": object})
    assert (
        str(rejected.value).startswith(f"{name}: ")
        and reason in str(rejected.value)
        and "\n" not in str(rejected.value)
    )


def test_wrong_signature_is_one_line() -> None:
    def make(*, size: int) -> int:
        return size

    assert made("a:b", make, size=3) == 3
    with pytest.raises(SpecError, match=r"a:b: cannot be created: .*count"):
        made("a:b", make, count=3)
