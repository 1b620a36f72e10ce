"""`cluster plan`: cheapest topology that meets an SLO, disaggregated or colocated; KV memory; benefit of drafts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.console import columns, say
from cluster.cli.options import AsJson, DraftPass, Drafts, HostTokens, MaxRequests, Name, ProfileName, Speedup
from cluster.cli.planning.memory import formats_report, memory_report, memory_table
from cluster.cli.planning.simulate import open_profile, running_deployment, times_note
from core.trace.trace import read_trace
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.spec.schema import Spec
    from planner.simulator.plan import Candidate, CapacityPlan
    from planner.simulator.profile import Profile

_NO_SPEC = "1P1D"
# Decoding sequences for which --speculation shows figures.
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def plan(
    trace: Annotated[Path | None, typer.Option(help="Trace to plan for.")] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Limit for the time to first token.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Limit for a request's mean inter-token latency.")] = 25.0,
    good: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet both limits.")] = 0.95,
    max_replicas: Annotated[int, typer.Option(min=2, help="Maximum number of replicas.")] = 16,
    max_requests: MaxRequests = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per block; default: the spec's.")] = None,
    host_tokens: HostTokens = 0,
    speedup: Speedup = 1.0,
    profile: ProfileName = None,
    drafts: Drafts = None,
    draft_pass_ms: DraftPass = 0.0,
    name: Name = None,
    spec: Annotated[
        str | None,
        typer.Option(help="Spec to start from: model, KV, resources, limits. Default: the deployment's, or 1P1D."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as a spec.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the cost frontier to a .png or .svg file; needs matplotlib.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show only the KV memory of --spec; no trace needed.")
    ] = False,
    formats: Annotated[
        bool, typer.Option("--formats", help="Show only memory and speed of weight and KV formats; no trace needed.")
    ] = False,
    memory_gib: Annotated[float, typer.Option(min=0.01, max=1e6, help="With --formats: memory of one rank.")] = 80.0,
    batch: Annotated[int, typer.Option(min=1, help="With --formats: sequences decoded at a time.")] = 32,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Show only the benefit of --drafts at --context; no trace needed.")
    ] = False,
    context: Annotated[
        int, typer.Option(min=0, help="With --speculation and --formats: context length in tokens.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest topology that meets an SLO on a trace.

    Topologies are xPyD, and 0PyD, where decode replicas compute their own prompts. Exit code 1 if none within
    --max-replicas meets it.

    Without --spec and --profile, the plan is for the running deployment: its spec, at the rates that its replicas have
    learned.
    """
    if memory:
        report = memory_report(spec or _NO_SPEC)
        print(json.dumps(report, indent=1) if as_json else memory_table(report))
        return
    if formats:
        print(formats_report(spec or _NO_SPEC, profile, memory_gib, batch, context, as_json=as_json))
        return
    if speculation:
        times = open_profile(profile, drafts, draft_pass_ms)
        lines = _draft_lines(times, context=context)
        print(json.dumps(lines, indent=1) if as_json else f"{_draft_table(lines)}\n{times_note(times)}")
        return
    if trace is None:
        raise SpecError("give --trace, --memory, --formats or --speculation")
    from core.spec.loader import load_spec
    from core.trace.traffic import Slo
    from planner.simulator.plan import draw_frontier, make_plan
    from planner.simulator.profile import FleetSetup

    running = running_deployment(name) if name is not None or not (spec or profile) else None
    source = spec or (running[0] if running else _NO_SPEC)
    times = open_profile(profile or (running[1] if running else None), drafts, draft_pass_ms)
    overrides = [f"kv.block_size={block_size}"] if block_size is not None else []
    given = load_spec(source, overrides=overrides)
    if times.kv.pool_tokens < given.kv.block_size:
        raise SpecError(f"--block-size {given.kv.block_size}: a replica's KV pool has {times.kv.pool_tokens} tokens")
    setup = FleetSetup.of(
        given,
        block_size=given.kv.block_size,
        kv_tokens=times.kv.pool_tokens,
        host_tokens=host_tokens,
        prefix_fetches=True,
    )
    found = make_plan(
        setup,
        times,
        read_trace(trace, speedup=speedup, max_requests=max_requests),
        slo=Slo.of_ms(slo_ttft_ms, slo_itl_ms),
        good_share=good,
        max_replicas=max_replicas,
        tried=lambda c: say(f"{_name(c)}: {c.good_share:.1%} within the SLO"),
    )
    if plot:
        draw_frontier(found, plot, good_share=good)
    if output and found.best:
        text = _as_spec(source, overrides, given, found.best, threads=times.threads)
        output.write_text(text, encoding="utf-8")
    print(json.dumps(_as_tree(found), indent=1) if as_json else _table(found, times=times_note(times)))
    raise typer.Exit(0 if found.best else 1)


def _as_spec(source: str | dict[str, Any], overrides: list[str], given: Spec, best: Candidate, *, threads: int) -> str:
    """Return `source` with the plan's pools as YAML for `cluster deploy`. threads: those of the profiled replica."""
    import yaml

    from core.spec.loader import load_spec

    sizes = [*overrides, f"prefill.replicas={best.num_prefill}", f"decode.replicas={best.num_decode}"]
    if best.decode_batch_tokens != given.decode.max_batch_tokens:
        sizes.append(f"decode.max_batch_tokens={best.decode_batch_tokens}")
    for role, role_threads in (("prefill", best.prefill_threads), ("decode", best.decode_threads)):
        if role_threads != threads:
            sizes.append(f"{role}.resources.cpus={role_threads}")
    spec = load_spec(source, overrides=sizes)
    return yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True), sort_keys=False)


def _as_tree(found: CapacityPlan) -> dict[str, Any]:
    def tree(candidate: Candidate) -> dict[str, Any]:
        return {"topology": candidate.topology} | asdict(candidate)

    return {
        "best": tree(found.best) if found.best else None,
        "same_resources": {
            "apart": tree(found.apart),
            "colocated": tree(found.colocated),
            "better": _better(found)[0].topology,
        },
        "frontier": [tree(candidate) for candidate in found.frontier],
        "tried": [tree(candidate) for candidate in found.tried],
    }


def _table(found: CapacityPlan, *, times: str) -> str:
    titles = ["", "TOPOLOGY", "THREADS", "CHUNK", "USD/H", "WITHIN SLO", "GOODPUT/s"]
    rows = [[*titles, "TTFT P50 ms", "P99", "ITL P50 ms", "P99", "REUSED"]]
    shown = [*found.frontier, *(c for c in (found.apart, found.colocated) if c not in found.frontier)]
    for c in shown:
        mark = "*" if c == found.best else ""
        threads = str(c.decode_threads) if c.is_colocated else f"{c.prefill_threads}+{c.decode_threads}"
        shape = [c.topology, threads, str(c.decode_batch_tokens) if c.is_colocated else "-", f"{c.usd_per_hour:.2f}"]
        times_ms = [f"{c.ttft_p50_ms:,.0f}", f"{c.ttft_p99_ms:,.0f}", f"{c.itl_p50_ms:,.1f}", f"{c.itl_p99_ms:,.1f}"]
        rows.append([mark, *shape, f"{c.good_share:.1%}", f"{c.goodput_rps:.2f}", *times_ms, f"{c.reuse_share:.1%}"])
    best = f"{_name(found.best)} is the cheapest" if found.best else "no tried topology meets the SLO"
    return f"{columns(rows)}\n{_comparison(found)}\n{best}; {times}"


def _comparison(found: CapacityPlan) -> str:
    """Compare disaggregated and colocated in one sentence."""
    better, other = _better(found)
    how = (
        "computes prompts on replicas of their own" if other.is_colocated else "runs prefill and decode on each replica"
    )

    def figures(c: Candidate) -> str:
        return f"{c.good_share:.1%}, {c.goodput_rps:.2f}/s, P99 {c.ttft_p99_ms:,.0f} and {c.itl_p99_ms:,.1f} ms"

    return (
        f"with equal resources, {_name(better)}, which {how}, meets this SLO better than {_name(other)}: "
        f"{figures(better)} against {figures(other)}"
    )


def _better(found: CapacityPlan) -> tuple[Candidate, Candidate]:
    """Return the better of the two candidates with equal resources, then the other one."""
    pair = sorted((found.apart, found.colocated), key=lambda c: c.merit, reverse=True)
    return pair[0], pair[1]


def _name(c: Candidate) -> str:
    """Return the topology with the settings that distinguish it from others."""
    if c.is_colocated:
        return f"{c.topology} (threads {c.decode_threads}, chunks {c.decode_batch_tokens})"
    return f"{c.topology} (threads {c.prefill_threads} + {c.decode_threads})"


def _draft_lines(profile: Profile, *, context: int) -> list[dict[str, Any]]:
    """Return figures for increasing numbers of rows: without drafts, with the best draft length, with the longest.

    Raises SpecError.
    """
    from planner.simulator.drafts import draft_table

    if (drafts := profile.drafts) is None:
        raise SpecError("give acceptance rates with --drafts, or a --profile that has them")
    lines = []
    for rows in _ROWS:
        table = draft_table(profile.decode_timing(), drafts, rows, context=context)
        plain, best, longest = table[0], max(table, key=lambda line: line.tokens_per_s), table[-1]
        lines.append(
            {
                "rows": rows,
                "tokens_per_s": plain.tokens_per_s,
                "length": best.length,
                "tokens_per_row": best.tokens_per_row,
                "step_ms": best.step_s * 1e3,
                "drafting_tokens_per_s": best.tokens_per_s,
                "speedup": best.tokens_per_s / plain.tokens_per_s,
                "longest_speedup": longest.tokens_per_s / plain.tokens_per_s,
                "pays_above": plain.floor,
            }
        )
    return lines


def _draft_table(lines: list[dict[str, Any]]) -> str:
    """Format the figures. PAYS ABOVE is the acceptance rate from which a drafted token pays."""
    rows = [["ROWS", "TOKENS/S", "DRAFT", "TOKENS/STEP", "STEP ms", "TOKENS/S", "SPEED-UP", "LONGEST", "PAYS ABOVE"]]
    for line in lines:
        step = [f"{line[key]:.2f}" for key in ("tokens_per_row", "step_ms")]
        gains = [f"{line[key]:.2f}" for key in ("speedup", "longest_speedup", "pays_above")]
        plain, drafting = (f"{line[key]:,.0f}" for key in ("tokens_per_s", "drafting_tokens_per_s"))
        rows.append([str(line["rows"]), plain, str(line["length"] or "-"), *step, drafting, *gains])
    return columns(rows)
