"""`cluster simulate`: predict the performance of a topology and a policy on a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import find_state, learned_by
from cluster.cli.console import columns
from cluster.cli.options import (
    AsJson,
    DraftPass,
    Drafts,
    HostTokens,
    MaxRequests,
    Name,
    ProfileName,
    Scale,
    SloItl,
    SloTtft,
    Speedup,
)
from core.trace.trace import read_trace
from core.types.errors import ClusterError, NotDeployed, SpecError

if TYPE_CHECKING:
    from planner.simulator.profile import Profile

_MAX_DRAFT_TOKENS = 64


def simulate(
    trace: Annotated[Path, typer.Option("--trace", help="Trace to replay.")],
    topology: Annotated[str, typer.Option(help="Topology such as 8P8D, or 0P8D for colocated roles, or a spec file.")],
    policy: Annotated[
        str, typer.Option(help="cost, prefix, least_loaded, round_robin or your own MODULE:NAME.")
    ] = "cost",
    kv_tokens_per_replica: Annotated[
        int | None, typer.Option(min=1, help="KV pool of a replica in tokens; default: the profile's.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 64,
    host_tokens: HostTokens = 0,
    fetch: Annotated[bool, typer.Option(help="With policy cost: let replicas fetch blocks from each other.")] = True,
    eviction: Annotated[str, typer.Option(help="reuse_value, lru or your own MODULE:NAME.")] = "reuse_value",
    speedup: Speedup = 1.0,
    scale_tokens: Scale = "1",
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    profile: ProfileName = None,
    drafts: Drafts = None,
    draft_pass_ms: DraftPass = 0.0,
    max_requests: MaxRequests = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against simulated replicas: reuse, latencies, goodput, transfers, load.

    Policy, schedulers, block manager and eviction are the production code; only time is simulated. Without --profile,
    the rates are those that the replicas of the running deployment have learned.
    """
    from core.spec.loader import load_spec
    from core.trace.traffic import Slo
    from planner.simulator.profile import FleetSetup
    from planner.simulator.run import simulate as run

    spec = load_spec(topology)
    if not spec.decode.replicas:
        raise SpecError(f"--topology {topology}: needs at least one decode replica")
    running = running_deployment(name) if name is not None or not profile else None
    times = open_profile(profile or (running[1] if running else None), drafts, draft_pass_ms)
    kv_tokens = kv_tokens_per_replica or times.kv.pool_tokens
    if kv_tokens < block_size:
        raise SpecError(f"--kv-tokens-per-replica {kv_tokens}: smaller than a block of {block_size} tokens")
    setup = FleetSetup.of(
        spec,
        policy=policy,
        block_size=block_size,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        prefix_fetches=fetch and policy == "cost",
        eviction=eviction,
    )
    requests = read_trace(trace, speedup=speedup, scale=scale_tokens, max_requests=max_requests)
    found = run(setup, times, requests, Slo.of_ms(slo_ttft_ms, slo_itl_ms))
    report = {"profile": times.name, "profile_origin": times.origin} | found
    print(json.dumps(report, indent=1) if as_json else _table(report))


def open_profile(given: str | Profile | None, drafts: str | None = None, draft_pass_ms: float = 0.0) -> Profile:
    """Return a profile, loaded if `given` is a name, with the options of drafts. Raises SpecError."""
    from planner.simulator import profile as profiles

    profile = given if isinstance(given, profiles.Profile) else profiles.load_profile(given or profiles.DEFAULT)
    if drafts is None:
        if draft_pass_ms:
            raise SpecError("--draft-pass-ms needs --drafts with the acceptance rates")
        return profile
    if drafts == "off":
        return profile.model_copy(update={"drafts": None})
    given_drafts = profiles.Drafts(accepted=_acceptance_rates(drafts), ask_place_s=draft_pass_ms / 1e3)
    return profile.model_copy(update={"drafts": given_drafts})


def _acceptance_rates(text: str) -> list[float]:
    """Parse the acceptance rate of each position."""
    wrong = SpecError(
        f"--drafts {text}: write rates from 0 to 1 for up to {_MAX_DRAFT_TOKENS} positions: 0.8,0.7 or 0.75x8"
    )
    each, times, count = text.partition("x")
    try:
        shares = [float(share) for share in each.split(",")] * (int(count) if times else 1)
    except ValueError:
        raise wrong from None
    if not (0 < len(shares) <= _MAX_DRAFT_TOKENS and all(0 <= share <= 1 for share in shares)):
        raise wrong
    return shares


def times_note(profile: Profile) -> str:
    """Describe the source of the step times, and how to measure them."""
    text = f"times are those of {profile.name} ({profile.origin})"
    if profile.origin == "measured":
        return text
    return f"{text}; to measure this machine: `cluster profile -o FILE.json`, then --profile FILE.json"


def running_deployment(name: str | None) -> tuple[dict[str, Any], Profile] | None:
    """Return the spec of a deployment as it was given, and the profile that its replicas have learned.

    Returns None if nothing is deployed and `name` is None. Raises SpecError while the rates are unknown.
    """
    try:
        state = find_state(name)
    except NotDeployed:
        if name is not None:
            raise
        return None
    spec, replicas = learned_by(state)
    from core.process.ports import is_chosen
    from core.spec.schema import AutoscaleSpec
    from planner.autoscaler.live import fleets_of

    try:
        profile = fleets_of(spec, AutoscaleSpec(), replicas).profile
    except ClusterError as error:
        raise SpecError(
            f"{state.name}: {error}; run a load first, such as `cluster bench`, or give --profile"
        ) from error
    tree = spec.model_dump(mode="json", exclude_defaults=True)
    if spec.router.admin_port and is_chosen(spec.router.admin_port):
        del tree["router"]["admin_port"]
    return tree, profile.model_copy(update={"name": state.name})


def _table(report: dict[str, Any]) -> str:
    rows = [["", "MEAN", "P50", "P90", "P99"]]
    for key, title in (("ttft_ms", "TTFT ms"), ("itl_ms", "ITL ms")):
        rows.append([title, *(f"{report[key][q]:,.1f}" for q in ("mean", "p50", "p90", "p99"))])
    load = ", ".join(
        f"{pool} {share:.0%} busy (busiest {report['imbalance'][pool]:.2f} x mean)"
        for pool, share in report["utilisation"].items()
    )
    return "\n".join(
        [
            f"{report['completed']:,} requests in {report['duration_s']:,.0f} s"
            f" on {report['profile']} ({report['profile_origin']})",
            *([f"refused {report['refused']:,} prompts longer than a replica's pool"] if report["refused"] else []),
            f"reused {report['reuse_share']:.2%} of {report['prompt_tokens']:,} prompt tokens",
            columns(rows),
            f"goodput {report['goodput_rps']:.2f} requests/s, {report['good_share']:.1%} of all",
            f"shipped {report['transfer_bytes'] / 1e9:,.1f} GB, pulled {report['pull_bytes'] / 1e9:,.1f} GB",
            load,
            *([_drafts_line(report["drafts"])] if "drafts" in report else []),
            f"decision p50 {report['decision_us']['p50']:.0f} us, p95 {report['decision_us']['p95']:.0f} us"
            f" · {report['wall_s']:.1f} s",
        ]
    )


def _drafts_line(drafts: dict[str, float]) -> str:
    share = f" ({drafts['accepted'] / drafts['drafted']:.0%})" if drafts["drafted"] else ""
    return (
        f"drafted {drafts['drafted']:,} tokens, {drafts['accepted']:,} of them accepted{share};"
        f" {drafts['tokens_per_row']:.2f} tokens per step and sequence"
    )
