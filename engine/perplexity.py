"""What quantisation costs in quality: perplexity over strided windows of a text, for each place where bits are saved.

    window   |------ context ------|------ scored ------|      the next window begins `stride` tokens later, so that
                                    <---- stride ----->        every token is scored once, behind at least a context

The context is computed as a prefill replica would, and its KV travels as the wire would carry it; the scored part is
computed behind it, as a decode replica would after a migration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from cluster.errors import SpecError
from engine.batch import Batch, Row
from engine.kernels.wire import pack_kv, unpack_kv
from engine.kv_pool import KVPool
from engine.runner import ModelRunner, layout_for

# T tokens of a part, K kv heads, D head_dim, V vocabulary

_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is in how many bits; the defaults save nothing."""

    model_dir: Path
    pool_dtype: str = "auto"
    wire_dtype: str = "raw"


def compare(
    settings: dict[str, Setting], text: str, *, dtype: str, window: int, stride: int, max_windows: int
) -> dict[str, Any]:
    """Perplexity of each setting, and its distance from the first in per cent; plain JSON values. Raises SpecError."""
    if not 0 < stride < window:
        raise SpecError(f"--stride {stride}: must be above 0 and below --window {window}")
    rows: list[dict[str, Any]] = []
    for name, setting in settings.items():
        windows = _windows(setting.model_dir, text, window, stride, max_windows)
        loss, count = _loss(setting, windows, dtype=dtype, context=window - stride)
        perplexity = math.exp(loss / count)
        baseline = rows[0]["perplexity"] if rows else perplexity
        difference = 100 * (perplexity / baseline - 1)
        rows.append({"setting": name, "perplexity": perplexity, "difference_percent": difference, "tokens": count})
    return {"window": window, "stride": stride, "dtype": dtype, "results": rows}


def _windows(model_dir: Path, text: str, window: int, stride: int, max_windows: int) -> list[list[int]]:
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, stride)][:max_windows]
    if not windows:
        raise SpecError(f"the text has {len(ids)} tokens, which do not fill one window of {window}")
    return windows


def _loss(setting: Setting, windows: list[list[int]], *, dtype: str, context: int) -> tuple[float, int]:
    """The sum of the scored tokens' negative log likelihoods, and how many they are."""
    layout = layout_for(setting.model_dir, dtype=dtype, pool_dtype=setting.pool_dtype, block_size=_BLOCK_SIZE)
    num_blocks = -(-len(windows[0]) // _BLOCK_SIZE)
    runner = ModelRunner(
        setting.model_dir,
        layout=layout,
        num_blocks=num_blocks,
        dtype=getattr(torch, dtype),
        device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
    )
    total, count = 0.0, 0
    for ids in windows:
        first = _logits(runner, ids, 0, context, last_only=True)
        if setting.wire_dtype != "raw" and not layout.has_scales:
            _send_and_receive(runner.pool, context)
        logits_TV = torch.cat((first, _logits(runner, ids, context, len(ids) - 1, last_only=False)))
        total += float(
            F.cross_entropy(logits_TV, torch.tensor(ids[context:], device=logits_TV.device), reduction="sum")
        )
        count += len(logits_TV)
    return total, count


def _logits(runner: ModelRunner, ids: list[int], start: int, end: int, *, last_only: bool) -> Tensor:
    """Of the positions [start, end), or of the last of them."""
    row = Row(token_ids=ids[start:end], start=start, blocks=range(runner.pool.num_blocks), wants_logits=True)
    batch = Batch.of([row], block_size=_BLOCK_SIZE)
    return runner.forward(batch if last_only else replace(batch, logits_rows=np.arange(end - start)))


def _send_and_receive(pool: KVPool, num_tokens: int) -> None:
    """Put the pool's first positions through an FP8 wire and back."""
    layout, heads = pool.layout, slice(0, pool.layout.heads_per_rank)
    slots_T = torch.arange(num_tokens, device=pool.device)
    shape = (num_tokens, layout.num_sides, layout.heads_per_rank)
    codes = torch.empty(*shape, layout.head_dim + layout.exact_dim, dtype=torch.float8_e4m3fn, device=pool.device)
    scales = torch.empty(shape, dtype=torch.bfloat16, device=pool.device)
    for layer in pool.codes:
        pack_kv(layer, slots_T, heads, codes, scales)
        unpack_kv(codes, scales, layer, slots_T, heads)


def settings_for(model_dir: Path, others: Iterable[tuple[str, Path]]) -> dict[str, Setting]:
    """The baseline, each saving by itself, and all together. others: name and directory of quantised checkpoints."""
    settings = {
        "baseline": Setting(model_dir=model_dir),
        "pool fp8": Setting(model_dir=model_dir, pool_dtype="fp8_e4m3"),
        "wire fp8": Setting(model_dir=model_dir, wire_dtype="fp8_e4m3"),
    }
    for name, directory in others:
        settings[f"weights {name}"] = Setting(model_dir=directory)
        settings[f"weights {name}, pool and wire fp8"] = Setting(
            model_dir=directory, pool_dtype="fp8_e4m3", wire_dtype="fp8_e4m3"
        )
    return settings
