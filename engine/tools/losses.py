"""Negative log likelihoods of texts, as a pair of replicas computes them.

The context is computed as on a prefill replica, and its KV is encoded as on the wire. The scored part is computed after
it, as on a decode replica after a migration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kernels.kv_wire import pack_kv, unpack_kv
from engine.kernels.quant.row_quantization import SCALES
from engine.kv.layout import DTYPES
from engine.kv.pool import KVPool
from engine.runner.runner import ModelRunner

# W windows, T scored tokens per window, V vocabulary


def losses(runner: ModelRunner, windows: Sequence[Sequence[int]], *, context: int, wire_dtype: str = "raw") -> Tensor:
    """Return the losses of the tokens after the first `context`: (W, T) float64 on the host.

    windows: token ids, of equal length, that fit into the pool. wire_dtype: kv.wire_dtype; quantized pools ignore it.
    """
    losses_WT = []
    for ids in windows:
        first = logits_of(runner, ids, 0, context, last_only=True)
        if wire_dtype != "raw" and not runner.layout.has_scales:
            _send_and_receive(runner.pool, context, DTYPES[wire_dtype])
        logits_TV = torch.cat((first, logits_of(runner, ids, context, len(ids) - 1)))
        scored_T = torch.tensor(ids[context:], device=logits_TV.device)
        losses_WT.append(F.cross_entropy(logits_TV, scored_T, reduction="none").double().cpu())
    return torch.stack(losses_WT)


def logits_of(runner: ModelRunner, ids: Sequence[int], start: int, end: int, *, last_only: bool = False) -> Tensor:
    """Return the logits of positions [start, end), or of the last of them: (T, V) fp32."""
    num_logits = 1 if last_only else end - start
    row = Row(token_ids=list(ids[start:end]), start=start, blocks=range(runner.pool.num_blocks), num_logits=num_logits)
    return runner.forward(Batch.of([row], block_size=runner.layout.block_size))


def _send_and_receive(pool: KVPool, num_tokens: int, dtype: torch.dtype) -> None:
    """Encode the first positions of the pool in a quantized wire format and decode them in place."""
    layout = pool.layout
    slots_T = torch.arange(num_tokens, device=pool.device)
    for layer, numbers in enumerate(pool.codes):
        if layer not in layout.plain_layers:
            num_heads = layout.heads[layer].num_heads
            shape, heads = (num_tokens, layout.num_sides, num_heads), slice(0, num_heads)
            codes = torch.empty(*shape, layout.row_dim_of(layer, dtype), dtype=dtype, device=pool.device)
            scales = torch.empty(shape, dtype=SCALES[dtype], device=pool.device)
            pack_kv(numbers, slots_T, heads, codes, scales)
            unpack_kv(codes, scales, numbers, slots_T, heads)
