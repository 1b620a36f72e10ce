"""API keys across a controller crash, a Redis that loses data, and the end of the deployment."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
import redis

from core.identity.deployment_secrets import Purpose
from core.index.key_channel import KeyReader
from core.index.redis_client import connect_redis
from core.types.api_key import KeyChange, KeyRegistry, new_key, new_secret
from core.types.errors import SpecError
from tests.cluster.control.deploying import Deploy, Deployment
from tests.support.waiting import until

_NOBODY: dict[str, Any] = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}


def published(deployment: Deployment, redis_url: str) -> KeyRegistry | None:
    """Return what a router reads when it starts."""

    async def read() -> KeyRegistry | None:
        signing_key = deployment.credentials.key(Purpose.API_KEYS)
        client = connect_redis(redis_url)
        try:
            return await KeyReader(client, name=deployment.name, signing_key=signing_key).read()
        finally:
            await client.aclose()

    return asyncio.run(read())


@pytest.mark.timeout(300)
def test_keys_outlive_controller_redis_and_deployment(deploy: Deploy, redis_url: str, tmp_path: Path) -> None:
    deployment = deploy(_NOBODY, index_url=redis_url)
    first, second = new_key("first", new_secret(), rpm=3), new_key("second", new_secret())
    deployment.call("add_key", first)
    assert deployment.call("add_key", second).is_published
    with pytest.raises(SpecError, match="a key is called first already"):
        deployment.call("add_key", new_key("first", new_secret()))
    book = KeyRegistry(version=2, keys=(first, second))
    assert deployment.call("keys") == book == published(deployment, redis_url), "at once"

    redis.Redis.from_url(redis_url).flushall()
    until(lambda: published(deployment, redis_url) == book)
    deployment.restart()
    assert deployment.call("revoke_key", second) == KeyChange(key=second, is_published=True)
    assert published(deployment, redis_url) == KeyRegistry(version=3, keys=(first,))

    file = tmp_path / "keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    deployment.call("stop")
    again = deploy(_NOBODY, index_url=redis_url)
    assert again.call("keys") == KeyRegistry(version=3, keys=(first,))
