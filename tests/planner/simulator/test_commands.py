"""Commands `cluster simulate` and `cluster plan` on small synthetic traces."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.cli.app import run
from core.model.kv_memory import KVArithmetic
from core.model.shape import ModelConfig
from core.spec.loader import load_spec
from engine.config import EngineConfig, pool_sizes
from planner.simulator.profile import load_profile
from tests.core.model.test_config import write_no_weights
from tests.engine import tiny_models


@pytest.fixture(autouse=True)
def nothing_deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the deployments of the user who runs the tests."""
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1 + i % 5, 100 + i]}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_simulate_prints_the_documented_fields(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--topology", "2P2D", "--policy", "cost", "--kv-tokens-per-replica", "65536", "--block-size", "64"]
    limits = ["--slo-ttft-ms", "1000", "--slo-itl-ms", "50", "--host-tokens", "65536", "--speedup", "2"]
    assert run(["simulate", "--trace", trace, *options, *limits, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["completed"] == 40 and 0 < report["reuse_share"] < 1 and report["goodput_rps"] > 0
    assert {"mean", "p50", "p90", "p99"} == set(report["ttft_ms"]) == set(report["itl_ms"])
    assert {"p50", "p95"} == set(report["decision_us"]) and report["wall_s"] > 0
    assert run(["simulate", "--trace", trace, "--topology", "0P2D"]) == 0
    assert "reused" in capsys.readouterr().out


@pytest.mark.parametrize("pools", [[], ["--topology", "1P0D"]])
def test_simulate_needs_a_topology_with_a_decode_replica(trace: str, pools: list[str]) -> None:
    assert run(["simulate", "--trace", trace, *pools]) == 2


def test_missing_trace_or_profile_is_a_usage_error(trace: str) -> None:
    assert run(["simulate", "--trace", "nowhere.jsonl", "--topology", "0P1D"]) == 2
    assert run(["simulate", "--trace", trace, "--topology", "0P1D", "--profile", "nothing"]) == 2


def test_a_plan_is_written_as_a_spec(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "plan.yaml"
    assert run(["plan", "--trace", trace, "--slo-ttft-ms", "1000", "-o", str(spec), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert load_spec(str(spec)).topology == best["topology"]
    assert "block_size" not in spec.read_text(), "the plan sets a key that was not requested"
    assert run(["plan", "--trace", trace, "--slo-ttft-ms", "0.001", "--max-replicas", "2"]) == 1


def test_plan_compares_separate_and_colocated_roles(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses a CPU profile whose replicas may have two threads."""
    steps = {"base_s": 0.01, "token_s": 1e-4, "pair_s": 0.0, "context_s": 0.0}
    wide = steps | {"token_s": 5e-5}
    known = load_profile("h100-llama-3.1-8b").model_dump() | {
        "steps": steps,
        "slowdown": [1.0, 1.0],
        "wider": [{"width": 2, "steps": wide, "decode_steps": wide}],
    }
    profile, spec = tmp_path / "here.json", tmp_path / "plan.yaml"
    profile.write_text(json.dumps(known))
    limits = ["--slo-ttft-ms", "100", "--slo-itl-ms", "1000", "--max-replicas", "2", "--profile", str(profile)]
    asked = ["plan", "--trace", trace, *limits, "--speedup", "0.2", "--block-size", "32"]
    assert run([*asked, "-o", str(spec), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["same_resources"]["better"] == plan["best"]["topology"] == "0P1D"
    assert plan["same_resources"]["apart"]["good_share"] < plan["same_resources"]["colocated"]["good_share"]
    written = load_spec(str(spec))
    assert written.topology == "0P1D" and written.decode.resources.cpus == 2 and written.kv.block_size == 32
    assert run(asked) == 0
    said = capsys.readouterr().out
    assert "with equal resources, 0P1D (threads 2, chunks " in said and " meets this SLO better than " in said
    assert sum("1P1D" in line for line in said.splitlines()) >= 2, "the losing topology has no row"


@pytest.mark.parametrize(("name", "begin"), [("frontier.png", b"\x89PNG"), ("frontier.svg", b"<?xml")])
def test_plan_draws_the_frontier(trace: str, tmp_path: Path, name: str, begin: bytes) -> None:
    pytest.importorskip("matplotlib", reason="an optional dependency")
    picture = tmp_path / name
    assert run(["plan", "--trace", trace, "--slo-ttft-ms", "1000", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(begin)
    assert run(["plan", "--trace", trace, "--slo-ttft-ms", "1000", "--plot", str(tmp_path / "picture.txt")]) == 2


def test_kv_arithmetic() -> None:
    """Llama 3.1 8B: 32 layers, 8 KV heads of 128. Codes have a bf16 scale per token and head, int4 a zero too."""

    def kv(dtype: str, ranks: int, num_unquantized: int = 0) -> KVArithmetic:
        of_llama = SimpleNamespace(
            kv_layers=((8, 128),) * 32, kv_sides=2, recurrent_layers=(), kv_exact_dim=lambda dim: 0
        )
        config = cast(ModelConfig, of_llama)
        return KVArithmetic(
            config=config,
            dtype=dtype,
            block_size=64,
            tensor_parallel=ranks,
            memory_bytes=2**30,
            unquantized_layers=tuple(range(num_unquantized)),
        )

    assert kv("bfloat16", 1).bytes_per_token == kv("bfloat16", 8).bytes_per_token == 131_072
    assert kv("fp8_e4m3", 1).bytes_per_token == kv("int8", 1).bytes_per_token == 32 * 2 * 8 * 130
    assert kv("int4", 1).bytes_per_token == 32 * 2 * 8 * 68
    assert kv("int4", 1, 2).bytes_per_token == 30 * 2 * 8 * 68 + 2 * 2 * 8 * 256
    assert kv("bfloat16", 16).bytes_per_token == 2 * 131_072  # each head is stored twice
    assert kv("bfloat16", 1).sizes.num_blocks == 128 and kv("bfloat16", 1).max_batch(1000) == 8


@pytest.mark.parametrize(
    ("family", "changes", "beside"),
    [("gemma2", tiny_models.GEMMA, "its part with a window"), ("lfm2", tiny_models.LFM2, "a checkpoint")],
    ids=["windows", "states"],
)
def test_plan_memory_is_that_of_a_replica(
    family: str, changes: dict[str, Any], beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.tiny_config(family, **changes).save_pretrained(tmp_path)
    write_no_weights(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    pool: dict[str, Any] = {"kv_memory_gib": 0.001, "kv_host_gib": 0.01, "max_batch_tokens": 16, "max_running": 3}
    spec = {"model": {"source": str(tmp_path)}, "kv": {"block_size": 8}, "prefill": pool, "decode": pool}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    assert run(["plan", "--memory", "--spec", str(tmp_path / "spec.yaml"), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["pools"]["decode"]
    config = EngineConfig(
        model_dir=tmp_path, block_size=8, max_batch_tokens=16, max_running=3, frees_windows=family == "gemma2"
    )
    layout = config.layout()
    sizes = pool_sizes(layout, config, gib=0.001)
    assert (planned["blocks_per_replica"], planned["bytes_per_token"]) == (sizes.num_blocks, layout.cache.token_bytes)
    assert planned["max_batch"]["128"] == sizes.max_batch(layout.cache, 128, max_batch_tokens=16) > 0
    assert (planned["states_per_replica"], planned["state_bytes"]) == (sizes.num_states, layout.state_bytes)
    assert planned["window_parts_per_replica"] == (sizes.num_window_parts or 1) - 1
    assert planned["window_bytes_per_token"] == layout.cache.window_token_bytes
    assert planned["tier_places"] == {"host": int(0.01 * 2**30) // layout.place_bytes, "disk": 0}
    assert planned["places_beside_a_block"] == layout.num_pieces
    assert run(["plan", "--memory", "--spec", str(tmp_path / "spec.yaml")]) == 0
    printed = capsys.readouterr().out
    assert f"  {'windows' if layout.window else 'states'}: " in printed and f"a block takes one, {beside} " in printed


def test_plan_memory_says_why_windows_free_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.tiny_config("gemma2", **tiny_models.GEMMA).save_pretrained(tmp_path)
    write_no_weights(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    spec = {"model": {"source": str(tmp_path), "max_context": 16}, "kv": {"block_size": 8}}
    window = tiny_models.GEMMA["sliding_window"] * 2
    config = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    assert run(["plan", "--memory", "--spec", str(tmp_path / "spec.yaml")]) == 0
    assert f"not longer than the window of {window}" in capsys.readouterr().out


def test_plan_memory_lists_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--memory", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    weights, pool = report["weight_bytes"], report["pools"]["decode"]
    assert weights["bfloat16"] == 2 * report["parameters"] == 2 * weights["int8"]
    assert 0.5 < weights["as stored"] / weights["int8"] < 0.8, "the default model has 4-bit matrices"
    by_dtype = pool["tokens_by_pool_dtype"]
    assert by_dtype["bfloat16"] == pool["tokens_per_replica"] and 1.8 < by_dtype["int8"] / by_dtype["bfloat16"] < 2
    assert 3.5 < by_dtype["int4"] / by_dtype["bfloat16"] < 3.6
    assert run(["plan", "--memory"]) == 0
    assert "by kv.pool_dtype" in capsys.readouterr().out


def test_plan_formats_weighs_memory_against_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--formats", "--memory-gib", "0.15", "--json"]) == 0
    plans = {(row["weights"], row["kv"]): row for row in json.loads(capsys.readouterr().out)}
    wide, narrow = plans["bf16", "bf16"], plans["int4", "int8"]
    assert wide["tokens"] is None and narrow["tokens"] > 0, "only 4-bit weights leave room for KV"
    assert narrow["tokens_s"] > plans["int4", "bf16"]["tokens_s"] > plans["int8", "bf16"]["tokens_s"]
    assert run(["plan", "--formats", "--memory-gib", "0.15"]) == 0
    assert "weights do not fit" in capsys.readouterr().out
    assert run(["plan", "--formats", "--memory-gib", "inf"]) != 0
    (tmp_path / "spec.yaml").write_text("kv: {unquantized_layers: [0, -1]}")
    capsys.readouterr()
    assert run(["plan", "--formats", "--spec", str(tmp_path / "spec.yaml"), "--json"]) == 0
    exact = {row["kv"]: row["kv_bytes_per_token"] for row in json.loads(capsys.readouterr().out)}
    assert exact["bf16"] == wide["kv_bytes_per_token"] and exact["int8"] > narrow["kv_bytes_per_token"]


def test_plan_memory_refuses_ranks_that_do_not_fit_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("decode: {tensor_parallel: 2}")
    assert run(["plan", "--memory", "--spec", str(spec)]) == 2
    assert "decode.tensor_parallel: 2 does not fit 9 query and 3 KV heads; choose one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("simulate --block-size 0", "--block-size"),
        ("simulate --kv-tokens-per-replica 10", "--kv-tokens-per-replica 10: smaller than a block of 64 tokens"),
        ("simulate --speedup nan", "--speedup nan: must be above 0, and finite"),
        ("simulate --speedup inf", "--speedup inf: must be above 0, and finite"),
        ("plan --block-size 0", "--block-size"),
        ("plan --block-size 99999999", "kv.block_size: input should be"),
        ("plan --speedup nan", "--speedup nan: must be above 0, and finite"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    trace: str, capsys: pytest.CaptureFixture[str], command: str, error: str
) -> None:
    name, *options = command.split()
    topology = ["--topology", "1P1D"] if name == "simulate" else []
    assert run([name, "--trace", trace, *topology, *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and error in said.err and said.err.count("\n") == 1


def test_plan_prints_the_draft_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--speculation", "--drafts", "0.8x4", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert lines[0]["rows"] == 1 and 1 < lines[-1]["speedup"] < lines[0]["speedup"] < 1 + 0.8 + 0.64 + 0.512 + 0.4096
    assert run(["simulate", "--trace", trace, "--topology", "0P1D", "--drafts", "0.9,0.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"]["tokens_per_row"] > 2
    assert run(["simulate", "--trace", trace, "--topology", "0P1D", "--drafts", "0.9,0.8"]) == 0
    assert "tokens per step and sequence" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--drafts", "1.1"], ["--drafts", "0.5xa"], ["--draft-pass-ms", "1"]])
def test_draft_options_require_acceptance_rates(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--speculation", *options]) == 2
    assert "--drafts" in capsys.readouterr().err
