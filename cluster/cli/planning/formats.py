"""`cluster plan --formats`: memory and speed of weight and KV formats, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from core.model.kv_memory import KVArithmetic
    from core.model.shape import ModelConfig
    from planner.simulator.profile import Profile

# Bits per weight of the matrices in the layers, with their scales.
WEIGHT_BITS: Final = {"bf16": 16.0, "fp8": 8.002, "int8": 8.01, "int4": 4.125, "nvfp4": 4.5, "mxfp4": 4.25}
# Share of a rank's memory for weights and KV; the rest is for activations, graphs and links.
_USABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class FormatPlan:
    """One weight format with one KV format. tokens: KV tokens that fit beside the weights; None: weights do not fit.

    tokens_s: expected decode speed of one sequence and of `batch`; None if the profile lacks its weight bytes.
    """

    weights: str
    kv: str
    weight_bytes: int
    kv_bytes_per_token: int
    tokens: int | None
    tokens_s: float | None
    batch_tokens_s: float | None


def weight_bytes(config: ModelConfig, bits: float) -> int:
    """Return the bytes of all weights if the matrices of the layers take `bits` each, and the rest 16."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    return round(tables * 2 + (config.num_parameters - tables) * bits / 8)


def format_plan(
    config: ModelConfig,
    weights: str,
    kv_name: str,
    kv: KVArithmetic,
    profile: Profile,
    *,
    memory_bytes: float,
    batch: int,
    context: int,
) -> FormatPlan:
    """Scale the profile's decode step by the bytes that it reads. memory_bytes: of a whole replica.

    The profile should be of this model: the compute per token is taken as it is.
    """
    size = weight_bytes(config, WEIGHT_BITS[weights])
    room = memory_bytes * _USABLE - size
    timing, known = profile.decode_timing, profile.weight_bytes

    def tokens_s(sequences: int) -> float | None:
        if known is None:
            return None
        weights_s = timing.base_s * size / known
        context_s = timing.context_s * kv.bytes_per_token / profile.kv.bytes_per_token
        return sequences / (weights_s + sequences * (timing.token_s + context * context_s))

    return FormatPlan(
        weights=weights,
        kv=kv_name,
        weight_bytes=size,
        kv_bytes_per_token=kv.bytes_per_token,
        tokens=int(room // kv.bytes_per_token) if room > 0 else None,
        tokens_s=tokens_s(1),
        batch_tokens_s=tokens_s(batch),
    )


def formats_table(plans: list[FormatPlan], *, batch: int) -> list[list[str]]:
    """Return the rows of the report, the first with titles."""
    rows = [["WEIGHTS", "KV", "WEIGHTS GiB", "KV BYTES/TOKEN", "KV TOKENS THAT FIT", "TOKENS/s", f"AT BATCH {batch}"]]
    for plan in plans:
        fit = "weights do not fit" if plan.tokens is None else f"{plan.tokens:,}"
        speeds = ["-" if speed is None else f"{speed:,.0f}" for speed in (plan.tokens_s, plan.batch_tokens_s)]
        sizes = [f"{plan.weight_bytes / 2**30:.2f}", f"{plan.kv_bytes_per_token:,}", fit]
        rows.append([plan.weights, plan.kv, *sizes, *speeds])
    return rows
