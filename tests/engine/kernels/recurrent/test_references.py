"""Torch references of recurrent layers equal transformers, however a sequence is cut into steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from engine.kernels.recurrent.causal_conv import reference_causal_conv
from engine.kernels.recurrent.gated_norm import reference_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence, reference_linear_recurrence
from engine.kernels.recurrent.state_slots import StateSlots
from tests.engine.kernels.pools import random
from tests.engine.kernels.recurrent.recurrent_cases import (
    MIXED,
    delta_rule,
    inputs_of,
    recurrence_states,
    slots_of,
    state_space,
    states_of,
)

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SAME_STATE = {"atol": 1e-5, "rtol": 1e-5}


def transformers_delta_rule(
    recurrence: LinearRecurrence, rows_TC: Tensor, dt_TH: Tensor, beta_TH: Tensor, state: Tensor
):
    keys = recurrence.num_key_heads * recurrence.key_dim
    parts = rows_TC.unsqueeze(0).split([keys, keys, rows_TC.shape[1] - 2 * keys], dim=-1)
    q, k, v = (
        part.unflatten(-1, (-1, width))
        for part, width in zip(parts, (recurrence.key_dim, recurrence.key_dim, recurrence.value_dim), strict=True)
    )
    g = -recurrence.rate_H * F.softplus(dt_TH + recurrence.dt_bias_H)
    rule = qwen.torch_chunk_gated_delta_rule if len(rows_TC) > 1 else qwen.torch_recurrent_gated_delta_rule
    out, last = rule(
        q,
        k,
        v,
        g=g[None],
        beta=beta_TH.sigmoid()[None],
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0]


def transformers_state_space(recurrence: LinearRecurrence, rows_TC: Tensor, dt_TH: Tensor, _: None, state: Tensor):
    keys = recurrence.num_key_heads * recurrence.key_dim
    x, b, c = rows_TC.unsqueeze(0).split([rows_TC.shape[1] - 2 * keys, keys, keys], dim=-1)
    out, last = nemotron.mamba2_chunk_scan(
        x.unflatten(-1, (-1, recurrence.value_dim)),
        dt_TH[None],
        -recurrence.rate_H,
        *(part.unflatten(-1, (-1, recurrence.key_dim)) for part in (b, c)),
        chunk_size=32,
        D=recurrence.skip_H,
        dt_bias=recurrence.dt_bias_H,
        initial_states=state.transpose(1, 2)[None],
        dt_softplus=True,
        dt_limit=(recurrence.min_dt, recurrence.max_dt),
        return_final_states=True,
    )
    return out[0], last[0].transpose(1, 2)


KINDS = [(delta_rule, transformers_delta_rule), (state_space, transformers_state_space)]


@pytest.mark.parametrize(("kind", "theirs"), KINDS)
def test_recurrence_equals_transformers(kind, theirs) -> None:
    recurrence = kind()
    slots, states = slots_of(MIXED), recurrence_states(recurrence)
    inputs, before = inputs_of(recurrence, sum(MIXED[0])), states.clone()
    out = reference_linear_recurrence(*inputs, recurrence, states, slots)
    starts = slots.query_starts_S1.tolist()
    written = set()
    for sequence, (read, write) in enumerate(zip(*MIXED[1:], strict=True)):
        first = before[read] if read >= 0 else torch.zeros_like(before[0])
        end = starts[sequence + 1]
        for kept, slot in enumerate(reversed(write)):
            rows = slice(starts[sequence], end - kept)
            expected, last = theirs(recurrence, *inputs.of(rows), first)
            torch.testing.assert_close(states[slot], last, **SAME_STATE)
            torch.testing.assert_close(out[rows], expected, **CLOSE)
            written.add(slot)
    others = [slot for slot in range(len(states)) if slot not in written]
    assert others and torch.equal(states[others], before[others])


@pytest.mark.parametrize("kind", [delta_rule, state_space])
def test_cuts_keep_the_state(kind) -> None:
    recurrence, length = kind(), 150
    inputs, whole = inputs_of(recurrence, length), recurrence_states(recurrence)
    cut = whole.clone()
    expected = reference_linear_recurrence(*inputs, recurrence, whole, StateSlots.of([length], [2], [[2]]))
    parts = []
    for start, end in ((0, 1), (1, 40), (40, 57), (57, 58), (58, length)):
        slots = StateSlots.of([end - start], [2], [[2]])
        parts.append(reference_linear_recurrence(*inputs.of(slice(start, end)), recurrence, cut, slots))
    torch.testing.assert_close(torch.cat(parts), expected, **CLOSE)
    torch.testing.assert_close(cut, whole, **SAME_STATE)


@pytest.mark.parametrize("kind", [delta_rule, state_space])
def test_strong_decays_stay_exact(kind) -> None:
    """Sums of large decays would lose the small ones beside them in fp32."""
    recurrence = kind()
    inputs = inputs_of(recurrence, 64)
    inputs.dt_TH[::7] = 80.0
    inputs.dt_TH[1::7] = -9.0
    whole = recurrence_states(recurrence)
    single = whole.clone()
    out = reference_linear_recurrence(*inputs, recurrence, whole, StateSlots.of([64], [1], [[1]]))
    slots = StateSlots.of([1], [1], [[1]])
    for token in range(64):
        one = reference_linear_recurrence(*inputs.of(slice(token, token + 1)), recurrence, single, slots)
        torch.testing.assert_close(out[token : token + 1], one, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, single, **SAME_STATE)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activates", [True, False])
def test_conv_equals_transformers(width: int, activates: bool) -> None:
    channels, slots = 37, slots_of(MIXED)
    x_TC, weight_WC, bias_C = random(sum(MIXED[0]), channels), random(width, channels, seed=1), random(channels, seed=2)
    bias = bias_C if activates else None
    states = states_of(width - 1, channels)
    before = states.clone()
    out = reference_causal_conv(x_TC, weight_WC, bias, states, slots, activates=activates)
    starts = slots.query_starts_S1.tolist()
    for sequence, (read, write) in enumerate(zip(*MIXED[1:], strict=True)):
        if starts[sequence] == starts[sequence + 1]:
            continue
        state = (before[read] if read >= 0 else torch.zeros_like(before[0])).T[None].clone()
        for token in range(starts[sequence], starts[sequence + 1]):
            column = x_TC[token, :, None][None]
            activation = "silu" if activates else None
            expected = qwen.causal_conv1d_update(column, state, weight_WC.T, bias, activation)
            torch.testing.assert_close(out[token], expected[0, :, 0], atol=1e-5, rtol=1e-5)
            kept = token - starts[sequence + 1] + len(write)
            if kept >= 0:
                assert torch.equal(states[write[kept]], state[0].T)


def test_norms_equal_transformers() -> None:
    x, z = random(5, 3, 20), random(5, 3, 20, seed=1)
    after, before = qwen.Qwen3NextRMSNormGated(20, eps=1e-5), nemotron.NemotronHRMSNormGated(60, 20, eps=1e-5)
    for norm in (after, before):
        torch.nn.init.normal_(norm.weight)
    ours = reference_gated_rms_norm(x, z, after.weight.detach().view(1, 20), 1e-5, gates_first=False)
    torch.testing.assert_close(ours, after(x, z))
    ours = reference_gated_rms_norm(x, z, before.weight.detach().view(3, 20), 1e-5, gates_first=True)
    torch.testing.assert_close(ours.flatten(1), before(x.flatten(1), z.flatten(1)))
