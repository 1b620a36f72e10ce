"""Program: runs recurrent layers' kernels at the widths of public models on an absent GPU, and prints the launches.

python -m tests.engine.kernels.compiled_recurrent 9.0 qwen3_next nemotron_h …
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu

import torch

from engine.kernels.recurrent.causal_conv import launch_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence, launch_linear_recurrence
from engine.kernels.recurrent.state_slots import StateSlots
# ruff: isort: on

# Key heads, heads, features of keys and of values.
WIDTHS = {"qwen3_next": (16, 32, 128, 128), "nemotron_h": (8, 64, 128, 64)}
NUM_SLOTS, WIDTH = 8, 4
# Tokens of the longest sequence: a decode step, a draft and a prompt.
LENGTHS = (1, 4, 3000)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def take_steps(name: str) -> None:
    dtype = torch.bfloat16
    key_heads, heads, key_dim, value_dim = WIDTHS[name]
    is_delta = name == "qwen3_next"
    recurrence = LinearRecurrence(
        key_heads,
        heads,
        key_dim,
        value_dim,
        rate_H=empty(heads),
        dt_bias_H=empty(heads),
        is_delta=is_delta,
        skip_H=None if is_delta else empty(heads),
    )
    channels = 2 * key_heads * key_dim + heads * value_dim
    conv_states, states = (
        empty(NUM_SLOTS, WIDTH - 1, channels, dtype=dtype),
        empty(NUM_SLOTS, heads, key_dim, value_dim),
    )
    for length in LENGTHS:
        tokens = 2 * length
        slots = StateSlots(*(empty(size, dtype=torch.int64) for size in (3, 2, tokens)), max_query_len=length)
        rows = empty(tokens, channels, dtype=dtype)
        gates = empty(tokens, 2 * heads, dtype=dtype).chunk(2, dim=-1)
        rows = launch_causal_conv(rows, empty(WIDTH, channels), empty(channels), conv_states, slots)
        out = launch_linear_recurrence(rows, gates[0], gates[1] if is_delta else None, recurrence, states, slots)
        groups = heads if is_delta else key_heads
        out = out.view(tokens, groups, -1)
        weight = empty(1 if is_delta else groups, out.shape[-1])
        launch_gated_rms_norm(out, torch.empty_like(out), weight, 1e-6, gates_first=not is_delta)


def main() -> None:
    capability = tuple(int(number) for number in sys.argv[1].split("."))
    for name in sys.argv[2:]:
        with absent_gpu(capability) as launches:
            take_steps(name)
        print(json.dumps({"case": name, "launches": [asdict(launch) for launch in launches]}), flush=True)


if __name__ == "__main__":
    main()
