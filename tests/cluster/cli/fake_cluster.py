"""The `cluster` command with parts without a model: fake_cluster [--rank prefill=NAME] ARGUMENTS."""

from __future__ import annotations

import functools
import sys
from typing import Any

from cluster.cli.app import run
from cluster.control import desired_state
from cluster.launch import deployment, preflight
from cluster.launch.endpoints import Endpoints
from core.types.launch import Launch
from tests.cluster.control import fake_rank


def fake_router(launch: Launch, endpoints: Endpoints) -> Any:
    # Imports Ray, which must come after local_ray.join().
    from tests.cluster.cli.fake_router import build

    return build(launch)


if __name__ == "__main__":
    ranks = {"prefill": "FakeRank", "decode": "FakeRank"}
    arguments = sys.argv[1:]
    while arguments[:1] == ["--rank"]:
        role, _, name = arguments[1].partition("=")
        ranks[role] = name
        arguments = arguments[2:]
    parts = {role: f"{fake_rank.__name__}:{name}" for role, name in ranks.items()}
    desired_state.Parts = functools.partial(desired_state.Parts, **parts)
    deployment.router_application = fake_router
    preflight.check_model = lambda spec, say: say(f"checking {spec.model.source}")
    sys.exit(run(arguments))
