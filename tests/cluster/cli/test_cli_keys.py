"""`cluster keys` when a change has not reached the routers or a disk."""

from __future__ import annotations

import pytest

from core.types.api_key import ApiKey, KeyChange, KeyRegistry, new_key, new_secret
from tests.cluster.cli.command import CommandInProcess
from tests.cluster.cli.conftest import Control

_KEY = new_key("acme", new_secret())


@pytest.mark.parametrize(
    ("is_published", "problem", "error"),
    [
        (True, "", ""),
        (False, "", "Redis is unavailable: running routers accept it until"),
        (True, "keys.json: No space left on device; until then", "is revoked, but keys.json: No space left on device"),
    ],
)
def test_change_that_did_not_reach_everything_is_reported(
    control: Control, cluster: CommandInProcess, is_published: bool, problem: str, error: str
) -> None:
    def answer(method: str, *keys: ApiKey) -> KeyRegistry | KeyChange:
        if not keys:
            return KeyRegistry(version=1, keys=(_KEY,))
        return KeyChange(key=keys[0], is_published=is_published, problem=problem)

    control(answer)
    revoked = cluster.run("keys", "revoke", "acme")
    assert revoked.code == (2 if error else 0)
    assert revoked.out == ("" if error else f"{_KEY.id} of acme is revoked\n")
    assert error in revoked.err and bool(error) == bool(revoked.err)
    created = cluster.run("keys", "create", "acme")
    assert created.code == 0 and created.out.startswith("sk-")
    assert ("Redis is unavailable: routers accept this key when it is back" in created.err) != is_published
    unknown = cluster.run("keys", "revoke", "other")
    assert unknown.code == 2 and "no key is called other; there are: acme" in unknown.err
