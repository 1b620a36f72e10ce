"""Small random heads in the published formats, and their references by the papers' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import TINY

# T tokens, E hidden_size, V vocabulary

Choice = Callable[[Tensor, int], int]  # from the logits (V,) at a place of the draft to its token

HIDDEN, HEADS, DIM, FEATURES = 48, 4, 16, 80
# Fewer than the model's, so the pool's last layer is unlike the others.
_KV_HEADS = 1
DRAFT_VOCAB = 40
THETA, EPS = 10000.0, 1e-6


def likeliest(logits_V: Tensor, place: int) -> int:
    return int(logits_V.argmax())


def write_medusa(
    directory: Path, *, num_heads: int = 4, num_residuals: int = 2, is_old: bool = True, **changes: Any
) -> dict[str, Tensor]:
    """Write the heads. Returns their tensors by their names in Medusa's own repository."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for i in range(num_heads):
        for j in range(num_residuals):
            tensors[f"{i}.{j}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.2
            tensors[f"{i}.{j}.linear.bias"] = torch.randn(HIDDEN, generator=generator) * 0.2
        tensors[f"{i}.{num_residuals}.weight"] = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_residuals, "model_type": "medusa"}
    save_heads(directory, config | changes, tensors if is_old else _as_blocks(tensors, num_residuals), old_name=is_old)
    return tensors


@torch.inference_mode()
def medusa_reference(
    model: PreTrainedModel, tensors: dict[str, Tensor], tokens: list[int], *, choose: Choice = likeliest
) -> list[int]:
    """Return the heads' draft after `tokens`: Cai et al. 2024, section 2.1.1."""
    hidden = states_of(model, tokens)[-1][-1]  # normed
    drafts = []
    i = 0
    while f"{i}.0.linear.weight" in tensors:
        x, j = hidden, 0
        while f"{i}.{j}.linear.weight" in tensors:
            x = x + F.silu(F.linear(x, tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]))
            j += 1
        drafts.append(choose(tensors[f"{i}.{j}.weight"] @ x, i))
        i += 1
    return drafts


def _eagle_shapes(
    hidden: int, heads: int, kv_heads: int, width: int, features: int, draft_vocab: int
) -> dict[str, tuple[int, int]]:
    return {
        "fc": (hidden, 3 * hidden),
        "lm_head": (draft_vocab, hidden),
        "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width),
        "midlayer.mlp.gate_proj": (features, hidden),
        "midlayer.mlp.up_proj": (features, hidden),
        "midlayer.mlp.down_proj": (hidden, features),
    }


_EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
_EAGLE_NORMS = ("norm", *(f"midlayer.{one}" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))


def write_eagle_beside(
    model: Mapping[str, Any], directory: Path, *, draft_vocab: int = DRAFT_VOCAB, dtype: torch.dtype = torch.float32
) -> None:
    """Write a random head of the size of a Llama. model: its config.json."""
    hidden, heads, vocab = model["hidden_size"], model["num_attention_heads"], model["vocab_size"]
    sizes = model["num_key_value_heads"], hidden // heads, model["intermediate_size"]
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"{name}.weight": (torch.randn(*shape, generator=generator) * shape[1] ** -0.5).to(dtype)
        for name, shape in _eagle_shapes(hidden, heads, *sizes, draft_vocab).items()
    }
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=dtype) for name in _EAGLE_NORMS}
    known = torch.arange(draft_vocab) * (vocab // draft_vocab)
    save_heads(directory, {**model, **_EAGLE, "draft_vocab_size": draft_vocab}, tensors | _choice_of(known, vocab))


def write_eagle(directory: Path, *, own_embedding: bool = False, **changes: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes: dict[str, tuple[int, ...]] = {**_eagle_shapes(HIDDEN, HEADS, _KV_HEADS, DIM, FEATURES, DRAFT_VOCAB)}
    shapes |= dict.fromkeys(_EAGLE_NORMS, (HIDDEN,)) | ({"embed_tokens": (VOCAB_SIZE, HIDDEN)} if own_embedding else {})
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=generator) * 0.3 + (1 if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }
    tensors |= _choice_of(torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values, VOCAB_SIZE)
    sizes = {"num_key_value_heads": _KV_HEADS, "draft_vocab_size": DRAFT_VOCAB}
    save_heads(directory, TINY | _EAGLE | sizes | {"rms_norm_eps": EPS, "rope_theta": THETA} | changes, tensors)
    return tensors


def _choice_of(known: Tensor, vocab: int) -> dict[str, Tensor]:
    """Return the tensors that name the tokens of the draft vocabulary."""
    t2d = torch.zeros(vocab, dtype=torch.bool).index_fill(0, known, True)
    return {"d2t": known - torch.arange(len(known)), "t2d": t2d}


def eagle_reference(
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    tokens: list[int],
    num_tokens: int,
    *,
    layers: tuple[int, ...],
    choose: Choice = likeliest,
) -> list[int]:
    """Return the head's draft after `tokens`: Li et al. 2025, section 3.1."""
    embeddings = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def logits(x_E: Tensor) -> Tensor:
        logits_V = torch.full((VOCAB_SIZE,), -1e30)
        logits_V[tensors["t2d"]] = tensors["lm_head.weight"] @ normed(x_E, tensors["norm.weight"])
        return logits_V

    with torch.inference_mode():
        states = states_of(model, tokens)
        fused_TE = F.linear(torch.cat([states[layer] for layer in layers], dim=-1), tensors["fc.weight"])
        return chained(
            fused_TE,
            lambda ids, feature_TE: _eagle_layer(tensors, embeddings[ids], feature_TE),
            logits,
            tokens,
            num_tokens,
            choose=choose,
        )


def chained(
    feature_TE: Tensor,
    layer: Callable[[Tensor, Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    tokens: list[int],
    num_tokens: int,
    *,
    choose: Choice,
) -> list[int]:
    """Return the draft of an autoregressive layer after `tokens`, computing each entry over all entries before it.

    Entry t is made of token t and the feature of t - 1, zeros at 0. layer: from token ids and features of all entries
    to the next features.
    """
    features = [torch.zeros(HIDDEN), *feature_TE]
    ids, drafts = torch.tensor(tokens), list[int]()
    for place in range(num_tokens):
        next_E = layer(ids, torch.stack(features))[-1]
        drafts.append(choose(logits(next_E), place))
        ids = torch.cat((ids, torch.tensor([drafts[-1]])))
        features.append(next_E)
    return drafts


def states_of(model: PreTrainedModel, tokens: list[int]) -> list[Tensor]:
    """Return (T, E) before the first layer and after every one, of all tokens but the last.

    Cached: of several texts with a common prefix, pass the longest first.
    """
    known: dict[tuple[int, ...], list[Tensor]] = model.__dict__.setdefault("known_states", {})
    wanted = tuple(tokens[:-1])
    longer = next((one for one in known if one[: len(wanted)] == wanted), None)
    if longer is None:
        found = model(torch.tensor([wanted]), output_hidden_states=True).hidden_states
        longer, known[wanted] = wanted, [state[0] for state in found]
    return [state[: len(wanted)] for state in known[longer]]


def _eagle_layer(tensors: dict[str, Tensor], embedded_TE: Tensor, feature_TE: Tensor) -> Tensor:
    def of(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    both = torch.cat((normed(embedded_TE, of("input_layernorm")), normed(feature_TE, of("hidden_norm"))), dim=-1)
    attended_TF = attended(*(F.linear(both, of(f"self_attn.{name}_proj")) for name in "qkv"))
    x_TE = feature_TE + F.linear(attended_TF, of("self_attn.o_proj"))
    mlp_TE = normed(x_TE, of("post_attention_layernorm"))
    gated = F.silu(F.linear(mlp_TE, of("mlp.gate_proj"))) * F.linear(mlp_TE, of("mlp.up_proj"))
    return x_TE + F.linear(gated, of("mlp.down_proj"))


def attended(q_TF: Tensor, k_TF: Tensor, v_TF: Tensor) -> Tensor:
    q, k, v = (x.view(len(x), -1, DIM).transpose(0, 1) for x in (q_TF, k_TF, v_TF))
    q, k = _rotated(q), _rotated(k)
    k, v = (x.repeat_interleave(HEADS // len(x), dim=0) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _rotated(x_HTD: Tensor) -> Tensor:
    half = DIM // 2
    angles = torch.outer(torch.arange(x_HTD.shape[1]), THETA ** (-torch.arange(half) / half))
    first, second = x_HTD[..., :half], x_HTD[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _as_blocks(tensors: dict[str, Tensor], num_residuals: int) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        i, j, *rest = name.split(".")
        is_head = int(j) == num_residuals
        renamed[f"lm_heads.{i}.weight" if is_head else f"blocks.{i}.layers.{j}.{rest[-1]}"] = tensor
    return renamed


def save_heads(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, old_name: bool = False) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / ("medusa_lm_head.safetensors" if old_name else "model.safetensors"))
