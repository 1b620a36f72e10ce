"""`cluster autoscale`: the autoscaler's decisions, its rules, and replays of traces."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import ask_deployed
from cluster.cli.console import columns, say
from cluster.cli.options import AsJson, MaxRequests, Name, ProfileName, Scale, Speedup
from cluster.cli.planning.simulate import open_profile, times_note
from core.trace.trace import read_trace
from core.types.errors import SpecError

if TYPE_CHECKING:
    from planner.autoscaler.scaling_decision import ScalingDecision

autoscale = typer.Typer(no_args_is_help=True, help="Decisions of the autoscaler, and their reasons.")

_NOT_ON = "autoscaling is off: the spec has no `autoscale` (`cluster autoscale set SPEC` turns it on)"
_OFF = "off"


@autoscale.command()
def status(name: Name = None, as_json: AsJson = False) -> None:
    """Show the autoscaler's targets and its last changes."""
    from planner.autoscaler.scaling_decision import ScalingDecision

    report = ask_deployed(name, "autoscaling")
    if as_json:
        print(json.dumps(report, indent=1))
        return
    rules = report["rules"]
    if rules is None:
        print(_NOT_ON)
        return
    prefill, decode = report["sizes"]
    dry = " (dry run: nothing is changed)" if rules["dry_run"] else ""
    print(
        f"{prefill}P{decode}D{dry}; TTFT <= {rules['slo_ttft_ms']:g} ms and ITL <= {rules['slo_itl_ms']:g} ms "
        f"for {rules['attainment']:.0%}, every {rules['interval_s']:g} s"
    )
    print(f"history: {report['history']}")
    if report["problem"]:
        print(f"autoscaling is failing: {report['problem']}")
    decisions = [ScalingDecision.of(tree) for tree in report["decisions"]]
    changes = [decision for decision in decisions[:-1] if decision.is_change]
    for decision in [*changes[-5:], *decisions[-1:]]:
        print(_line(decision))


@autoscale.command()
def explain(
    number: Annotated[int | None, typer.Argument(help="Number of a decision; default: the last one.")] = None,
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Show one decision in full: the load, the sizes tried, and the predicted result of each."""
    from planner.autoscaler.scaling_decision import ScalingDecision

    report = ask_deployed(name, "autoscaling")
    decisions = report["decisions"]
    found = [tree for tree in decisions if number in (None, tree["number"])]
    if not found:
        problem = "no decision yet" if number is None else f"no decision {number}"
        raise SpecError(f"{problem}: {_availability(report)}")
    print(json.dumps(found[-1], indent=1) if as_json else _whole(ScalingDecision.of(found[-1])))


@autoscale.command("set")
def set_rules(
    spec: Annotated[str, typer.Argument(help="A spec with `autoscale` (the rest is ignored), or off.")],
    name: Name = None,
) -> None:
    """Change the autoscaler's rules from the next decision on, or turn it off."""
    from core.spec.loader import load_spec

    rules = None if spec == _OFF else load_spec(spec).autoscale
    if rules is None and spec != _OFF:
        raise SpecError(f"{spec}: has no `autoscale`; add it, or run `cluster autoscale set {_OFF}`")
    ask_deployed(name, "set_autoscale", rules)
    print(
        "autoscaling is off; pools keep their sizes"
        if rules is None
        else "the new rules apply from the next decision on"
    )


@autoscale.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Trace, as written by `cluster capture`.")],
    spec: Annotated[str, typer.Option(help="A spec with `autoscale`, or an initial topology such as 8P8D.")],
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Override the spec's value.")] = None,
    slo_itl_ms: Annotated[float | None, typer.Option(help="Override the spec's value.")] = None,
    max_devices: Annotated[int | None, typer.Option(min=2, help="Override the spec's value.")] = None,
    interval_s: Annotated[float | None, typer.Option(min=1, help="Override the spec's value.")] = None,
    start_s: Annotated[float, typer.Option(min=0, help="Seconds until a new replica serves.")] = 60.0,
    switch_s: Annotated[float, typer.Option(min=0, help="Seconds of a role switch after the drain.")] = 2.0,
    no_switch: Annotated[bool, typer.Option("--no-switch", help="Do not switch roles.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also replay every fixed split of the same devices.")
    ] = False,
    speedup: Speedup = 1.0,
    scale_tokens: Scale = "1",
    profile: ProfileName = None,
    max_requests: MaxRequests = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace against a simulated deployment with the autoscaler, in virtual time.

    Shows its decisions and the resulting goodput and latencies.
    """
    from core.spec.loader import load_spec
    from planner.autoscaler.replay import replay_trace, rules_of

    of = load_spec(spec)
    changes = {
        "slo_ttft_ms": slo_ttft_ms,
        "slo_itl_ms": slo_itl_ms,
        "max_devices": max_devices,
        "interval_s": interval_s,
    }
    rules = rules_of(of, **{key: value for key, value in changes.items() if value is not None})
    requests = read_trace(trace, speedup=speedup, scale=scale_tokens, max_requests=max_requests)
    times = open_profile(profile)
    found = replay_trace(
        of,
        rules,
        times,
        requests,
        start_s=start_s,
        switch_s=None if no_switch else switch_s,
        has_fixed=compare,
        decided=lambda decision: None if as_json else print(_line(decision), flush=True),
        said=say,
    )
    print(json.dumps(found, indent=1) if as_json else f"{compare_table(found)}\n{times_note(times)}")


def compare_table(found: dict[str, Any]) -> str:
    """Format the autoscaler's result and the fixed splits as a table."""
    scaled, fixed = found["scaled"], found["fixed"]
    rows = [["", "GOOD", "GOOD/S", "TTFT P50 ms", "P99", "ITL P50 ms", "P99", "REUSED"]]
    for name, report in [*fixed.items(), ("autoscaler", scaled)]:
        good_per_s = report["good_share"] * report["completed"] / scaled["trace_s"]
        times = [f"{report[key][q]:,.0f}" for key in ("ttft_ms", "itl_ms") for q in ("p50", "p99")]
        rows.append([name, f"{report['good_share']:.1%}", f"{good_per_s:.3f}", *times, f"{report['reuse_share']:.1%}"])
    best = max((report["good_share"] for report in fixed.values()), default=0.0)
    ratio = f"{scaled['good_share'] / best:.2f} x the best fixed split; " if best else ""
    return (
        f"{columns(rows)}\n{scaled['completed']:,} requests in {scaled['trace_s'] / 60:.0f} min; {ratio}"
        f"{scaled['changes']} changes, {scaled['changes_per_hour']:.1f} an hour; {scaled['mean_replicas']:.1f} replicas"
        f" on average"
    )


def _availability(report: dict[str, Any]) -> str:
    """Describe the available decisions, or why there are none."""
    if decisions := report["decisions"]:
        return f"available: {decisions[0]['number']} to {decisions[-1]['number']}"
    if (rules := report["rules"]) is None:
        return _NOT_ON
    if report["problem"]:
        return str(report["problem"])
    return f"one is made every {rules['interval_s']:g} s; retry later"


def _line(decision: ScalingDecision) -> str:
    when = _when(decision.time_s)
    good = f"{decision.measured['good_share']:.0%}" if decision.measured else "-"
    return f"{when}  #{decision.number}  {good} good  {decision.sizes}  {decision.reason}"


def _when(time_s: float) -> str:
    """Format a date or, in a replay, the time since its start."""
    if time_s < 1e8:
        return f"{int(time_s // 60):3d}:{int(time_s % 60):02d}"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def _whole(decision: ScalingDecision) -> str:
    lines = [_line(decision), f"load: {decision.load or 'too few requests'}"]
    if decision.measured:
        m: Any = decision.measured
        lines.append(
            f"measured since the decision before, of {m['num']:.0f} requests: {m['good_share']:.1%} good, "
            f"TTFT p50 {m['ttft_p50_s'] * 1e3:,.0f} ms, ITL {m['itl_s'] * 1e3:,.1f} ms"
        )
    if decision.is_change:
        lines.append(f"moves: {decision.moves}")
    if decision.worth_s:
        lines.append(f"saves {decision.worth_s:.0f} s over all requests; costs {decision.price_s:.1f} s")
    if decision.tried:
        rows = [["SIZES", "LOAD", "GOOD", "IN TTFT", "IN ITL", "TTFT P50 ms", "P90", "ITL ms", "REUSED"]]
        for p in decision.tried:
            shares = [f"{share:.1%}" for share in (p.good_share, p.ttft_share, p.itl_share)]
            times = [f"{p.ttft_p50_s * 1e3:,.0f}", f"{p.ttft_p90_s * 1e3:,.0f}", f"{p.itl_s * 1e3:,.1f}"]
            rows.append([str(p.sizes), f"{p.load:.0%}", *shares, *times, f"{p.reuse_share:.0%}"])
        lines += ["simulated with the forecast load:", columns(rows)]
    lines.append(f"decided by the {decision.mode} in {decision.took_s:.1f} s")
    return "\n".join(lines)
