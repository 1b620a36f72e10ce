"""Loss of a node with everything on it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.control.deploying import Deploy
from tests.support.ray_fixtures import NODE

_SPARE = {"labels": {"pool": "spare"}}
_SPEC = {
    "model": {"source": "none"},
    # Not on the node that is lost.
    "prefill": {"resources": {"cpus": 0.1}, "labels": {"pool": "prefill"}},
    "decode": {"replicas": 2, "resources": {"cpus": 0.1}, **_SPARE},
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_replicas_of_a_lost_node_restart_elsewhere(ray_nodes: Any, deploy: Deploy) -> None:
    spare = [ray_nodes.add_node(**NODE, **_SPARE)]
    try:
        deployment = deploy(_SPEC)
        before = deployment.until_ready()
        spare.append(ray_nodes.add_node(**NODE, **_SPARE))
        ray_nodes.remove_node(spare.pop(0), allow_graceful=False)
        pools = deployment.until(
            lambda pools: (
                {replica["id"] for replica in pools["decode"]["replicas"] if replica["state"] == "ready"}
                == {"decode-2", "decode-3"}
            ),
            within_s=90,
        )
        assert [r["id"] for r in pools["prefill"]["replicas"]] == [r["id"] for r in before["prefill"]["replicas"]]
    finally:
        for node in spare:
            ray_nodes.remove_node(node, allow_graceful=False)
