"""Secrets of a deployment do not leak, and reach its processes unchanged."""

from __future__ import annotations

import pickle

from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.spec.loader import parse_spec
from core.types.launch import Launch

_URL = "rediss://:pass-of-the-index@redis.example:6380/0"


def test_repr_of_a_launch_hides_secrets() -> None:
    credentials = DeploymentSecrets.new(index_url=_URL)
    launch = Launch(spec=parse_spec({"index": _URL}), log_dir="logs", credentials=credentials)
    for shown in (repr(launch), str(launch), repr(credentials), str(credentials), str([launch.spec])):
        assert credentials.secret.hex() not in shown and repr(credentials.secret) not in shown
        assert "pass-of-the-index" not in shown


def test_launch_round_trips_through_pickle() -> None:
    """Ray pickles it like any argument."""
    launch = Launch(
        spec=parse_spec({"decode": {"replicas": 3}}), log_dir="logs", credentials=DeploymentSecrets.new(index_url=_URL)
    )
    there = pickle.loads(pickle.dumps(launch))
    assert there == launch and there.credentials.index_url == _URL
    assert there.credentials.key(Purpose.LINKS) == launch.credentials.key(Purpose.LINKS)


def test_missing_keys_get_the_receivers_defaults() -> None:
    """During an upgrade an older controller starts newer processes."""
    launch = Launch(spec=parse_spec({"name": "a"}), log_dir="logs", credentials=DeploymentSecrets.new(index_url=_URL))
    arrive, (spec, *rest) = launch.__reduce__()
    del spec["security"], spec["kv"]["encrypt"]
    assert arrive(spec, *rest) == launch


def test_each_purpose_has_its_own_key() -> None:
    credentials, other = DeploymentSecrets.new(index_url=""), DeploymentSecrets.new(index_url="")
    keys = [each.key(purpose) for each in (credentials, other) for purpose in Purpose]
    assert len(set(keys)) == 2 * len(Purpose) and {len(key) for key in keys} == {32}
    assert credentials.key(Purpose.LINKS) == DeploymentSecrets(secret=credentials.secret, index_url="").key(
        Purpose.LINKS
    )
