"""Speed of every kernel relative to the device's limits: python -m tests.gpu_check.kernels [products] [--rehearse]

A rehearsal compiles the kernels for an absent device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tests.gpu_check.rows import skip, tell

# Fraction of the copy bandwidth or of the matrix product rate, by names of benchmarks.engine.kernels.
_LEAST = {
    r"(write_kv|pack|unpack) \S+": 0.8,
    r"(add_rms_norm|rotate|gated_mul)": 0.85,
    r"decode_attention \S+": 0.85,
    r"decode_attention unlike \S+": 0.85,
    r"decode_attention of \d+ \S+": 0.8,
    r"prefill_attention \S+": 0.6,
    r"latent_decode 16 heads": 0.85,
    r"fused_experts decode": 0.85,
    r"latent_prefill bf16": 0.6,
}
# Speed of low-bit products at 1 to 64 rows, relative to bf16.
_LEAST_RATIO = 1.6


def main() -> None:
    if "--rehearse" in sys.argv:
        _rehearse()
        return
    from benchmarks.engine.kernels import Rates, device_seconds, measured_kernels
    from benchmarks.engine.products import bench_products

    device = torch.device("cuda", 0)
    rates = Rates.of(device)
    tell("copy", rates.copy_bytes_s / 1e9, "GB/s")
    tell("bf16 product", rates.flops_s / 1e12, "TFLOP/s")
    if "products" in sys.argv:
        for row in bench_products(device, device_seconds, rates.copy_bytes_s):
            tell(f"{row['name']}: of the copy", row["share"], "")
            tell(row["name"], row["ratio"], "x bf16", at_least=least_ratio(row["name"]))
    else:
        _say(measured_kernels(device, rates))
        _say_flashinfer(device, device_seconds)


def least_ratio(name: str) -> float | None:
    """Return the threshold for a row of benchmarks.engine.products; None for as many rows as a prompt has."""
    rows = re.search(r" (\d+)$", name)
    is_few = int(rows[1]) <= 64 if rows else not name.endswith("prefill")
    return _LEAST_RATIO if is_few else None


def _say(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        least = next((least for name, least in _LEAST.items() if re.fullmatch(name, row["name"])), None)
        unit = f"of the {'copy' if 'gb_s' in row else 'product'}, {row['microseconds']:.0f} us"
        tell(row["name"], row["share"], unit, at_least=least)


def _say_flashinfer(device: torch.device, seconds: Any) -> None:
    """Report FlashInfer's speed for a prompt with Llama 3 8B's heads, for comparison."""
    if find_spec("flashinfer") is None:
        skip("FlashInfer", "not installed")
        return
    from engine.attention.flashinfer_heads import FlashInfer, prompt_seconds
    from engine.kv.layout import KVLayout
    from engine.kv.pool import KVPool

    layout = KVLayout(model="m", num_layers=1, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    pool, options = KVPool(layout, num_blocks=512, device=device), {"num_q_heads": 32, "dtype": torch.bfloat16}
    theirs = FlashInfer(import_module("flashinfer"), pool, **options)
    ours_s, theirs_s = prompt_seconds(theirs, pool, **options, seconds=seconds)
    tell("a prompt by FlashInfer", ours_s / theirs_s, f"x ours, {theirs_s * 1e6:.0f} us")


def _rehearse() -> None:
    from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu  # isort: skip  # before any import of Triton
    from benchmarks.engine.kernels import Rates, copies, elementwise, measured_kernels

    def seconds(run: Any) -> float:
        run()
        return 1e-9

    with absent_gpu((9, 0)) as launches:
        _say(measured_kernels(DEVICE, Rates(1.0, 1.0), groups=(copies, elementwise), seconds=seconds))
        tell("kernels compiled", len(launches))


if __name__ == "__main__":
    main()
