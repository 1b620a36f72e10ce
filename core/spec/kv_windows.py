"""Decision whether replicas free the KV that a layer's attention window no longer reaches."""

from __future__ import annotations

from core.model.kv_memory import WindowArithmetic
from core.model.shape import ModelConfig
from core.spec.schema import Spec

# The largest window, in tokens, for which a pool is divided by the context in the model's config. Llama 4's allows 10
# million tokens with a window of 8,192: a pool divided for such contexts would hold few sequences of usual lengths.
_LARGE = 4096


def window_arithmetic(
    spec: Spec, model: ModelConfig, *, block_size: int, max_batch_tokens: int
) -> WindowArithmetic | None:
    """Return how a replica divides its pool; None if layers with a window keep KV for whole contexts.

    max_batch_tokens: of a step.
    """
    if why_windows_stay(spec, model):
        return None
    return WindowArithmetic(
        window=max(model.kv_windows),
        block_size=block_size,
        max_context=min(spec.model.max_context or model.max_context, model.max_context),
        max_batch_tokens=max_batch_tokens,
    )


def why_windows_stay(spec: Spec, model: ModelConfig) -> str | None:
    """Return why layers with a window keep KV for whole contexts; None if they free it.

    The decision is the same for all replicas of a deployment, because a handoff leaves out what is freed.
    """
    pools = (spec.prefill, spec.decode)
    longest = min(spec.model.max_context or model.max_context, model.max_context)
    window = max(model.kv_windows, default=0)
    if not window:
        return "no layer has an attention window"
    if longest <= window:
        return f"contexts of {longest} tokens are not longer than the window of {window}"
    if window > _LARGE and not spec.model.max_context:
        return f"the window of {window} tokens is large, and model.max_context is not set"
    if model.recurrent_layers:
        return "states of recurrent layers and parts of blocks are not kept together"
    if all(model.kv_windows) and any(pool.kv_host_gib or pool.kv_disk_gib for pool in pools):
        return "lower tiers keep a block by its layers without a window, and every layer has one"
    return None
