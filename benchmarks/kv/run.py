"""Throughput of the KV path on this machine, and the share of it that a prompt's computation hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kv.carried import send_over_link, send_over_tcp
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.backends import backend_for
from kvtransfer.profile.near_side import NearSide
from kvtransfer.profile.shipped_prompts import ShippedPrompts, copy_in_memory

# The best counts: the cost of an undisturbed message.
_NUM_TRIES = 5
_HEADS, _HEAD_DIM = 8, 128
_MOST_BYTES, _MOST_MESSAGES = 128 << 20, 512  # of one measurement


def bench_kv(
    model_dir: Path,
    *,
    dtype: str,
    wire_dtype: str,
    host_link: str,
    encrypt: bool = False,
    messages: Sequence[int],
    prompts: Sequence[int],
    threads: int,
) -> dict[str, Any]:
    """Measure between two processes on the CPU. Returns plain JSON values.

    encrypt: encrypt the link, which must be tcp. messages: sizes in bytes. prompts: lengths in tokens. threads: those
    of the process that computes prompts. Raises SpecError.
    """
    torch.set_num_threads(threads)
    host_link = backend_for(torch.device("cpu"), host_link=host_link)
    with NearSide(is_encrypted=encrypt, far="benchmarks.kv.far_side") as near:
        of = {"dtype": dtype, "wire_dtype": wire_dtype, "backend": host_link}
        return {
            "messages": [_carry(near, num_bytes, host_link) for num_bytes in messages],
            "prompts": ShippedPrompts(near, model_dir, **of, most=max(prompts)).measure(prompts) if prompts else [],
            "model": model_dir.name,
            "dtype": dtype,
            "wire_dtype": wire_dtype,
            "host_link": host_link,
            "encrypt": encrypt,
            "threads": threads,
        }


def _carry(near: NearSide, num_bytes: int, backend: str) -> dict[str, Any]:
    """Return the GB/s of each path at one message size."""
    count = min(_MOST_MESSAGES, max(4, _MOST_BYTES // num_bytes))
    seconds = {
        "memcpy": _best(lambda: copy_in_memory(num_bytes=num_bytes, count=count)),
        "tcp": _best(lambda: send_over_tcp(near, num_bytes=num_bytes, count=count)),
        "tcp_ring": _best(lambda: send_over_tcp(near, num_bytes=num_bytes, count=count, num_buffers=2)),
        "wire": _best(lambda: send_over_link(near, backend, num_bytes=num_bytes, count=count)),
        "raw": _best(_handoff(near, "raw", backend, num_bytes, count)),
        "fp8": _best(_handoff(near, "fp8_e4m3", backend, num_bytes, count)),
    }
    rates = {f"{name}_gb_s": round(num_bytes * count / s / 1e9, 4) for name, s in seconds.items()}
    shares = {f"wire_of_{name}": round(seconds[name] / seconds["wire"], 3) for name in ("tcp", "tcp_ring")}
    return {"bytes": num_bytes, **rates, **shares}


def _best(measure: Callable[[], float]) -> float:
    # The first run touches new memory.
    measure()
    return min(measure() for _ in range(_NUM_TRIES))


def _handoff(near: NearSide, wire_dtype: str, backend: str, num_bytes: int, count: int) -> Callable[[], float]:
    """Return a function that times one transfer from pool to pool: pack, send, check, unpack, acknowledge.

    A message is a layer.
    """
    row_bytes = 2 * _HEADS * (_HEAD_DIM * 2 if wire_dtype == "raw" else _HEAD_DIM + 2)
    num_tokens = num_bytes // row_bytes
    layout = KVLayout(
        model="none", num_layers=count, num_kv_heads=_HEADS, head_dim=_HEAD_DIM, block_size=16, dtype="bfloat16"
    )
    pool = KVPool(layout, num_blocks=-(-num_tokens // layout.block_size), device=torch.device("cpu"))
    for codes in pool.codes:
        codes.fill_(1.5)
    sender = near.sender(pool, wire_dtype=wire_dtype, backend=backend, group_bytes=1)

    def carry() -> float:
        transfer = sender.begin(num_tokens)
        for layer in range(layout.num_layers):
            transfer.layer_ready(layer, 0, num_tokens)
        transfer.commit(num_tokens, [1])
        shipment, _ = sender.finish(transfer)
        return shipment.seconds * num_bytes * count / shipment.wire_bytes

    return carry
