"""Speed of packing, unpacking and checksumming KV for the wire: our CPU kernels compared with torch operations.

    python -m benchmarks.kv.wire_kernels

GB/s of bf16 KV (of payload bytes for the checksum): one layer of 5,461 tokens, 3 heads of 64 (SmolLM2, 4 MiB), in CPU
time of one thread, which stays comparable on a busy machine. Best of twenty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from core.model.kv_memory import QUANTIZED
from engine.kernels.kv_wire import pack_kv, reference_pack_kv, reference_unpack_kv, unpack_kv
from engine.kernels.quant.row_quantization import SCALES, quantize_rows
from engine.kv.checksum import checksum
from engine.kv.layout import DTYPES

_HEADS, _HEAD_DIM, _BLOCK_SIZE = 3, 64, 16
_NUM_BYTES = 4 << 20
_NUM_TOKENS = _NUM_BYTES // (2 * _HEADS * _HEAD_DIM * 2)
_TRIES = 20


def main() -> None:
    torch.set_num_threads(1)
    for wire, dtype in ({"raw": "bfloat16"} | QUANTIZED).items():
        print(json.dumps({"wire": wire, "gb_s": _rates(DTYPES[dtype])}), flush=True)
    payload = torch.randint(0, 256, (_NUM_BYTES,), dtype=torch.uint8)
    copy = torch.empty_like(payload)
    print(
        json.dumps({"checksum_gb_s": _rate(lambda: checksum(payload)), "copy_gb_s": _rate(lambda: copy.copy_(payload))})
    )


def _rates(dtype: torch.dtype) -> dict[str, float]:
    """Measure packing to and unpacking from a payload of this dtype."""
    heads, slots_T = slice(0, _HEADS), torch.arange(_NUM_TOKENS)
    pool = torch.randn(-(-_NUM_TOKENS // _BLOCK_SIZE), 2, _HEADS, _BLOCK_SIZE, _HEAD_DIM).bfloat16()
    rows = torch.randn(_NUM_TOKENS, 2, _HEADS, _HEAD_DIM)
    codes, scales = quantize_rows(rows, dtype) if dtype in SCALES else (rows.to(dtype), None)
    return {
        "pack": _rate(lambda: pack_kv(pool, slots_T, heads, codes, scales)),
        "pack, torch": _rate(lambda: reference_pack_kv(pool, slots_T, heads, codes, scales)),
        "unpack": _rate(lambda: unpack_kv(codes, scales, pool, slots_T, heads)),
        "unpack, torch": _rate(lambda: reference_unpack_kv(codes, scales, pool, slots_T, heads)),
    }


def _rate(work: Callable[[], object]) -> float:
    """Return the GB/s of work that passes over _NUM_BYTES."""

    def once() -> float:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin

    once()
    return round(_NUM_BYTES / min(once() for _ in range(_TRIES)) / 1e9, 2)


if __name__ == "__main__":
    main()
