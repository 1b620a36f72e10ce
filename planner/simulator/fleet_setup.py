"""Setup of a simulation: number and size of the replicas, and routing rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """Simulated deployment. With num_prefill = 0 each decode replica computes its prompts itself."""

    num_prefill: int
    num_decode: int
    policy: str
    block_size: int
    kv_tokens: int  # per replica
    host_tokens: int = 0  # per replica
    prefill_width: int = 1  # multiple of the compute threads of the profile's replica
    decode_width: int = 1
    prefix_fetches: bool = False
    eviction: str = "reuse_value"  # as kv.eviction
    prefill_batch_tokens: int = 8192
    decode_batch_tokens: int = 2048
    max_running: int = 256
    max_local_tokens: int = 16  # as router.max_local_prefill
    checkpoint_tokens: int = 128  # as kv.checkpoint_tokens
    waits_in_router: bool = False  # requests queue in the router until replicas have room, as in the live router
