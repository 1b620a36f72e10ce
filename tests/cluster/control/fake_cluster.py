"""The `cluster` command with parts that hold no model: fake_cluster.py [--parts prefill=MODULE:NAME] ARGUMENTS."""

from __future__ import annotations

import functools
import sys

from cluster.cli.app import run
from cluster.control import desired
from cluster.host import preflight

if __name__ == "__main__":
    parts = {"prefill": "fake_rank:FakeRank", "decode": "fake_rank:FakeRank", "router": "fake_router:build"}
    arguments = sys.argv[1:]
    while arguments[:1] == ["--parts"]:
        role, _, path = arguments[1].partition("=")
        parts[role] = path
        arguments = arguments[2:]
    desired.Parts = functools.partial(desired.Parts, **parts)
    preflight.check_model = lambda spec, say: say(f"checking {spec.model.source}")
    sys.exit(run(arguments))
