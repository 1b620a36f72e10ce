"""EAGLE-3 heads written by `speculators` and SpecForge, with the logits that these libraries compute.

python -m tests.engine.spec_decode.heads.published_files DIRECTORY     write both; needs both libraries
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from tests.engine.spec_decode.heads.head_files import DRAFT_VOCAB, HIDDEN
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import TINY

# T positions, P places of a draft, D draft vocabulary, E hidden_size

RECORDED = "recorded.safetensors"
NUM_POSITIONS, NUM_PLACES = 20, 3
LAYERS = (1, 2, 3)  # of the tiny model

_LAYER = {name: size for name, size in TINY.items() if name != "initializer_range"} | {"num_hidden_layers": 1}


def write_speculators(directory: Path, *, draft_vocab_size: int = DRAFT_VOCAB, **changes: Any) -> None:
    """Write heads with `speculators`. changes: options of an Eagle3SpeculatorConfig."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig(**_LAYER, attn_implementation="eager")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_PLACES)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **changes,
    )
    model = Eagle3DraftModel(config)
    _fill(model)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    token_ids, hidden = _inputs()
    with torch.inference_mode():
        model(hidden[None], token_ids[None], torch.zeros_like(token_ids)[None], ttt_steps=NUM_PLACES)
    _save(model, directory, token_ids, hidden, logits)


def write_specforge(directory: Path, **changes: Any) -> None:
    """Write heads with SpecForge. changes: keys of config.json."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask

    config = LlamaConfig(
        **_LAYER,
        architectures=["LlamaForCausalLMEagle3"],
        pad_token_id=0,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in LAYERS]},
        **({"draft_vocab_size": DRAFT_VOCAB, "target_model_type": "llama"} | changes),
    )
    model = LlamaForCausalLMEagle3(config)
    _fill(model)
    token_ids, hidden = _inputs()
    count = len(token_ids)
    kept: list[list[Tensor]] = [[], []]
    logits = []
    with torch.inference_mode():
        x_TE = model.project_hidden_states(hidden[None])
        mask = prepare_decoder_attention_mask(torch.ones(1, count, dtype=torch.bool), (1, count), x_TE, 0)
        for place in range(NUM_PLACES):
            shifted = torch.cat((token_ids[place:], token_ids.new_zeros(place)))[None]
            positions = torch.arange(count)[None]
            x_TE = model.backbone(model.embed_input_ids(shifted), x_TE, kept, mask, positions)
            logits.append(model.compute_logits(x_TE)[0])
    _save(model, directory, token_ids, hidden, logits)


WRITERS: dict[str, Callable[..., None]] = {"speculators": write_speculators, "specforge": write_specforge}
DEFAULTS: dict[str, dict[str, Any]] = {  # of `speculators train` 0.9.0, and of SpecForge 0.2.0's draft configs
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "specforge": {},
}


def _fill(model: PreTrainedModel) -> None:
    """Set random weights that bfloat16 represents exactly."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            is_norm = parameter.dim() == 1
            values = torch.randn(parameter.shape, generator=generator) * 0.3 + (1 if is_norm else 0)
            parameter.copy_(values.to(torch.bfloat16))
        if (d2t := getattr(model, "d2t", None)) is not None and len(d2t) < VOCAB_SIZE:
            known = torch.randperm(VOCAB_SIZE, generator=generator)[: len(d2t)].sort().values
            d2t.copy_(known - torch.arange(len(d2t)))
            model.t2d.copy_(torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, known, True))
    model.eval()


def _inputs() -> tuple[Tensor, Tensor]:
    """Return token ids (T,), and the hidden states (T, 3 E) of the position before each; zeros before the first one."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(NUM_POSITIONS, 3 * HIDDEN, generator=generator)
    hidden[0] = 0
    return torch.randint(VOCAB_SIZE, (NUM_POSITIONS,), generator=generator), hidden


def _save(model: PreTrainedModel, directory: Path, token_ids: Tensor, hidden: Tensor, logits: list[Tensor]) -> None:
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "config.py").unlink(missing_ok=True)  # a copy of the library's code, which servers do not need
    recorded = {"token_ids": token_ids, "hidden": hidden, "logits_PTD": torch.stack(logits).contiguous()}
    save_file(recorded, directory / RECORDED)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, write in WRITERS.items():
        write(Path(sys.argv[1]) / name, **DEFAULTS[name])
