"""The key keeper and Redis: publication, and cleanup after revoked keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cluster.control import key_registry
from cluster.control.key_registry import KeyKeeper
from cluster.ray import internals
from core.identity.deployment_secrets import DeploymentSecrets
from core.index.key_channel import places_of
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.types.api_key import KeyChange, KeyRegistry, new_key, new_secret
from core.types.errors import DeployError
from core.types.launch import Launch
from tests.support.disks import fill_disk
from tests.support.waiting import becomes


@pytest.fixture
async def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], KeyKeeper]]:
    """keep(index_url) -> KeyKeeper of one deployment, also after restarts."""
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(internals, "put", lambda key, value, *, namespace: stored.update({key: value}))
    monkeypatch.setattr(internals, "get", lambda key, *, namespace: stored.get(key))
    monkeypatch.setattr(internals, "delete", lambda key, *, namespace: stored.pop(key, None))
    monkeypatch.setattr(key_registry, "_PUBLISH_S", 0.05)
    credentials, made = DeploymentSecrets.new(index_url=""), list[KeyKeeper]()

    def keeper(index_url: str) -> KeyKeeper:
        there = replace(credentials, index_url=index_url)
        launch = Launch(spec=parse_spec({"name": "kept"}), log_dir=str(tmp_path / "logs"), credentials=there)
        made.append(KeyKeeper(launch))
        return made[-1]

    yield keeper
    for one in made:
        await one.close()


async def test_change_reports_whether_it_was_published(keep: Callable[[str], KeyKeeper], redis_url: str) -> None:
    key = new_key("a", new_secret())
    keeper = keep(redis_url)
    assert (await keeper.add(key)).is_published and (await keeper.revoke(key)).is_published
    away = keep(f"redis://127.0.0.1:{free_port()}")
    assert not (await away.add(key)).is_published
    change = await away.revoke(key)
    assert (change.key, change.is_published) == (key, False)
    assert away.registry == KeyRegistry(version=4), "it is stored in any case"


async def test_counters_of_revoked_keys_are_deleted_after_a_restart(
    keep: Callable[[str], KeyKeeper], redis_url: str
) -> None:
    kept, revoked = new_key("a", new_secret(), rpm=1), new_key("b", new_secret(), rpm=1)
    first = keep(redis_url)
    await first.add(kept)
    await first.add(revoked)
    client = redis.Redis.from_url(redis_url)
    for key in (kept, revoked):
        client.hset(places_of("kept", key.id)[0], "r1", 1)
    await first.revoke(revoked)
    # Before it has cleaned up.
    await first.close()
    # As after a crash: it was not taken down.
    internals.put(b"keys", first.registry.to_json().encode(), namespace=b"")
    keep(redis_url)
    await becomes(lambda: not client.exists(*places_of("kept", revoked.id)))
    assert client.exists(*places_of("kept", kept.id)) == 1
    client.close()


async def test_revoke_is_idempotent(keep: Callable[[str], KeyKeeper], redis_url: str) -> None:
    """Ray repeats a call whose answer was lost when the controller died."""
    key, other = new_key("a", new_secret()), new_key("b", new_secret())
    keeper = keep(redis_url)
    await keeper.add(key)
    await keeper.add(other)
    first = await keeper.revoke(key)
    again = keep(redis_url)
    assert await again.revoke(key) == first == KeyChange(key=key, is_published=True)
    assert again.registry == KeyRegistry(version=3, keys=(other,))


async def test_revocation_works_on_a_full_disk(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart of the controller; and it is saved as soon as there is room."""
    key = new_key("a", new_secret())
    keeper = keep(redis_url)
    await keeper.add(key)
    with monkeypatch.context() as patched:
        fill_disk(patched)
        change = await keeper.revoke(key)
        assert change.is_published and "keys.json: No space left on device" in change.problem
        assert keeper.registry == keep(redis_url).registry == KeyRegistry(version=2)
        with redis.Redis.from_url(redis_url) as client:
            assert KeyRegistry.from_json(client.hget("kept:keys", "book")) == KeyRegistry(version=2)  # type: ignore[arg-type]
        assert KeyRegistry.from_json((tmp_path / "keys.json").read_bytes()).keys == (key,)
    await becomes(lambda: KeyRegistry.from_json((tmp_path / "keys.json").read_bytes()) == KeyRegistry(version=2))


async def test_unsaved_key_is_not_created(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_key("a", new_secret()), new_key("b", new_secret())
    keeper = keep(redis_url)
    await keeper.add(first)
    with monkeypatch.context() as patched:
        fill_disk(patched)
        with pytest.raises(DeployError, match=r"the key was not created: .*keys\.json: No space left on device"):
            await keeper.add(second)
    assert keeper.registry == keep(redis_url).registry == KeyRegistry(version=1, keys=(first,))
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


async def test_restart_restores_the_file_from_ray(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path
) -> None:
    """The head may have a new disk, and the next deployment has only the file."""
    key, file = new_key("a", new_secret()), tmp_path / "keys.json"
    registry = (await keep(redis_url).add(key)) and KeyRegistry(version=1, keys=(key,))
    file.unlink()
    assert keep(redis_url).registry == KeyRegistry.from_json(file.read_bytes()) == registry
    for other in ("", KeyRegistry(version=7, keys=(new_key("b", new_secret()),)).to_json()):
        file.write_text(other)
        assert keep(redis_url).registry == KeyRegistry.from_json(file.read_bytes()) == registry


async def test_failed_restore_is_retried(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(redis_url).add(new_key("a", new_secret()))
    (tmp_path / "keys.json").unlink()
    with monkeypatch.context() as patched:
        fill_disk(patched)
        registry = keep(redis_url).registry
    await becomes((tmp_path / "keys.json").exists)
    assert KeyRegistry.from_json((tmp_path / "keys.json").read_bytes()) == registry


async def test_restart_restores_ray_from_the_file(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path
) -> None:
    registry = KeyRegistry(version=1, keys=(new_key("a", new_secret()),))
    (tmp_path / "keys.json").write_text(registry.to_json())
    assert keep(redis_url).registry == registry
    (tmp_path / "keys.json").unlink()
    assert keep(redis_url).registry == registry


@pytest.mark.parametrize(
    "left", ["", '{"version": 1, "keys": [', '{"version": 1}', "[]", '{"version": 1, "keys": [1]}']
)
async def test_truncated_file_is_an_error(
    keep: Callable[[str], KeyKeeper], redis_url: str, tmp_path: Path, left: str
) -> None:
    (tmp_path / "keys.json").write_text(left)
    with pytest.raises(
        DeployError, match=r"keys\.json: not a registry of API keys; put back a copy of it, or delete it"
    ):
        keep(redis_url)
    assert (tmp_path / "keys.json").read_text() == left
