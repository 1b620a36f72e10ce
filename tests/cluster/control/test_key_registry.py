"""The key keeper and Redis: publication, and cleanup after revoked keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from cluster.control import key_registry
from cluster.control.key_registry import KeyKeeper
from cluster.ray import store
from core.index.key_channel import places_of
from core.process.ports import free_port
from core.types.api_key import KeyChange, KeyRegistry, new_key, new_secret
from core.types.errors import DeployError
from tests.cluster.deployments import make_launch
from tests.support.disks import fill_disk
from tests.support.waiting import becomes

Keep = Callable[[str], KeyKeeper]


@pytest.fixture
async def keep(ray_store: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keep]:
    """keep(index_url) -> KeyKeeper of one deployment, also after restarts."""
    monkeypatch.setattr(key_registry, "_PUBLISH_S", 0.05)
    launch, made = make_launch({"name": "kept"}, log_dir=str(tmp_path / "logs")), list[KeyKeeper]()

    def keeper(index_url: str) -> KeyKeeper:
        made.append(KeyKeeper(replace(launch, credentials=replace(launch.credentials, index_url=index_url))))
        return made[-1]

    yield keeper
    for one in made:
        await one.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file on the head."""
    return tmp_path / "keys.json"


async def test_change_reports_whether_it_was_published(keep: Keep, redis_url: str) -> None:
    key = new_key("a", new_secret())
    keeper = keep(redis_url)
    assert (await keeper.add(key)).is_published and (await keeper.revoke(key)).is_published
    away = keep(f"redis://127.0.0.1:{free_port()}")
    assert not (await away.add(key)).is_published
    change = await away.revoke(key)
    assert (change.key, change.is_published) == (key, False)
    assert away.registry == KeyRegistry(version=4), "it is stored in any case"


async def test_counters_of_revoked_keys_are_deleted_after_a_restart(keep: Keep, redis_url: str) -> None:
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
    store.put(store.namespace("kept"), "keys", first.registry.to_json())
    keep(redis_url)
    await becomes(lambda: not client.exists(*places_of("kept", revoked.id)))
    assert client.exists(*places_of("kept", kept.id)) == 1
    client.close()


async def test_registry_that_redis_lost_is_published_again(keep: Keep, redis_url: str) -> None:
    keeper = keep(redis_url)
    await keeper.add(new_key("a", new_secret()))
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        await becomes(lambda: client.hexists("kept:keys", "book"))
        assert KeyRegistry.from_json(client.hget("kept:keys", "book")) == keeper.registry  # type: ignore[arg-type]


async def test_revoke_is_idempotent(keep: Keep, redis_url: str) -> None:
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
    keep: Keep, redis_url: str, file: Path, monkeypatch: pytest.MonkeyPatch
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
        assert KeyRegistry.from_json(file.read_bytes()).keys == (key,)
    await becomes(lambda: KeyRegistry.from_json(file.read_bytes()) == KeyRegistry(version=2))


async def test_unsaved_key_is_not_created(
    keep: Keep, redis_url: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_key("a", new_secret()), new_key("b", new_secret())
    keeper = keep(redis_url)
    await keeper.add(first)
    with monkeypatch.context() as patched:
        fill_disk(patched)
        with pytest.raises(DeployError, match=r"the key was not created: .*keys\.json: No space left on device"):
            await keeper.add(second)
    assert keeper.registry == keep(redis_url).registry == KeyRegistry(version=1, keys=(first,))
    assert list(file.parent.iterdir()) == [file]


async def test_restart_restores_either_copy_from_the_other(
    keep: Keep, redis_url: str, file: Path, ray_store: dict[tuple[str, str], bytes]
) -> None:
    """The head may have a new disk; the next deployment has only the file, and Ray's entry is newer than the file."""
    key = new_key("a", new_secret())
    await keep(redis_url).add(key)
    registry, other = KeyRegistry(version=1, keys=(key,)), KeyRegistry(version=7, keys=(new_key("b", new_secret()),))
    for left in (None, "", other.to_json()):
        file.unlink()
        if left is not None:
            file.write_text(left)
        assert keep(redis_url).registry == KeyRegistry.from_json(file.read_bytes()) == registry
    ray_store.clear()
    assert keep(redis_url).registry == registry
    assert [KeyRegistry.from_json(text) for text in ray_store.values()] == [registry]


async def test_failed_restore_is_retried(
    keep: Keep, redis_url: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(redis_url).add(new_key("a", new_secret()))
    file.unlink()
    with monkeypatch.context() as patched:
        fill_disk(patched)
        registry = keep(redis_url).registry
    await becomes(file.exists)
    assert KeyRegistry.from_json(file.read_bytes()) == registry


@pytest.mark.parametrize(
    "left", ["", '{"version": 1, "keys": [', '{"version": 1}', "[]", '{"version": 1, "keys": [1]}']
)
async def test_truncated_file_is_an_error(keep: Keep, redis_url: str, file: Path, left: str) -> None:
    file.write_text(left)
    with pytest.raises(
        DeployError, match=r"keys\.json: not a registry of API keys; put back a copy of it, or delete it"
    ):
        keep(redis_url)
    assert file.read_text() == left
