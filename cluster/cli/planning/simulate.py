"""`cluster simulate`: predict the performance of a topology and a policy on a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import find_state, join_controller
from cluster.cli.deploy import AsJson, Name
from cluster.cli.planning.draft_options import DraftPass, DraftsOption, with_drafts
from core.trace.trace import TraceRequest, read_trace
from core.types.errors import ClusterError, NotDeployed, SpecError

if TYPE_CHECKING:
    from planner.simulator.profile import FleetSetup, Profile

TraceFile = Annotated[Path, typer.Option("--trace", help="Trace to replay.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="JSON file, or the name of a shipped profile.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
HostTokens = Annotated[int, typer.Option(min=0, help="Host-memory tier of each replica, in tokens.")]
Speedup = Annotated[float, typer.Option(help="Factor on the arrival rate of the trace.")]
Scale = Annotated[str, typer.Option("--scale-tokens", metavar="SHARE", help="Factor on all lengths, such as 1/16.")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft-ms", help="TTFT limit for goodput.")]
SloItl = Annotated[float | None, typer.Option("--slo-itl-ms", help="Mean ITL limit for goodput.")]
PolicyName = Annotated[str, typer.Option(help="cost, prefix, least_loaded, round_robin or your own MODULE:NAME.")]
EvictionName = Annotated[str, typer.Option(help="reuse_value, lru or your own MODULE:NAME.")]


def simulate(
    trace: TraceFile,
    topology: Annotated[str, typer.Option(help="Topology such as 8P8D, or 0P8D for colocated roles, or a spec file.")],
    policy: PolicyName = "cost",
    kv_tokens_per_replica: Annotated[
        int | None, typer.Option(min=1, help="KV pool of a replica in tokens; default: the profile's.")
    ] = None,
    block_size: BlockSize = 64,
    host_tokens: HostTokens = 0,
    fetch: Annotated[bool, typer.Option(help="With policy cost: let replicas fetch blocks from each other.")] = True,
    eviction: EvictionName = "reuse_value",
    speedup: Speedup = 1.0,
    scale_tokens: Scale = "1",
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    profile: ProfileName = None,
    drafts: DraftsOption = None,
    draft_pass_ms: DraftPass = 0.0,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against simulated replicas: reuse, latencies, goodput, transfers, load.

    Policy, schedulers, block manager and eviction are the production code; only time is simulated. Without --profile,
    the rates are those that the replicas of the running deployment have learned.
    """
    from core.spec.loader import load_spec
    from planner.simulator.profile import FleetSetup

    spec = load_spec(topology)
    if not spec.decode.replicas:
        raise SpecError(f"--topology {topology}: needs at least one decode replica")
    running = running_deployment(name) if name is not None or not profile else None
    simulator = Simulator(profile or (running[1] if running else None), drafts, draft_pass_ms)
    kv_tokens = kv_tokens_per_replica or simulator.profile.kv.pool_tokens
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
    report = simulator.run(setup, requests, slo_ttft_ms=slo_ttft_ms, slo_itl_ms=slo_itl_ms)
    print(json.dumps(report, indent=1) if as_json else _table(report))


class Simulator:
    """A profile, and simulations with it."""

    def __init__(self, profile: str | Profile | None, drafts: str | None = None, draft_pass_ms: float = 0.0) -> None:
        """Load the profile, if it is a name. Raises SpecError if it does not exist."""
        from planner.simulator.profile import DEFAULT, Profile, load_profile

        known = profile if isinstance(profile, Profile) else load_profile(profile or DEFAULT)
        self.profile = with_drafts(known, drafts, draft_pass_ms)

    @property
    def times_note(self) -> str:
        """Describe the source of the step times, and how to measure them."""
        text = f"times are those of {self.profile.name} ({self.profile.origin})"
        if self.profile.origin == "measured":
            return text
        return f"{text}; to measure this machine: `cluster profile -o FILE.json`, then --profile FILE.json"

    def run(
        self,
        setup: FleetSetup,
        requests: Sequence[TraceRequest],
        *,
        slo_ttft_ms: float | None,
        slo_itl_ms: float | None,
    ) -> dict[str, Any]:
        from core.trace.traffic import Slo
        from planner.simulator.run import simulate

        report = simulate(setup, self.profile, requests, Slo.of_ms(slo_ttft_ms, slo_itl_ms))
        return {"profile": self.profile.name, "profile_origin": self.profile.origin} | report


def running_deployment(name: str | None) -> tuple[dict[str, Any], Profile] | None:
    """Return the spec of a deployment as it was given, and the profile that its replicas have learned.

    None if nothing is deployed and `name` is None. Raises SpecError while the rates are unknown.
    """
    try:
        state = find_state(name)
    except NotDeployed:
        if name is not None:
            raise
        return None
    controller = join_controller(state)
    from cluster.launch import driver
    from core.process.ports import is_chosen
    from core.spec.schema import AutoscaleSpec, Spec
    from core.trace.traffic import ReplicaReport
    from planner.autoscaler.live import fleets_of

    spec = Spec.model_validate(driver.ask(controller, "status")["spec"])
    replicas = [ReplicaReport.of(tree) for tree in driver.ask(controller, "autoscaling")["replicas"]]
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
    from cluster.cli.console import columns

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
