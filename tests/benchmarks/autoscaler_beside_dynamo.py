"""The autoscaler and the planner of NVIDIA Dynamo on the same simulated replicas, in virtual time:

    python -m tests.benchmarks.autoscaler_beside_dynamo --planner-python VENV/bin/python --traces DIR --begin 13P3D

The planner lives in a virtual environment of its own, and decides in a process of its own by its own code: its replay
adapter, that is its pipeline with its predictors, its formulas, its budgets. What it is told comes from the simulator:
at each of its ticks the traffic since the last one that asked for it, and of each replica the last step and the queue,
as its engines tell it. Its profile is what its own replay measures of an engine, from the simulator's profile: seconds
of prefill steps by tokens, and of decode steps by batch and context. See docs/benchmarks/autoscaler.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from core.spec.schema import AutoscaleSpec, PoolBounds
from core.trace.trace import TraceRequest
from core.types.request import Role
from core.types.step_timing import pairs
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from planner.autoscaler.decide import Autoscaler
from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits, ScaleMoves
from planner.autoscaler.replay import ReplayPrice, ScaledReplay
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import Fleets
from planner.simulator.decode_replica import DecodeReplica
from planner.simulator.fleet import Fleet
from planner.simulator.flight import Flight
from planner.simulator.prefill_replica import PrefillReplica
from planner.simulator.prefix_hashes import PrefixHashes
from tests.benchmarks import autoscaler

_CONTEXT = 131_072  # of the profiles' models
_PLANNER = """
import json, os, sys, types
from dataclasses import dataclass, field

told = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
try:
    import aisimulate_core
except ImportError:  # its estimator's regression, as its predecessor had it
    from aiconfigurator_core.sdk import RustForwardPassPerfModel as Predecessor

    @dataclass
    class ForwardPassPerfModelConfig:
        model: str
        system: str
        backend: str
        worker_type: str
        estimation_mode: str
        tp: int = 1
        pp: int = 1
        estimator_config: dict = field(default_factory=dict)

        @classmethod
        def from_legacy_engine_config(cls, config, worker_type, options):
            names = config["model_name"], config["system_name"], config["backend"]
            return cls(*names, worker_type, "fpm_regression", estimator_config=options)

    class RustForwardPassPerfModel:
        @staticmethod
        def best_available(config):
            return Predecessor.from_regression(config["estimator_config"])

    core, sdk = types.ModuleType("aisimulate_core"), types.ModuleType("aisimulate_core.sdk")
    sdk.ForwardPassPerfModelConfig, sdk.RustForwardPassPerfModel = ForwardPassPerfModelConfig, RustForwardPassPerfModel
    core.sdk = sdk
    sys.modules["aisimulate_core"], sys.modules["aisimulate_core.sdk"] = core, sdk

from importlib.metadata import version
from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities
from dynamo.planner.offline.replay_adapter import create_replay_planner_adapter

setup = json.loads(sys.stdin.readline())
planner = create_replay_planner_adapter(
    PlannerConfig.model_validate(setup["config"]),
    WorkerCapabilities(**{role: EngineCapabilities(**setup["capabilities"]) for role in ("prefill", "decode")}),
    capture_details=False,
)
if not planner._is_easy_mode():
    planner.install_benchmark_fpms(**{
        f"{role}_fpms": [
            ForwardPassMetrics(wall_time=step.pop("wall_time"), scheduled_requests=ScheduledRequestMetrics(**step))
            for step in steps
        ]
        for role, steps in setup["profile"].items()
    })
said = []
tick = planner._engine.tick

async def tick_and_say(*arguments):
    effects = await tick(*arguments)
    d = effects.diagnostics
    said[:] = [
        f"{k}={getattr(d, k)}" for k in (
            "load_decision_reason", "throughput_decision_reason", "predicted_num_req", "predicted_isl",
            "predicted_osl", "engine_rps_prefill", "engine_rps_decode", "estimated_ttft_ms", "estimated_itl_ms",
            "throughput_lower_bound_prefill", "throughput_lower_bound_decode",
        ) if getattr(d, k, None) is not None
    ]
    return effects

planner._engine.tick = tick_and_say
print(json.dumps({"version": version("ai-dynamo"), "first_ms": planner.initial_tick_ms()}), file=told)
for line in sys.stdin:
    print(json.dumps({**planner.on_tick(json.loads(line)), "said": " ".join(said)}), file=told)
"""


class Planner:
    """Dynamo's, in its own process."""

    def __init__(self, python: Path, config: dict[str, Any], fleets: Fleets) -> None:
        command = [str(python), "-c", _PLANNER]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        begun = self._ask({"config": config, "capabilities": _capabilities(fleets), "profile": _profile(fleets)})
        self.version, self.first_s = begun["version"], begun["first_ms"] / 1e3

    def tick(self, seen: dict[str, Any]) -> Any:
        return self._ask(seen)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the planner has ended")
        return json.loads(line)


def _capabilities(fleets: Fleets) -> dict[str, Any]:
    return {
        "num_gpu": 1,  # of the budget, which is in replicas
        "max_num_batched_tokens": fleets.setup.prefill_batch_tokens,
        "max_num_seqs": fleets.setup.max_running,
        "context_length": _CONTEXT,
        "max_kv_tokens": fleets.setup.kv_tokens,
        "kv_cache_block_size": fleets.setup.block_size,
    }


def _profile(fleets: Fleets) -> dict[str, Any]:
    """The points that its own replay asks an estimator for."""
    setup, prefill, decode = fleets.setup, fleets.profile.timing, fleets.profile.decode_timing
    prompts = range(100, setup.prefill_batch_tokens + 1, (setup.prefill_batch_tokens - 100) // 8)
    batches = [
        (rows, rows * context)
        for context in (500, 2000, 4000, 8000)
        for rows in range(1, setup.max_running + 1, setup.max_running // 8)
        if rows * context <= setup.kv_tokens
    ]
    return {
        "prefill": [
            {
                "wall_time": prefill.step_s(num_tokens=n, num_pairs=pairs(n, after=0), num_context=0),
                "num_prefill_requests": 1,
                "sum_prefill_tokens": n,
            }
            for n in prompts
        ],
        "decode": [
            {
                "wall_time": decode.step_s(num_tokens=rows, num_pairs=0, num_context=context),
                "num_decode_requests": rows,
                "sum_decode_kv_tokens": context,
            }
            for rows, context in batches
        ],
    }


@dataclass(frozen=True, kw_only=True)
class _Step:
    began_s: float
    seconds: float
    scheduled: dict[str, float]
    prompts: frozenset[int]  # of these requests


class _WatchedFleet(Fleet):
    """Knows the last step of each replica."""

    def __init__(self, fleets: Fleets, begin: PoolSizes, trace: Sequence[TraceRequest], *rest: Any) -> None:
        self._steps: dict[str, _Step] = {}
        setup = replace(fleets.setup, num_prefill=begin.prefill, num_decode=begin.decode)
        super().__init__(setup, fleets.profile, PrefixHashes(setup.block_size, trace[0].tokens_per_id), *rest)

    def add(self, role: Role) -> str:
        name = super().add(role)
        replica = self._replica(name)
        execute = replica.execute

        def watched(step: ScheduledStep | None, orders: Orders) -> tuple[()]:
            assert step
            self._steps[name] = self._seen(step)
            return execute(step, orders)

        replica.execute = watched  # type: ignore[method-assign]
        return name

    def told(self, role: Role) -> list[dict[str, Any]]:
        """Of each replica that gets requests what its engine would have told last."""
        replicas = [self._told(name, self._replica(name)) for name in self.serving(role)]
        for flight in self._line._flights if self._is_short_of(role) else ():
            kind = "prefill" if role is Role.PREFILL else "decode"
            tokens = "sum_queued_prefill_tokens" if role is Role.PREFILL else "sum_queued_decode_kv_tokens"
            least = min(replicas, key=lambda told: told[tokens])
            least[f"num_queued_{kind}"] += 1
            least[tokens] += flight.request.num_tokens
        return replicas

    def _is_short_of(self, role: Role) -> bool:
        """What waits in the router waits for this pool. Its own router would have given it to the replicas."""
        now = self._clock.now
        is_prefill = all(self._busy_until.get(name, 0.0) - now > 1.0 for name in self.serving(Role.PREFILL))
        return is_prefill is (role is Role.PREFILL)

    def _seen(self, step: ScheduledStep) -> _Step:
        prompts = [(prompt.sequence, count) for prompt, count in step.prompts]
        contexts = [len(sequence.tokens) for sequence, _ in step.decoding]
        timing = self._timing if prompts else self._decode_timing
        scheduled = {
            "num_prefill_requests": len(prompts),
            "sum_prefill_tokens": sum(count for _, count in prompts),
            "var_prefill_length": _variance([len(sequence.tokens) for sequence, _ in prompts]),
            "sum_prefill_kv_tokens": sum(sequence.num_computed for sequence, _ in prompts),
            "num_decode_requests": len(contexts),
            "sum_decode_kv_tokens": sum(contexts),
            "var_decode_kv_tokens": _variance(contexts),
        }
        seconds = timing.step_s(
            num_tokens=step.num_tokens,
            num_pairs=sum(pairs(count, after=sequence.num_computed) for sequence, count in prompts),
            num_context=sum(contexts),
        )
        return _Step(
            began_s=self._clock.now,
            seconds=seconds,
            scheduled=scheduled,
            prompts=frozenset(id(sequence) for sequence, _ in prompts),
        )

    def _told(self, name: str, replica: PrefillReplica | DecodeReplica) -> dict[str, Any]:
        engine = replica._engine
        is_prefill = isinstance(replica, PrefillReplica)
        is_busy = replica._is_stepping if is_prefill else bool(replica._under_way)
        step = self._steps.get(name) if is_busy else None
        scheduled = dict(step.scheduled if step else _IDLE)
        if step and scheduled["num_decode_requests"] and not scheduled["num_prefill_requests"]:  # several, all alike
            again = int((self._clock.now - step.began_s) / step.seconds)
            scheduled["sum_decode_kv_tokens"] += again * scheduled["num_decode_requests"]
        running = step.prompts if step else frozenset()
        waiting = [prompt.sequence for prompt in (*engine.prompts.waiting, *engine.prompts.computing)]
        lengths = [len(sequence.tokens) for sequence in waiting if id(sequence) not in running]
        if not is_prefill:
            lengths += [len(sequence.tokens) for sequence in engine.decoding.preempted]
        prompts, decodes = (lengths, []) if is_prefill else ([], lengths)
        return {
            "worker_id": int(name.split("-")[1]),
            "wall_time": step.seconds if step else 0.0,
            **scheduled,
            "num_queued_prefill": len(prompts),
            "sum_queued_prefill_tokens": sum(prompts),
            "var_queued_prefill_length": _variance(prompts),
            "num_queued_decode": len(decodes),
            "sum_queued_decode_kv_tokens": sum(decodes),
            "var_queued_decode_kv_tokens": _variance(decodes),
        }


_IDLE: dict[str, float] = dict.fromkeys(
    (
        "num_prefill_requests",
        "sum_prefill_tokens",
        "var_prefill_length",
        "sum_prefill_kv_tokens",
        "num_decode_requests",
        "sum_decode_kv_tokens",
        "var_decode_kv_tokens",
    ),
    0,
)


def _variance(values: Sequence[int]) -> float:
    mean = fmean(values) if values else 0.0
    return fmean((value - mean) ** 2 for value in values) if values else 0.0


class PlannedReplay(ScaledReplay):
    """A replay in which the planner decides, when it wants to."""

    _fleet: _WatchedFleet

    def __init__(
        self,
        planner: Planner,
        fleets: Fleets,
        trace: Sequence[TraceRequest],
        *,
        begin: PoolSizes,
        num_replicas: int,
        price: ReplayPrice,
        decided: Callable[[ScalingDecision], object],
    ) -> None:
        bounds = PoolBounds(min=1, max=num_replicas - 1)
        spec = AutoscaleSpec(prefill=bounds, decode=bounds, max_devices=num_replicas, interval_s=planner.first_s)
        limits = ScaleLimits.of(spec, devices=PoolSizes(1, 1))
        super().__init__(fleets, trace, Autoscaler(spec, limits), begin=begin, price=price, decided=decided)
        self._planner = planner
        self._fleet = _WatchedFleet(fleets, begin, trace, self._clock, self._report)
        self._open: list[Flight] = []  # whose first token had not come, or that were not over, at the last look
        self._started: set[int] = set()
        self._looked_s = 0.0
        self._num_seen = self._num_ticks = 0

    def _arrive(self, request: TraceRequest) -> None:
        super()._arrive(request)
        self._open.append(self._flights[request.number])

    def _decide(self) -> None:
        now, before = self._clock.now, self._sizes
        answer = self._planner.tick(self._news())
        wanted = PoolSizes(answer["target_prefill"] or before.prefill, answer["target_decode"] or before.decode)
        if not self._autoscaler.limits.allow(wanted):
            raise SystemExit(f"{now:.0f} s: the planner wants {wanted}, more than there is")
        self._num_ticks += 1
        decision = ScalingDecision(
            number=self._num_ticks,
            time_s=now,
            before=before,
            after=wanted,
            mode="saturation",
            reason=answer["said"],
            moves=ScaleMoves.between(before, wanted, has_switch=self._price.switch_s is not None),
        )
        self.decisions.append(decision)
        self._decided(decision)
        if decision.is_change:
            self._carry_out(decision)
        next_s = answer["next_tick_ms"] / 1e3
        if next_s <= self._trace[-1].arrival_s:
            self._clock.at(next_s, self._decide)

    def _news(self) -> dict[str, Any]:
        """In the terms of its own replay. What is wanted beyond what serves is on its way."""
        news: dict[str, Any] = {"tick_ordinal": self._num_ticks, "traffic": self._traffic()}
        for role, wanted in ((Role.PREFILL, self._sizes.prefill), (Role.DECODE, self._sizes.decode)):
            told = self._fleet.told(role)
            news |= {
                f"active_{role.value}_count": len(told),
                f"non_draining_{role.value}_count": wanted,
                f"active_{role.value}_ids": [one["worker_id"] for one in told],
                f"{role.value}_fpm_snapshots": told,
            }
        return news

    def _traffic(self) -> dict[str, Any]:
        """Since the last tick: who arrived; of those that are over, the lengths; of those whose first token has come,
        how much of the prompt was cached."""
        started = [f for f in self._open if f.first_token_at and f.request.number not in self._started]
        over = [f for f in self._open if f.ended_at]
        self._open = [f for f in self._open if not f.ended_at]
        self._started = (self._started | {f.request.number for f in started}) - {f.request.number for f in over}
        num_new, self._num_seen = len(self._seen) - self._num_seen, len(self._seen)
        seconds, self._looked_s = self._clock.now - self._looked_s, self._clock.now
        itl = [f.mean_itl_s for f in over if f.mean_itl_s]
        return {
            "duration_s": seconds,
            "num_req": num_new,
            "shape_count": len(over),
            "avg_isl": _mean([f.request.num_tokens for f in over]),
            "avg_osl": _mean([f.request.num_output for f in over]),
            "hit_rate_count": len(started),
            "avg_kv_hit_rate": _mean([f.num_cached / f.request.num_tokens for f in started]),
            "ttft_count": len(started),
            "avg_ttft_ms": _mean([f.ttft_s * 1e3 for f in started]),
            "itl_count": len(itl),
            "avg_itl_ms": _mean([seconds * 1e3 for seconds in itl]),
            "avg_accept_length": None,
            "accept_length_forward_count": 0,
        }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All else: see tests.benchmarks.autoscaler."
    )
    parser.add_argument("--planner-python", type=Path, required=True, help="The interpreter of its environment.")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"Of the planner, with commas: {', '.join(_WAYS)}.")
    parser.add_argument("--prices", default="start,switch", help="Of a change of role: 'start', 'switch'.")
    parser.add_argument("--pinned", default="no,yes", help="Whether min_gpu_budget is all there is: 'no', 'yes'.")
    parser.add_argument("--no-ours", action="store_true")
    own, others = parser.parse_known_args()
    options = autoscaler.parse(others)
    fleets = autoscaler.make_fleets(options)
    trace = autoscaler.make_trace(options, fleets)
    rows: dict[str, Any] = {}
    print(_HEAD, flush=True)

    def tell(name: str, found: dict[str, Any]) -> None:
        rows[name] = found
        print(_row(name, found, len(trace)), flush=True)
        if options.output:
            options.output.write_text(json.dumps(rows))

    for split in autoscaler._splits(options):
        name = f"{split}P{options.replicas - split}D"
        tell(name, autoscaler.run_fixed(fleets, trace, options.replicas, split))
    for way, price, pinned in itertools.product(own.ways.split(","), own.prices.split(","), own.pinned.split(",")):
        name = f"{way}, {price}{', pinned' if pinned == 'yes' else ''}"
        tell(name, _planned(own, options, fleets, trace, way, price, pinned))
    if not own.no_ours:
        tell("ours", autoscaler.run_scaled(options, fleets, trace))


_SLA: dict[str, Any] = {"optimization_target": "sla"}
_BOTH = {**_SLA, "enable_load_scaling": True}
_WAYS: dict[str, dict[str, Any]] = {
    "sla-180": _SLA,
    "sla-30": {**_SLA, "throughput_adjustment_interval_seconds": 30},
    "hybrid-180": _BOTH,
    "hybrid-30": {**_BOTH, "throughput_adjustment_interval_seconds": 30},
    "load": {**_BOTH, "enable_throughput_scaling": False},
    "easy-throughput": {"optimization_target": "throughput"},
    "easy-latency": {"optimization_target": "latency"},
    "sla-30-constant": {**_SLA, "throughput_adjustment_interval_seconds": 30, "load_predictor": "constant"},
    "hybrid-30-constant": {**_BOTH, "throughput_adjustment_interval_seconds": 30, "load_predictor": "constant"},
}
_HEAD = f"{'':28}   GOOD GOOD/S TTFT P50      P99 ITL P50    P99 CHANGES   /H REPLICAS FAILED"


def _row(name: str, found: dict[str, Any], num_requests: int) -> str:
    ttft, itl = found["ttft_ms"], found["itl_ms"]
    line = f"{name:28} {found['good_share']:6.1%} {found['goodput_rps']:6.3f} {ttft['p50']:8,.0f} {ttft['p99']:8,.0f}"
    line += f" {itl['p50']:7.0f} {itl['p99']:6.0f}"
    if "changes" in found:
        line += f" {found['changes']:7} {found['changes_per_hour']:4.0f} {found['mean_replicas']:8.2f}"
        line += f" {num_requests - found['completed']:6}"
    return line


def _planned(
    own: argparse.Namespace,
    options: argparse.Namespace,
    fleets: Fleets,
    trace: list[TraceRequest],
    way: str,
    price: str,
    pinned: str,
) -> dict[str, Any]:
    config = {
        "mode": "disagg",
        "environment": "virtual",
        "pre_deployment_sweeping_mode": "none",
        "ttft_ms": options.slo_ttft_ms,
        "itl_ms": options.slo_itl_ms,
        "max_gpu_budget": options.replicas,
        "min_gpu_budget": options.replicas if pinned == "yes" else -1,
        **_WAYS[way],
    }
    half = options.replicas // 2
    begin = PoolSizes(*map(int, options.begin.rstrip("D").split("P"))) if options.begin else PoolSizes(half, half)
    planner = Planner(own.planner_python, config, fleets)
    try:
        return PlannedReplay(
            planner,
            fleets,
            trace,
            begin=begin,
            num_replicas=options.replicas,
            price=ReplayPrice(start_s=options.start_s, switch_s=2.0 if price == "switch" else None),
            decided=lambda d: options.verbose and print(_line(d), file=sys.stderr, flush=True),
        ).run()
    finally:
        planner.close()


def _line(d: ScalingDecision) -> str:
    return f"{d.time_s:6.0f} s {d.before} -> {d.after} {d.reason}"


if __name__ == "__main__":
    main()
