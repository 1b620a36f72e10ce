"""The steps of all chains at once are those of each chain by itself, token by token, as an engine drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from core.model import config as model_config
from engine.attention.rotary import Rotary
from engine.training.eagle_head import Chain, EagleHead, Rotation
from engine.training.teacher import Teacher
from tests.engine.steps import prompts
from tests.engine.tiny_models import MakeModel

_STEPS = 3


@pytest.fixture(scope="module")
def made(tiny_model: MakeModel) -> tuple[Path, PreTrainedModel]:
    return tiny_model("llama")


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotated(x_ND: Tensor, position: int, theta: float) -> Tensor:
    half = x_ND.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones(half), angles)
    pairs = torch.complex(x_ND[..., :half], x_ND[..., half:]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


@pytest.mark.parametrize("first", [0, 3])
def test_chains_at_once_equal_chains_one_by_one(made: tuple[Path, PreTrainedModel], first: int) -> None:
    """The reference has a list of keys and values, and one token at a time: written from the paper's definition."""
    config = model_config.load(made[0])
    torch.manual_seed(1)
    head = EagleHead(config, draft_vocab_size=64)
    weight = {name: parameter.detach() for name, parameter in head.named_parameters()}
    for name in weight:
        if "norm" in name:
            torch.nn.init.normal_(weight[name], mean=1.0, std=0.3)
    num_tokens, hidden, dim = 9, config.hidden_size, config.head_dim
    fused = torch.randn(1, num_tokens, 3 * hidden)
    embedded = torch.randn(1, num_tokens, hidden)
    rotary = Rotary(config, torch.device("cpu"))

    def slot(
        g: Tensor, token: int, position: int, before: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        layer, eps = "midlayer.", config.rms_norm_eps
        x = torch.cat(
            (
                _rms(embedded[0, token], weight[layer + "input_layernorm.weight"], eps),
                _rms(g, weight[layer + "hidden_norm.weight"], eps),
            )
        )
        q, k, v = ((weight[f"{layer}self_attn.{name}_proj.weight"] @ x).view(-1, dim) for name in "qkv")
        q, k = _rotated(q, position, config.rope_theta), _rotated(k, position, config.rope_theta)
        kept = [*before, (k, v)]
        keys = torch.stack([key for key, _ in kept]).repeat_interleave(len(q) // len(k), 1)  # (slots, heads, dim)
        values = torch.stack([value for _, value in kept]).repeat_interleave(len(q) // len(k), 1)
        shares = torch.einsum("hd,shd->hs", q, keys).div(dim**0.5).softmax(-1)
        attended = torch.einsum("hs,shd->hd", shares, values).flatten()
        y = g + weight[layer + "self_attn.o_proj.weight"] @ attended
        n = _rms(y, weight[layer + "post_attention_layernorm.weight"], eps)
        gate, up, down = (weight[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return y + down @ (F.silu(gate @ n) * (up @ n)), (k, v)

    expected = torch.zeros(_STEPS, num_tokens, hidden)
    own: list[tuple[Tensor, Tensor]] = []  # of slots whose features are known
    for begin in range(num_tokens):
        known = torch.zeros(hidden) if begin == 0 else weight["fc.weight"] @ fused[0, begin - 1]
        a, kept = slot(known, begin, begin, own)
        own.append(kept)
        guessed, expected[0, begin] = list(own), a
        for step in range(1, min(_STEPS, num_tokens - begin)):
            a, kept = slot(a, begin + step, begin + step, guessed)
            guessed.append(kept)
            expected[step, begin] = a

    with torch.no_grad():
        g, chain = head.fuse(fused), None
        for step in range(_STEPS):
            begin = first if step else 0
            rotation: Rotation = rotary(torch.arange(begin, num_tokens) + step, torch.float32)
            later = F.pad(embedded[:, step:], (0, 0, 0, step))[:, begin:]
            g, chain = _step(head, g, later, rotation, chain, first - begin)
            shown = num_tokens - step
            torch.testing.assert_close(g[0, : shown - first], expected[step, first:shown], rtol=1e-4, atol=1e-4)


def _step(
    head: EagleHead, g: Tensor, embedded: Tensor, rotation: Rotation, chain: Chain | None, first: int
) -> tuple[Tensor, Chain]:
    return head.step(g, embedded, rotation, chain, first=first)


def test_features_are_transformers_hidden_states(made: tuple[Path, PreTrainedModel]) -> None:
    """After 2, half, and all but 3 of the layers, and after all; of texts side by side, each by itself."""
    directory, model = made
    teacher = Teacher(directory)
    texts = prompts(21, 9)
    for tokens, found in zip(texts, teacher.features(texts), strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        wanted = torch.cat([hidden[layer][0] for layer in teacher.layers], dim=-1)
        # bfloat16, over layers of numbers as large as these
        assert (found.fused_TE3.float() - wanted).norm() / wanted.norm() < 0.03
        assert (found.last_TE.float() - hidden[-1][0]).norm() / hidden[-1][0].norm() < 0.06
