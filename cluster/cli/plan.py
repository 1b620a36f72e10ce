"""`cluster plan`: the cheapest topology that keeps an SLO; or the KV memory of a spec, or what drafts would give."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.bench.trace import read_trace
from cluster.cli.draft_options import DraftPass, DraftsOption, draft_lines, lines_table
from cluster.cli.simulate import BlockSize, HostTokens, ProfileName, Simulator, Speedup
from cluster.words.errors import SpecError

if TYPE_CHECKING:
    from router.simulator.plan import Candidate, CapacityPlan

_CONTEXTS = (2048, 8192, 32_768, 131_072)


def plan(
    trace: Annotated[Path | None, typer.Option(help="Requests to plan for.")] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Until a request's first token.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Mean time between a request's tokens.")] = 25.0,
    good: Annotated[float, typer.Option(min=0, max=1, help="The share of requests that must keep both.")] = 0.95,
    max_replicas: Annotated[int, typer.Option(min=2, help="Give up beyond so many.")] = 16,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Of the trace, only the first so many.")] = None,
    block_size: BlockSize = 64,
    host_tokens: HostTokens = 0,
    speedup: Speedup = 1.0,
    profile: ProfileName = None,
    drafts: DraftsOption = None,
    draft_pass_ms: DraftPass = 0.0,
    spec: Annotated[str, typer.Option(help="A spec to start from: model, KV, resources.")] = "1P1D",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan there, as a spec.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier: a .png or .svg; needs matplotlib.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Only the KV memory of --spec; no trace.")] = False,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Only what --drafts would give at --context; no trace.")
    ] = False,
    context: Annotated[int, typer.Option(min=0, help="Of --speculation: tokens that each answer has.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find the cheapest xPyD that keeps an SLO on a trace. Exit code 1 when none within --max-replicas does."""
    if memory:
        report = _memory(spec)
        print(json.dumps(report, indent=1) if as_json else _memory_table(report))
        return
    if speculation:
        profile_of = Simulator(profile, drafts, draft_pass_ms)
        lines = draft_lines(profile_of.profile, context=context)
        print(json.dumps(lines, indent=1) if as_json else f"{lines_table(lines)}\n{profile_of.said}")
        return
    if trace is None:
        raise SpecError("name a --trace to plan for, or --memory, or --speculation")
    from router.simulator.fleet_setup import FleetSetup
    from router.simulator.plan import make_plan

    simulator = Simulator(profile, drafts, draft_pass_ms)
    if simulator.profile.kv.pool_tokens < block_size:
        raise SpecError(f"--block-size {block_size}: a replica has {simulator.profile.kv.pool_tokens} tokens")
    setup = FleetSetup(
        num_prefill=1,
        num_decode=1,
        policy="cost",
        block_size=block_size,
        kv_tokens=simulator.profile.kv.pool_tokens,
        host_tokens=host_tokens,
        pulls=True,
    )
    found = make_plan(
        setup,
        simulator.profile,
        read_trace(trace, speedup=speedup, max_requests=max_requests),
        slo_ttft_s=slo_ttft_ms / 1e3,
        slo_itl_s=slo_itl_ms / 1e3,
        good_share=good,
        max_replicas=max_replicas,
        tried=lambda c: print(f"{c.topology}: {c.good_share:.1%} within the SLO", file=sys.stderr, flush=True),
    )
    if plot:
        from router.simulator.plot import plot as draw

        draw(found, plot, good_share=good)
    if output and found.best:
        output.write_text(_as_spec(spec, found.best, block_size=block_size))
    print(json.dumps(_as_tree(found), indent=1) if as_json else _table(found, times=simulator.said))
    raise typer.Exit(0 if found.best else 1)


def _as_spec(source: str, best: Candidate, *, block_size: int) -> str:
    """`source` with the plan's pools, as YAML that `cluster deploy` takes."""
    import yaml

    from cluster.words.spec_file import load_spec

    sizes = [
        f"prefill.replicas={best.num_prefill}",
        f"decode.replicas={best.num_decode}",
        f"kv.block_size={block_size}",
    ]
    spec = load_spec(source, overrides=sizes)
    return yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True), sort_keys=False)


def _as_tree(found: CapacityPlan) -> dict[str, Any]:
    def tree(candidate: Candidate) -> dict[str, Any]:
        return {"topology": candidate.topology} | asdict(candidate)

    return {
        "best": tree(found.best) if found.best else None,
        "frontier": [tree(candidate) for candidate in found.frontier],
        "tried": [tree(candidate) for candidate in found.tried],
    }


def _table(found: CapacityPlan, *, times: str) -> str:
    from cluster.cli.console import columns

    rows = [["", "TOPOLOGY", "USD/H", "WITHIN SLO", "TTFT P99 ms", "ITL P99 ms", "REUSED"]]
    for c in found.frontier:
        mark = "*" if c == found.best else ""
        figures = [f"{c.usd_per_hour:.2f}", f"{c.good_share:.1%}", f"{c.ttft_p99_ms:,.0f}", f"{c.itl_p99_ms:,.1f}"]
        rows.append([mark, c.topology, *figures, f"{c.reuse_share:.1%}"])
    best = f"{found.best.topology} is the cheapest" if found.best else "nothing tried is enough"
    return f"{columns(rows)}\n{best}; {times}"


def _memory(source: str) -> dict[str, Any]:
    from cluster.model import config as model_config
    from cluster.model import source as model_source
    from cluster.model.kv_arithmetic import KVArithmetic
    from cluster.words.request import Role
    from cluster.words.spec_file import load_spec

    spec = load_spec(source)
    config = model_config.load(model_source.resolve(spec.model.source))
    pools = {}
    for role in Role:
        pool = spec.pool(role)
        if pool.kv_memory_gib is None and pool.resources.gpus:
            raise SpecError(f"{role}.kv_memory_gib: say how much; what a GPU has free is known only on that GPU")
        kv = KVArithmetic(
            config=config,
            dtype=spec.model.dtype if spec.kv.pool_dtype == "auto" else spec.kv.pool_dtype,
            block_size=spec.kv.block_size,
            tensor_parallel=pool.tensor_parallel,
            memory_bytes=(pool.kv_memory_gib or 1.0) * 2**30,
        )
        limit = min(config.max_context, spec.model.max_context or config.max_context)
        contexts = [*(context for context in _CONTEXTS if context < limit), limit]
        pools[role.value] = {
            "bytes_per_token": kv.bytes_per_token,
            "blocks_per_replica": kv.num_blocks,
            "tokens_per_replica": kv.num_blocks * spec.kv.block_size,
            "max_batch": {str(context): kv.max_batch(context) for context in contexts},
        }
    return {"model": spec.model.name, "block_size": spec.kv.block_size, "pools": pools}


def _memory_table(report: dict[str, Any]) -> str:
    from cluster.cli.console import columns

    lines = [f"{report['model']}, blocks of {report['block_size']} tokens"]
    for role, pool in report["pools"].items():
        lines.append(
            f"{role}: {pool['bytes_per_token']:,} bytes per token, {pool['blocks_per_replica']:,} blocks"
            f" = {pool['tokens_per_replica']:,} tokens per replica"
        )
        rows = [["  CONTEXT", "SEQUENCES AT A TIME"]]
        rows += [[f"  {int(context):,}", f"{batch:,}"] for context, batch in pool["max_batch"].items()]
        lines.append(columns(rows))
    return "\n".join(lines)
