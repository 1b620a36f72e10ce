"""`cluster keys` when a change has not reached the routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import connection
from cluster.cli.app import run
from cluster.launch import driver
from core.types.api_key import ApiKey, KeyChange, KeyRegistry, new_key, new_secret

_KEY = new_key("acme", new_secret())


@pytest.fixture(params=[True, False])
def is_published(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the controller could publish the change to the routers."""
    has_published: bool = request.param

    def ask(controller: object, method: str, *keys: ApiKey) -> KeyRegistry | KeyChange:
        return KeyChange(key=keys[0], is_published=has_published) if keys else KeyRegistry(version=1, keys=(_KEY,))

    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(connection, "find_state", lambda name, **_: None)
    monkeypatch.setattr(connection, "join_controller", lambda state: None)
    monkeypatch.setattr(driver, "ask", ask)
    return has_published


def test_unpublished_revocation_is_an_error(is_published: bool, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(["keys", "revoke", "acme"]), capsys.readouterr()
    assert (code == 0) == is_published
    assert printed.out == (f"{_KEY.id} of acme is revoked\n" if is_published else "")
    assert ("Redis is unavailable: running routers accept it until" in printed.err) != is_published


@pytest.mark.parametrize("is_published", [True], indirect=True)
def test_unsaved_revocation_is_an_error(
    is_published: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(controller: object, method: str, *keys: ApiKey) -> KeyRegistry | KeyChange:
        if not keys:
            return KeyRegistry(version=1, keys=(_KEY,))
        return KeyChange(
            key=keys[0], is_published=is_published, problem="keys.json: No space left on device; until then"
        )

    monkeypatch.setattr(driver, "ask", ask)
    assert run(["keys", "revoke", _KEY.id]) == 2
    printed = capsys.readouterr()
    assert f"{_KEY.id} of acme is revoked, but keys.json: No space left on device" in printed.err and not printed.out


def test_unknown_key_lists_the_existing_ones(is_published: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "revoke", "other"]) == 2
    assert "no key is called other; there are: acme" in capsys.readouterr().err


def test_unpublished_new_key_is_reported(is_published: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "create", "acme"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("sk-")
    assert ("Redis is unavailable: routers accept this key when it is back" in printed.err) != is_published
