"""Stored desired state: round trips, and records of other versions."""

from __future__ import annotations

import json

from cluster.control.desired_state import Desired
from core.identity.deployment_secrets import DeploymentSecrets
from core.types.request import Role
from tests.cluster.deployments import make_desired

# As written by the oldest supported version (tests/support/oldest_version.py).
_OLDEST = {
    "spec": {"name": "kept", "prefill": {"replicas": 3}},
    "index_url": "redis://:pass@127.0.0.1:7000/0",
    "log_dir": "/logs",
    "credentials": {"secret": "ab" * 32},
    "parts": {"prefill": "a.b:c", "decode": "d.e:f"},
    "next_number": {"prefill": 4, "decode": 2},
    "revision": 2,
    "last_revision": 3,
    "makes": {"prefill": 2, "decode": 1},
    "made": {"decode-1": 3},
    "update": None,
    "last_update": "revision 2 serves",
    "table_version": 5,
    "switched": {},
}


def test_round_trip_keeps_scaling_and_role_switches() -> None:
    desired = make_desired({"name": "kept"}, switched={"decode-1": "prefill-3"})
    desired.scale(Role.DECODE, 5)
    assert desired.take_number(Role.DECODE) == 0
    again = Desired.from_json(desired.to_json())
    assert again == desired and again.spec.decode.replicas == 5 and again.take_number(Role.DECODE) == 1
    assert again.launch.credentials == desired.launch.credentials


def test_other_version_is_read_and_unknown_fields_ignored() -> None:
    newer = json.loads(json.dumps(_OLDEST))
    for level in (newer, newer["credentials"], newer["parts"]):
        level["of a newer version"] = [1]
    for tree in (_OLDEST, newer):
        found = Desired.from_json(json.dumps(tree))
        assert (found.spec.prefill.replicas, found.launch.log_dir, found.parts.decode) == (3, "/logs", "d.e:f")
        assert found.launch.credentials == DeploymentSecrets(
            secret=b"\xab" * 32, index_url="redis://:pass@127.0.0.1:7000/0"
        )
        assert found.next_number == {Role.PREFILL: 4, Role.DECODE: 2} and found.make_of("prefill-0", Role.PREFILL) == 2
