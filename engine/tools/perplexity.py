"""Quality cost of quantization: perplexity over strided windows of a text, for each quantized part.

    window   |------ context ------|------ scored ------|      the next window begins `stride` tokens later, so that
                                    <---- stride ----->        every token is scored once, after a full context

Settings are compared token by token: the cost of a setting is the mean difference from the baseline, which has far less
noise than either perplexity. The standard error is computed over window means, because tokens of a window correlate.

The context is computed as on a prefill replica, and its KV is encoded as on the wire. The scored part is computed after
it, as on a decode replica after a migration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from core.model import config as model_config
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kernels.kv_wire import pack_kv, unpack_kv
from engine.kernels.quant.row_quantization import SCALES
from engine.kv.layout import DTYPES, QUANTIZED
from engine.kv.pool import KVPool
from engine.runner.runner import ModelRunner
from engine.weights.open_checkpoint import is_quantized

# W windows, T scored tokens per window, K kv heads, D head_dim, V vocabulary

_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Numeric format of each part; the defaults quantize nothing."""

    model_dir: Path
    # One of engine.layers.shards.WEIGHTS.
    weights: str = "as_stored"
    pool_dtype: str = "auto"
    wire_dtype: str = "raw"
    # Layers of neither, negative ones from the end.
    unquantized_layers: tuple[int, ...] = ()


def compare(
    settings: dict[str, Setting], text: str, *, dtype: str, window: int, stride: int, max_windows: int
) -> dict[str, Any]:
    """Return the perplexity of each setting and its difference from the first in per cent, as plain JSON values.

    `standard_error_percent` belongs to the difference; twice that on either side is a 95 % interval. Raises SpecError.
    """
    if not 0 < stride < window:
        raise SpecError(f"--stride {stride}: must be above 0 and below --window {window}")
    rows: list[dict[str, Any]] = []
    baseline_WT: Tensor | None = None
    for name, setting in settings.items():
        windows = _windows(setting.model_dir, text, window, stride, max_windows)
        losses_WT = _losses(setting, windows, dtype=dtype, context=window - stride)
        baseline_WT = losses_WT if baseline_WT is None else baseline_WT
        rows.append({"setting": name, **_figures(losses_WT, baseline_WT)})
    return {"window": window, "stride": stride, "dtype": dtype, "results": rows}


def _figures(losses_WT: Tensor, baseline_WT: Tensor) -> dict[str, Any]:
    difference_W = (losses_WT - baseline_WT).mean(dim=1)
    ratio = math.exp(float(difference_W.mean()))
    error = float(difference_W.std()) / math.sqrt(len(difference_W)) if len(difference_W) > 1 else math.nan
    return {
        "perplexity": math.exp(float(losses_WT.mean())),
        "difference_percent": 100 * (ratio - 1),
        "standard_error_percent": None if math.isnan(error) else 100 * ratio * error,
        "tokens": losses_WT.numel(),
    }


def _windows(model_dir: Path, text: str, window: int, stride: int, max_windows: int) -> list[list[int]]:
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, stride)][:max_windows]
    if not windows:
        raise SpecError(f"the text has {len(ids)} tokens, fewer than one window of {window}")
    return windows


def _losses(setting: Setting, windows: list[list[int]], *, dtype: str, context: int) -> Tensor:
    """Return the negative log likelihoods of the scored tokens, (W, T) float64 on the host."""
    num_blocks = -(-len(windows[0]) // _BLOCK_SIZE)
    config = EngineConfig(
        model_dir=setting.model_dir,
        dtype=dtype,
        weights=setting.weights,
        pool_dtype=setting.pool_dtype,
        unquantized_layers=setting.unquantized_layers,
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        device="cuda:0" if torch.cuda.is_available() else "cpu",
    )
    runner = ModelRunner(config)
    losses_WT = []
    for ids in windows:
        first = _logits(runner, ids, 0, context, last_only=True)
        if setting.wire_dtype != "raw" and not runner.layout.has_scales:
            _send_and_receive(runner.pool, context, DTYPES[setting.wire_dtype])
        logits_TV = torch.cat((first, _logits(runner, ids, context, len(ids) - 1, last_only=False)))
        scored_T = torch.tensor(ids[context:], device=logits_TV.device)
        losses_WT.append(F.cross_entropy(logits_TV, scored_T, reduction="none").double().cpu())
    return torch.stack(losses_WT)


def _logits(runner: ModelRunner, ids: list[int], start: int, end: int, *, last_only: bool) -> Tensor:
    """Return the logits of positions [start, end), or of the last of them."""
    num_logits = 1 if last_only else end - start
    row = Row(token_ids=ids[start:end], start=start, blocks=range(runner.pool.num_blocks), num_logits=num_logits)
    return runner.forward(Batch.of([row], block_size=_BLOCK_SIZE))


def _send_and_receive(pool: KVPool, num_tokens: int, dtype: torch.dtype) -> None:
    """Encode the first positions of the pool in a quantized wire format and decode them in place."""
    layout, heads = pool.layout, slice(0, pool.layout.heads_per_rank)
    slots_T = torch.arange(num_tokens, device=pool.device)
    shape = (num_tokens, layout.num_sides, layout.heads_per_rank)
    codes = torch.empty(*shape, layout.row_dim_of(dtype), dtype=dtype, device=pool.device)
    scales = torch.empty(shape, dtype=SCALES[dtype], device=pool.device)
    for layer, numbers in enumerate(pool.codes):
        if layer not in layout.plain_layers:
            pack_kv(numbers, slots_T, heads, codes, scales)
            unpack_kv(codes, scales, numbers, slots_T, heads)


def settings_for(model_dir: Path, others: Iterable[tuple[str, Path]]) -> dict[str, Setting]:
    """Return the baseline, each quantized part by itself, and all combined.

    others: name and directory of quantized checkpoints. A quantized `model_dir` is dequantized in the baseline and used
    as stored in a setting of its own.
    """
    settings = {"baseline": Setting(model_dir=model_dir)}
    if is_quantized(model_dir):
        settings["weights as stored"] = Setting(model_dir=model_dir, weights="quantized")
    kinds = {name: dtype for name, dtype in QUANTIZED.items() if model_config.load(model_dir).can_keep_kv(dtype)}
    for name, dtype in kinds.items():
        settings[f"pool {name}"] = Setting(model_dir=model_dir, pool_dtype=dtype)
        settings[f"wire {name}"] = Setting(model_dir=model_dir, wire_dtype=dtype)
    for weights, directory in others:
        settings[f"weights {weights}"] = Setting(model_dir=directory)
        for name, dtype in kinds.items():
            together = Setting(model_dir=directory, pool_dtype=dtype, wire_dtype=dtype)
            settings[f"weights {weights}, pool and wire {name}"] = together
    return settings
