"""Reports of idle replicas, as routers send them to the controller."""

from __future__ import annotations

from typing import Any

from core.trace.traffic import ReplicaReport
from core.types.request import Role


def replica_report(replica: str, role: Role, **more: Any) -> ReplicaReport:
    """Return the report of an idle replica. more: further fields, such as `timing`, which has no default here."""
    fields: dict[str, Any] = {
        "link_bytes_per_s": 1e9,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 0.02,
        "queued_tokens": 0,
        "num_streams": 0,
        "max_running": 64,
        "max_batch_tokens": 2048,
        "num_blocks": 1000,
        "available_blocks": 1000,
        "block_size": 16,
        "bytes_per_token": 1000,
    }
    return ReplicaReport(replica=replica, role=role, **(fields | more))
