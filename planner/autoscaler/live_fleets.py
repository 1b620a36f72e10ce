"""Simulator model of a live deployment: profile from its replicas' reports, and measured saturation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.traffic import TOKENS_PER_HASH, ReplicaReport
from core.types.errors import ClusterError
from core.types.request import Role
from core.types.step_timing import StepTiming
from planner.autoscaler.observation import Saturation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.simulated_outlook import Fleets
from planner.simulator.learnt_drafts import by_yield
from planner.simulator.profile import KV, Drafts, LinkProfile, Profile, Steps

_LINK_BYTES_PER_S = 1e9  # default before a rate is measured
_LATENCY_S = 0.003
_NUM_LAYERS = 32  # all layers of a transfer but the last overlap with the prefill
_HOST_BYTES_PER_S = 4e9


def fleets_of(spec: Spec, rules: AutoscaleSpec, replicas: Sequence[ReplicaReport]) -> Fleets:
    """Build the simulator's model from the replicas' reports. Raises ClusterError while rates are unknown."""
    if not replicas:
        raise ClusterError("no router has reported its replicas yet; routers report every few seconds")
    steps = {role: _mean_timing(role, replicas) for role in Role}
    rates = [replica.link_bytes_per_s for replica in replicas if replica.link_bytes_per_s]
    pools = [replica.num_blocks * replica.block_size for replica in replicas]
    cache = max((replica.cache for replica in replicas), key=lambda cache: cache.token_bytes)
    profile = Profile(
        name="live",
        origin="measured",
        derivation=["step times measured by the replicas themselves, including other load on their machines"],
        steps=Steps(**{**_fields(steps[Role.PREFILL]), "context_s": steps[Role.DECODE].context_s}),
        decode_steps=Steps(**_fields(steps[Role.DECODE])),
        drafts=_drafts(replicas),
        kv=KV(
            bytes_per_token=cache.token_bytes,
            wire_bytes_per_token=cache.token_bytes,
            num_layers=_NUM_LAYERS,
            pool_tokens=round(fmean(pools)),
            window=cache.window,
            window_wire_bytes_per_token=cache.window_token_bytes,
            pool_window_tokens=round(fmean(max(0, one.num_window_parts - 1) * one.block_size for one in replicas)),
            state_bytes=cache.state_bytes,
            pool_states=round(fmean(replica.num_states for replica in replicas)),
        ),
        link=LinkProfile(latency_s=_LATENCY_S, bytes_per_s=fmean(rates) if rates else _LINK_BYTES_PER_S),
        host_bytes_per_s=_HOST_BYTES_PER_S,
        usd_per_hour=1.0,
    )
    return Fleets.of(spec, rules, profile, block_size=TOKENS_PER_HASH)


def saturation_of(fleet: Iterable[ReplicaReport], rules: AutoscaleSpec, *, num_waiting: int) -> Saturation:
    """Compute the saturation of each pool. num_waiting: requests queued in routers; if any, the fuller pool is full."""
    replicas = list(fleet)
    prefill = [r.queued_tokens / r.prefill_tokens_per_s for r in replicas if _does(r, Role.PREFILL)]
    decode = [r for r in replicas if _does(r, Role.DECODE)]
    full_p = fmean(prefill) / (rules.slo_ttft_ms / 1e3) if prefill else 0.0
    full_d = max(
        fmean(1 - r.available_blocks / r.num_blocks for r in decode) if decode else 0.0,
        fmean(r.num_streams / r.max_running for r in decode) if decode else 0.0,
        fmean(r.decode_step_s / max(1.0, r.tokens_per_row) for r in decode) / (rules.slo_itl_ms / 1e3)
        if decode
        else 0.0,
    )
    if num_waiting and full_p >= full_d:
        full_p = max(full_p, 1.0)
    elif num_waiting:
        full_d = max(full_d, 1.0)
    return Saturation(prefill=full_p, decode=full_d)


def devices_of(spec: Spec) -> PoolSizes:
    """Return the number of GPUs per replica of each pool, or of ranks without GPUs."""
    of = {role: spec.pool(role) for role in Role}
    return PoolSizes(*(round(of[role].tensor_parallel * max(1.0, of[role].resources.gpus)) for role in Role))


def _does(replica: ReplicaReport, role: Role) -> bool:
    is_measured = replica.prefill_tokens_per_s > 0 if role is Role.PREFILL else True
    return replica.role is role and is_measured


def _mean_timing(role: Role, replicas: Sequence[ReplicaReport]) -> StepTiming:
    if not any(replica.role is role for replica in replicas):  # replicas of the other role do both
        role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    known = [replica.timing for replica in replicas if replica.role is role and replica.timing]
    if not known:
        raise ClusterError(f"no {role} replica has reported step times yet")
    return StepTiming(**{name: fmean(getattr(timing, name) for timing in known) for name in Steps.model_fields})


def _drafts(replicas: Sequence[ReplicaReport]) -> Drafts | None:
    """Return draft rates from the recent yields of the decode replicas; None if they do not draft."""
    busy = [replica for replica in replicas if replica.role is Role.DECODE and replica.tokens_per_row]
    if not busy:
        return None
    return by_yield(fmean(r.tokens_per_row for r in busy), fmean(r.drafted_per_row for r in busy))


def _fields(timing: StepTiming) -> dict[str, float]:
    return {name: getattr(timing, name) for name in Steps.model_fields}
