"""Directories of a user with a home, with the variable set, and without either."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Any

import pytest

from core.process.user_dirs import user_dir
from core.types.errors import SpecError


def test_variable_comes_before_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLUSTER_X", raising=False)
    assert user_dir("CLUSTER_X", ".cache", "xpyd") == tmp_path / ".cache" / "xpyd"
    monkeypatch.setenv("CLUSTER_X", "~/elsewhere")
    assert user_dir("CLUSTER_X", ".cache") == tmp_path / "elsewhere"


def test_user_id_without_a_home_is_told_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("CLUSTER_X", raising=False)
    with pytest.raises(SpecError, match=r"HOME is not set and user id \d+ has no passwd entry; set CLUSTER_X to a"):
        user_dir("CLUSTER_X")
