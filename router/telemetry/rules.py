"""Prometheus's alerts: what is looked at, and from where on somebody should be woken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JOB = "xpyd"  # of the scrapes, as deploy/monitoring/prometheus.yml names it
_OUR_FAULT = "replica_lost|transfer_failed|layout_mismatch|internal_error"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Fires while `looked_at limit` holds. What is looked at has data also while nothing is wrong."""

    name: str
    looked_at: str  # PromQL
    limit: str
    held: str = "2m"  # for so long
    severity: str = "warning"
    says: str
    do: str

    def as_rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": f"({self.looked_at}) {self.limit}",
            "for": self.held,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.says, "description": self.do},
        }


def _own(name: str, where: str = "") -> str:
    return f'{name}{{job="{JOB}"{"," + where if where else ""}}}'


def _once(name: str, where: str = "") -> str:
    """A replica's series, which each router exports."""
    return f"max by (replica, role) ({_own(name, where)})"


def _rate(name: str, *, of_replicas: bool, window: str = "5m") -> str:
    rate = f"rate({_own(name)}[{window}])"
    return f"sum(max by (replica, role) ({rate}))" if of_replicas else f"sum({rate})"


def _share(outcome: str) -> str:
    some = _own("requests_total", f'outcome=~"{outcome}"')
    return f"sum(rate({some}[5m])) / {_rate('requests_total', of_replicas=False)}"


def _quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({_own(name + '_bucket')}[5m])))"


_PREFILL_BLOCKS = _once("kv_blocks", 'role="prefill"')
_DECODE_BLOCKS, _DECODE_FREE, _DECODE_CACHED = (
    _once(name, 'role="decode"') for name in ("kv_blocks", "kv_blocks_free", "kv_blocks_cached")
)

ALERTS = (
    Alert(
        name="XpydRouterDown",
        looked_at=_own("up"),
        limit="== 0",
        held="1m",
        severity="critical",
        says="The router at {{ $labels.instance }} does not answer.",
        do="`cluster status`; Ray Serve starts another one where it can.",
    ),
    Alert(
        name="XpydNoDecodeReplica",
        looked_at=f"count({_DECODE_BLOCKS}) or vector(0)",
        limit="< 1",
        held="30s",
        severity="critical",
        says="No decode replica: nothing can be served.",
        do="`cluster status` says what became of them, `cluster logs` why.",
    ),
    Alert(
        name="XpydNoPrefillReplica",
        looked_at=f"count({_PREFILL_BLOCKS}) or vector(0)",
        limit="< 1",
        held="1m",
        says="No prefill replica: decode replicas compute all prompts.",
        do="`cluster status` says what became of them, `cluster logs` why.",
    ),
    Alert(
        name="XpydRequestsFail",
        looked_at=_share(_OUR_FAULT),
        limit="> 0.01",
        severity="critical",
        says="{{ $value | humanizePercentage }} of the requests fail by our fault.",
        do="The routers' logs have a line for each: `cluster logs router`.",
    ),
    Alert(
        name="XpydRequestsTurnedAway",
        looked_at=_share("overloaded"),
        limit="> 0.05",
        says="{{ $value | humanizePercentage }} of the requests are turned away.",
        do="Add replicas: `cluster scale`. Which: first tokens late, prefill; tokens late, decode.",
    ),
    Alert(
        name="XpydFirstTokensLate",
        looked_at=_quantile(0.99, "time_to_first_token_seconds"),
        limit="> 2",
        held="5m",
        says="One first token in a hundred takes {{ $value | humanizeDuration }}.",
        do="Put your own limit in. Add prefill replicas, or see `cluster trace REQUEST_ID` for where the time goes.",
    ),
    Alert(
        name="XpydTokensLate",
        looked_at=_quantile(0.99, "inter_token_latency_seconds"),
        limit="> 0.1",
        held="5m",
        says="One token in a hundred comes {{ $value | humanizeDuration }} after the one before.",
        do="Put your own limit in. Add decode replicas, or let them run fewer sequences.",
    ),
    Alert(
        name="XpydRequestsWait",
        looked_at=_quantile(0.9, "queue_time_seconds"),
        limit="> 1",
        held="5m",
        says="One request in ten waits {{ $value | humanizeDuration }} for replicas with room.",
        do="Add replicas: `cluster scale`.",
    ),
    Alert(
        name="XpydPreemptions",
        looked_at=_rate("preemptions_total", of_replicas=True),
        limit="> 0.1",
        held="5m",
        says="Sequences lose their blocks and are computed again: KV memory is too small.",
        do="Another decode replica, `decode.kv_memory_gib`, or `kv.pool_dtype: int8`.",
    ),
    Alert(
        name="XpydKvNearlyFull",
        looked_at=f"({_DECODE_FREE} + {_DECODE_CACHED}) / {_DECODE_BLOCKS}",
        limit="< 0.05",
        held="5m",
        says="{{ $labels.replica }} has {{ $value | humanizePercentage }} of its blocks to give.",
        do="Another decode replica, or more `decode.kv_memory_gib`.",
    ),
    Alert(
        name="XpydHandoffsFail",
        looked_at=_rate("kv_transfer_failures_total", of_replicas=True),
        limit="> 0.1",
        says="Handoffs fail: the network, or a replica that is dying.",
        do="`cluster logs` of the replicas whose kv_transfer_failures_total rises.",
    ),
    Alert(
        name="XpydPullsFail",
        looked_at=_rate("prefix_pull_failures_total", of_replicas=True),
        limit="> 0.1",
        held="5m",
        says="Prefixes cannot be fetched from other replicas, and are computed.",
        do="`cluster logs` of the replicas whose prefix_pull_failures_total rises.",
    ),
    Alert(
        name="XpydTierLosses",
        looked_at=_rate("kv_tier_losses_total", of_replicas=True, window="15m"),
        limit="> 1",
        held="5m",
        says="Blocks are lost on their way to memory or files.",
        do="The disk for blocks is full, slow or damaged: see `kv_disk_path`.",
    ),
    Alert(
        name="XpydDrainsForLong",
        looked_at=_once("replica_draining"),
        limit="== 1",
        held="15m",
        says="{{ $labels.replica }} has been leaving for a quarter of an hour.",
        do="`cluster status`; after `timeouts.drain_s` it is ended.",
    ),
    Alert(
        name="XpydRouterTasksDie",
        looked_at=f"sum(rate({_own('background_task_deaths_total')}[15m])) or vector(0)",
        limit="> 0",
        held="1m",
        says="A router's own tasks die, and are started again.",
        do="`cluster logs router` has why; report it.",
    ),
    Alert(
        name="XpydMembersRefused",
        looked_at=f"sum(increase({_own('member_records_refused_total')}[15m])) or vector(0)",
        limit="> 0",
        held="1m",
        says="Replicas are there to whom no router connects: another version, or not of this deployment.",
        do="`cluster logs router` names them.",
    ),
)


def rules() -> dict[str, Any]:
    """As a file of Prometheus's rules has them."""
    return {"groups": [{"name": "xpyd", "rules": [alert.as_rule() for alert in ALERTS]}]}
