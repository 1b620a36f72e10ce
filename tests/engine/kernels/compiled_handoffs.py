"""Program: runs handoffs between replicas of every tensor-parallel degree on an absent GPU, and prints the launches as
JSON, with those compiled after the warm-up.

python -m tests.engine.kernels.compiled_handoffs 9.0 bfloat16/fp8_e4m3/1 int8/raw/2 …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu

import torch

from engine.kv.checksum import launch_word_sum
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.transfer.codec import Codec, codec_for, slots_of
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.protocol.segment import Segment
from tests.engine.kernels.compiled_steps import without_numbers
# ruff: isort: on

_DEGREES, _BLOCK_SIZE = (1, 2, 4, 8, 16), 16
# KV heads and head_dim of each layer.
_LAYERS = ((8, 128), (8, 128), (2, 256))


def main() -> None:
    capability = tuple(int(number) for number in sys.argv[1].split("."))
    without_numbers()
    for case in sys.argv[2:]:
        dtype, wire_dtype, degree = case.split("/")
        layout = KVLayout(
            model="",
            num_layers=len(_LAYERS),
            num_kv_heads=tuple(num_heads for num_heads, _ in _LAYERS),
            head_dim=tuple(dim for _, dim in _LAYERS),
            block_size=_BLOCK_SIZE,
            dtype=dtype,
            tensor_parallel=int(degree),
        )
        with absent_gpu(capability, disassembles=False) as launches:
            codec, pool = codec_for(layout, wire_dtype), KVPool(layout, num_blocks=8, device=DEVICE)
            codec.warm_up(DEVICE)
            warm = len(launches)
            runs = set(runs_of_heads(layout))
            for heads in runs:
                for num_tokens in (51, 64):
                    hand_over(codec, pool, heads, num_tokens)
        print(
            json.dumps(
                {
                    "case": case,
                    "runs": sorted({(heads.start, len(heads)) for run in runs for heads in run if heads}),
                    "launches": [asdict(launch) for launch in launches],
                    "late": [launch.name for launch in launches[warm:]],
                }
            ),
            flush=True,
        )


def runs_of_heads(layout: KVLayout) -> Iterator[tuple[range, ...]]:
    """Yield the heads of each layer that a rank exchanges with a rank of a replica of another degree."""
    for degree in _DEGREES:
        peer = replace(layout, tensor_parallel=degree)
        yield from (copy.sender_heads for copy in plan_heads(sender=layout, receiver=peer))
        yield from (copy.receiver_heads for copy in plan_heads(sender=peer, receiver=layout))


def hand_over(codec: Codec, pool: KVPool, heads: tuple[range, ...], num_tokens: int) -> None:
    segment = Segment(first_layer=0, num_layers=len(_LAYERS), first_token=7, num_tokens=num_tokens)
    slots = slots_of(pool, range(8), 7, num_tokens)
    payload = torch.empty(codec.num_bytes(segment, heads), dtype=torch.uint8, device=DEVICE)
    codec.pack(pool, segment, heads, slots, payload)
    launch_word_sum(payload)
    codec.unpack(payload, pool, segment, heads, slots)


if __name__ == "__main__":
    main()
