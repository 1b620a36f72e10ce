"""GPU kernel benchmark: each kernel compared with the device's copy bandwidth or bf16 matrix product rate.

Low-bit products also have a `ratio`: their speed relative to the same product in bf16.

python -m benchmarks kernels --json
python -m benchmarks.engine.kernels              needs only torch, triton and numpy
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.products import bench_products
from core.model.kv_memory import QUANTIZED
from core.types.errors import SpecError
from engine.kernels.attention.absorb_queries import launch_absorb_queries
from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.decode_attention import launch_decode_attention, resident_programs
from engine.kernels.attention.dense_prefill import launch_dense_prefill_attention
from engine.kernels.attention.gather_rows import launch_gather_rows
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.kv_write import write_kv
from engine.kernels.attention.latent_attention import launch_latent_decode_attention, splits_of_latents
from engine.kernels.attention.prefill_attention import launch_prefill_attention
from engine.kernels.attention.queries import QueryGroups, QueryTiles, most_queries
from engine.kernels.attention.rotary import rotate
from engine.kernels.gated_mul import gated_mul
from engine.kernels.kv_wire import pack_kv, unpack_kv
from engine.kernels.moe.expert_router import launch_route, new_counters
from engine.kernels.moe.fused_experts import launch_fused_experts
from engine.kernels.moe.top_k import ChoiceRule
from engine.kernels.quant.row_quantization import quantize_rows
from engine.kernels.rms_norm import add_rms_norm
from engine.kv.layout import DTYPES

# T tokens, H query heads, K kv heads, D head_dim, S block_size: Llama 3 8B's heads

_H, _K, _D, _S = 32, 8, 128, 16
_RULE = AttentionRule(scale=_D**-0.5)
# Their bytes far exceed any cache.
_TOKENS = 65536
_ROWS, _CONTEXT = 64, 8192  # of decode
# One long row with _ROWS - 1 short ones.
_LONG_CONTEXT = 131072
_PROMPT = 8192
# A short question after a long cached text.
_SUFFIX, _PREFIX = 128, 32768
_FEW = 1, 64  # tokens of a decode step
_COPY_BYTES = 1 << 31
_MATMUL = 8192
_TRIES = 20
# About a millisecond, longer than any launch here takes.
_HEAD_START_CYCLES = 2_000_000
_QUANTIZED = {name: DTYPES[dtype] for name, dtype in QUANTIZED.items()}

# Name, function to run, its bytes or operations, "bytes" or "flops".
Case = tuple[str, Callable[[], object], float, str]
Group = Callable[[torch.device], list[Case]]
# Seconds of one run on the device.
Seconds = Callable[[Callable[[], object]], float]


def bench_kernels() -> dict[str, Any]:
    """Measure every kernel. Returns plain JSON values. Raises SpecError without a CUDA device."""
    if not torch.cuda.is_available():
        raise SpecError("python -m benchmarks kernels: this machine has no CUDA device that torch can use")
    device = torch.device("cuda", 0)
    rates = Rates.of(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "copy_gb_s": rates.copy_bytes_s / 1e9,
        "matmul_tflops": rates.flops_s / 1e12,
        "kernels": [*measured_kernels(device, rates), *bench_products(device, device_seconds, rates.copy_bytes_s)],
    }


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device."""

    copy_bytes_s: float  # read and written
    flops_s: float  # of bf16 matrix products

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        return cls(copy_rate(device), _matmul_rate(device))


def measured_kernels(
    device: torch.device, rates: Rates, *, groups: Sequence[Group] = (), seconds: Seconds | None = None
) -> Iterator[dict[str, Any]]:
    """Measure kernels one by one. `share` is relative to the copy bandwidth or the matrix product rate.

    groups: subset of GROUPS; empty: all. seconds: timer; None: device_seconds.
    """
    for group in groups or GROUPS:
        for name, run, amount, unit in group(device):
            took = (seconds or device_seconds)(run)
            peak = rates.copy_bytes_s if unit == "bytes" else rates.flops_s
            rate = {"gb_s": amount / took / 1e9} if unit == "bytes" else {"tflops": amount / took / 1e12}
            yield {"name": name, "microseconds": took * 1e6, **rate, "share": amount / took / peak}


def copy_rate(device: torch.device) -> float:
    """Return bytes per second, read plus written."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / device_seconds(lambda: target.copy_(source))


def _matmul_rate(device: torch.device) -> float:
    """Return operations per second of a large bf16 product."""
    a, b = (torch.randn(_MATMUL, _MATMUL, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * _MATMUL**3 / device_seconds(lambda: a @ b)


def device_seconds(
    run: Callable[[], object], *, tries: int = _TRIES, head_start_cycles: int = _HEAD_START_CYCLES
) -> float:
    """Return the median of several runs, after compiling and warming up.

    The device is kept busy until the host has launched a whole run, so the host's time does not count.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(tries):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(head_start_cycles)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


def _pool(num_tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    shape = (num_tokens // _S, 2, _K, _S, _D)
    kv = torch.randn(shape, device=device, dtype=torch.bfloat16)
    return (kv, None) if dtype == kv.dtype else quantize_rows(kv, dtype)


def copies(device: torch.device) -> list[Case]:
    k, v = torch.randn(2, _TOKENS, _K, _D, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(_TOKENS // _S, device=device).repeat_interleave(_S) * _S
    # Whole blocks in random order.
    slots += torch.arange(_S, device=device).repeat(_TOKENS // _S)
    bf16, _ = _pool(_TOKENS, device, torch.bfloat16)
    raw = torch.empty(_TOKENS, 2, _K, _D, device=device, dtype=torch.bfloat16)
    numbers = _TOKENS * 2 * _K * _D
    wide = 2 * numbers
    every = slice(0, _K)
    cases: list[Case] = [
        ("write_kv bf16", partial(write_kv, bf16, None, slots, k, v), 2 * wide, "bytes"),
        ("pack raw", partial(pack_kv, bf16, slots, every, raw, None), 2 * wide, "bytes"),
        ("unpack raw", partial(unpack_kv, raw, None, bf16, slots, every), 2 * wide, "bytes"),
    ]
    for kind, dtype in _QUANTIZED.items():
        pool, (codes, scales) = _pool(_TOKENS, device, dtype), quantize_rows(raw.zero_(), dtype)
        narrow = codes.nbytes + scales.nbytes
        cases += [
            (f"write_kv {kind}", partial(write_kv, *pool, slots, k, v), wide + narrow, "bytes"),
            (f"pack {kind}", partial(pack_kv, bf16, slots, every, codes, scales), wide + narrow, "bytes"),
            (f"unpack {kind}", partial(unpack_kv, codes, scales, bf16, slots, every), wide + narrow, "bytes"),
        ]
    return cases


def elementwise(device: torch.device) -> list[Case]:
    hidden, features = _H * _D, 14336
    x, update = torch.randn(2, _TOKENS, hidden, device=device, dtype=torch.bfloat16)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
    gate_up = torch.randn(_TOKENS, 2 * features, device=device, dtype=torch.bfloat16)
    cos, sin = torch.randn(2, _TOKENS, 1, _D // 2, device=device, dtype=torch.bfloat16)
    heads = x.view(_TOKENS, _H, _D)
    return [
        ("add_rms_norm", lambda: add_rms_norm(x, update, weight, 1e-5), 4 * x.nbytes, "bytes"),
        ("rotate", lambda: rotate(heads, cos, sin), 2 * x.nbytes + 2 * cos.nbytes, "bytes"),
        ("gated_mul", lambda: gated_mul(gate_up), 1.5 * gate_up.nbytes, "bytes"),
    ]


def attention(device: torch.device) -> list[Case]:
    cases: list[Case] = []
    for kind, dtype in ({"bf16": torch.bfloat16} | _QUANTIZED).items():
        codes, scales = _pool(_ROWS * _CONTEXT, device, dtype)
        q = torch.randn(max(_ROWS, _PROMPT), _H, _D, device=device, dtype=torch.bfloat16)
        blocks = torch.randperm(len(codes), device=device).int()
        key_bytes = (codes.nbytes + (0 if scales is None else scales.nbytes)) / (_ROWS * _CONTEXT)
        even = [_CONTEXT] * _ROWS
        unlike = [_LONG_CONTEXT] + [_CONTEXT // 2] * (_ROWS - 1)
        cases += [
            (f"{name} {kind}", _decode(q, codes, scales, blocks, lens), key_bytes * sum(lens), "bytes")
            for name, lens in (("decode_attention", even), ("decode_attention unlike", unlike))
        ]
        few = most_queries(_H, _K)
        run = _decode(q, codes, scales, blocks, even, num_queries=few)
        cases.append((f"decode_attention of {few} {kind}", run, key_bytes * sum(even), "bytes"))
        flops = 4 * _H * _D * _PROMPT * (_PROMPT + 1) / 2
        cases.append((f"prefill_attention {kind}", _prefill(q, codes, scales, blocks), flops, "flops"))
        flops = 4 * _H * _D * _SUFFIX * (_PREFIX + (_SUFFIX + 1) / 2)
        cases.append((f"prefill_attention suffix {kind}", _suffix(q, codes, scales, blocks), flops, "flops"))
    return cases


def latent(device: torch.device) -> list[Case]:
    """Return cases of latent attention.

    A prompt with DeepSeek-V2-Lite's heads, keys and values already expanded; and one-query rows, limited by reading
    latents with few heads (Lite's 16) and by products with many (V3's 128).
    """
    heads, nope, rope, value, latent = 16, 128, 64, 128, 512
    q, k, shared, v = (
        torch.randn(_PROMPT, *shape, device=device, dtype=torch.bfloat16)
        for shape in ((heads, nope + rope), (heads, nope), (rope,), (heads, value))
    )
    run = partial(
        launch_dense_prefill_attention,
        q,
        k,
        shared,
        v,
        tiles=QueryTiles.of(np.array([0]), np.array([_PROMPT]), np.array([_PROMPT]), device),
        firsts_R=torch.zeros(1, dtype=torch.int32, device=device),
        contexts_R=torch.tensor([_PROMPT], dtype=torch.int32, device=device),
        rule=AttentionRule(scale=(nope + rope) ** -0.5),
        out_THW=torch.empty_like(v),
    )
    flops = 2 * heads * (nope + rope + value) * _PROMPT * (_PROMPT + 1) / 2
    cases: list[Case] = [("latent_prefill bf16", run, flops, "flops")]
    pool = torch.randn(_ROWS * _CONTEXT // _S, 1, 1, _S, latent + rope, device=device, dtype=torch.bfloat16)
    tables = torch.randperm(len(pool), device=device).int().view(_ROWS, -1)
    contexts = torch.full((_ROWS,), _CONTEXT, dtype=torch.int32, device=device)
    for num_heads in (16, 128):
        decode = partial(
            launch_latent_decode_attention,
            torch.randn(_ROWS, num_heads, latent + rope, device=device, dtype=torch.bfloat16),
            pool,
            None,
            torch.randn(num_heads, value, latent, device=device, dtype=torch.bfloat16),
            scale=(nope + rope) ** -0.5,
            tables_RB=tables,
            contexts_R=contexts,
            splits=splits_of_latents(contexts, num_heads=num_heads, longest=_CONTEXT),
        )
        if num_heads == 16:
            cases.append((f"latent_decode {num_heads} heads", decode, pool.nbytes, "bytes"))
        else:
            flops = 2 * num_heads * (2 * latent + rope) * _ROWS * _CONTEXT
            cases.append((f"latent_decode {num_heads} heads", decode, flops, "flops"))
    return cases


def experts(device: torch.device) -> list[Case]:
    """Return cases of Qwen3 30B-A3B's expert layer: few tokens are limited by reading weights, many by products."""
    num_experts, per_token, hidden, features = 128, 8, 2048, 768
    shapes = (num_experts, 2 * features, hidden), (num_experts, hidden, features)
    gate_up, down = (torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5 for shape in shapes)
    cases: list[Case] = []
    for name, num_tokens in (("decode", _ROWS), ("prefill", _PROMPT)):
        x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
        chosen = torch.rand(num_tokens, num_experts, device=device).topk(per_token, dim=-1).indices
        run = partial(launch_fused_experts, x, gate_up, down, chosen)
        if name == "decode":
            weights = len(set(chosen.flatten().tolist())) * (gate_up[0].nbytes + down[0].nbytes)
            cases.append((f"fused_experts {name}", run, weights, "bytes"))
        else:
            flops = 2 * chosen.numel() * 3 * hidden * features
            cases.append((f"fused_experts {name}", run, flops, "flops"))
    return cases


def few_tokens(device: torch.device) -> list[Case]:
    """Return cases limited by the latency of memory rather than by its bandwidth.

    Routing with sorting of Qwen3 30B-A3B, and query absorption with row storage of DeepSeek-V2-Lite and V3.
    """
    cases: list[Case] = []
    rule = ChoiceRule(num_choices=8, normalizes_weights=True)
    weight = torch.randn(128, 2048, device=device, dtype=torch.bfloat16)
    nope, rope, latent = 128, 64, 512
    pool = torch.zeros(_FEW[-1], 1, 1, _S, latent + rope, device=device, dtype=torch.bfloat16)
    norm = torch.ones(latent, device=device, dtype=torch.bfloat16)
    for num_tokens in _FEW:
        x = torch.randn(num_tokens, 2048, device=device, dtype=torch.bfloat16)
        choose = partial(launch_route, x, weight, None, new_counters(device), rule, is_exact=False)
        cases.append((f"route {num_tokens}", choose, weight.nbytes, "bytes"))
        row = torch.randn(num_tokens, latent + rope, device=device, dtype=torch.bfloat16)
        cos, sin = torch.randn(2, num_tokens, 1, rope // 2, device=device, dtype=torch.bfloat16)
        slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
        for num_heads in (16, 128):
            q = torch.randn(num_tokens, num_heads, nope + rope, device=device, dtype=torch.bfloat16)
            key = torch.randn(num_heads, nope, latent, device=device, dtype=torch.bfloat16)
            stored = (q, row, norm, 1e-6, cos, sin, pool, None, slots, key)
            absorb = partial(launch_absorb_queries, *stored, is_interleaved=True)
            num_bytes = key.nbytes + q.nbytes + q.nbytes * (latent + rope) // (nope + rope)
            cases.append((f"absorb_queries {num_heads} heads {num_tokens}", absorb, num_bytes, "bytes"))
    return cases


def _decode(
    q: Tensor, codes: Tensor, scales: Tensor | None, blocks: Tensor, lens: list[int], *, num_queries: int = 1
) -> Callable[[], None]:
    """Return a decode kernel's call. num_queries: queries per row, in one group."""
    out, device = torch.empty_like(q), q.device
    contexts = torch.tensor(lens, dtype=torch.int32, device=device)
    widths = [length // _S for length in lens]
    tables = torch.zeros(len(lens), max(widths), dtype=torch.int32, device=device)
    for table, part in zip(tables, torch.split(blocks[: sum(widths)], widths), strict=True):
        table[: len(part)] = part
    tokens = torch.arange(len(lens) * num_queries, dtype=torch.int32, device=device)
    firsts, counts = tokens[::num_queries].contiguous(), torch.full_like(contexts, num_queries)
    of_query_groups = (firsts, counts, tables, contexts, tokens, tokens)
    query_groups = QueryGroups.of(of_query_groups, most=num_queries, longest=max(lens))
    resident = resident_programs(has_scales=scales is not None)
    splits = Splits.of(contexts, most=num_queries, num_heads=_K, longest=max(lens), resident=resident)
    return lambda: launch_decode_attention(
        q,
        codes,
        scales,
        query_groups=query_groups,
        rule=_RULE,
        splits=splits,
        out_THD=out,
    )


def _prefill(q: Tensor, codes: Tensor, scales: Tensor | None, blocks: Tensor) -> Callable[[], None]:
    """Return the attention of a whole prompt: keys are gathered first."""
    out, device, blocks = torch.empty_like(q), q.device, blocks[: _PROMPT // _S]
    tiles = QueryTiles.of(np.array([0]), np.array([_PROMPT]), np.array([_PROMPT]), device)
    firsts, contexts = torch.tensor([[0], [_PROMPT]], dtype=torch.int32, device=device)

    def run() -> None:
        k, v = launch_gather_rows(codes, scales, blocks, q.dtype)
        launch_dense_prefill_attention(
            q, k, None, v, tiles=tiles, firsts_R=firsts, contexts_R=contexts, rule=_RULE, out_THW=out
        )

    return run


def _suffix(q: Tensor, codes: Tensor, scales: Tensor | None, blocks: Tensor) -> Callable[[], None]:
    """Return the attention of a few queries, which reads the blocks in place."""
    q, context = q[:_SUFFIX], _PREFIX + _SUFFIX
    return partial(
        launch_prefill_attention,
        q,
        codes,
        scales,
        tiles=QueryTiles.of(np.array([0]), np.array([_SUFFIX]), np.array([context]), q.device),
        tables_RB=blocks[: context // _S].view(1, -1),
        contexts_R=torch.tensor([context], dtype=torch.int32, device=q.device),
        rule=_RULE,
        out_THD=torch.empty_like(q),
    )


GROUPS: Sequence[Group] = (copies, elementwise, attention, latent, experts, few_tokens)

if __name__ == "__main__":
    print(json.dumps(bench_kernels()))
