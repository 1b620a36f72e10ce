"""GGUF files of every supported type and architecture, compared with transformers on the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from core.model.gguf_file import GGML_TYPES, StoredTensor, write_table
from core.model.gguf_import import import_gguf
from core.types.errors import SpecError
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine.gguf_files import finish, random_blocks, write_model
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeRunner, random_model, reference_logits, tiny_config

WITH_A_QUANTIZER = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{kind: ("llama", kind, {}) for kind in WITH_A_QUANTIZER},
    "qwen2": ("qwen2", "Q8_0", {}),
    "qwen2, tied": ("qwen2", "F16", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Q8_0", {"head_dim": 32}),
    "mistral, sliding window": ("mistral", "Q8_0", {"sliding_window": 9}),
    "llama, biases": ("llama", "F32", {"attention_bias": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_dequantized_model(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    family, kind, changes = CASES[name]
    model = random_model(tiny_config(family, **(SHAPE | changes)))
    metadata = {"llama.attention.sliding_window": changes["sliding_window"]} if "sliding_window" in changes else {}
    write_model(tmp_path / "m.gguf", model, quantized=GGMLQuantizationType[kind], metadata=metadata)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    runner, (tokens,) = make_runner(tmp_path), prompts(30)
    assert runner.config.eos_token_ids == (130,)
    logits = step(runner, [tokens], [(0, 0, 30)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("scaling", ["llama3", "linear", "yarn"])
def test_rope_scaling_of_gguf_files(scaling: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 4.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if scaling != "linear":
        rope |= {"original_max_position_embeddings": 32}
    model = random_model(tiny_config("llama", rope_parameters=rope, **SHAPE))
    metadata: dict[str, Any] = {}
    extra: dict[str, np.ndarray] = {}
    # Stored as a tensor of divisors of the frequencies.
    if scaling == "llama3":
        plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
        extra["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq.numpy()
    else:
        metadata |= {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0}
    if scaling == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = 32
    write_model(tmp_path / "m.gguf", model, quantized=GGMLQuantizationType.F32, metadata=metadata, extra=extra)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    (tokens,) = prompts(60)
    logits = step(make_runner(tmp_path), [tokens], [(0, 0, 60)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_types_are_those_that_gguf_dequantizes(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        path = tmp_path / "m.gguf"
        model = random_model(tiny_config("llama", **SHAPE))
        write_model(path, model, quantized=GGMLQuantizationType.F32)
        content = bytearray(path.read_bytes())
        name = b"token_embd.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        content[at : at + 4] = int(kind).to_bytes(4, "little")
        path.write_bytes(content)
        with pytest.raises(SpecError, match=rf"tensor token_embd.weight has type {kind.name}, .* use a file of type"):
            import_gguf(path, tmp_path)
    else:
        assert GGML_TYPES[kind] == (kind.name, block, num_bytes)


@pytest.mark.parametrize("name", [kind.name for kind in GGML_TYPES.values() if kind.block > 1])
def test_slices_of_quantized_tensors(name: str, tmp_path: Path) -> None:
    """Any rows and columns equal those of the whole tensor as dequantized by gguf."""
    kind = GGMLQuantizationType[name]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 24, 3 * block
    blocks = random_blocks(kind, rows * 3)
    (tmp_path / "data").write_bytes(b"offset" + blocks.tobytes())
    stored = StoredTensor(name="w", ggml_type=int(kind), shape=(rows, columns), file=str(tmp_path / "data"), offset=6)
    assert stored.num_bytes == blocks.nbytes
    write_table(tmp_path, [stored])
    checkpoint = open_checkpoint(tmp_path)
    whole = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(rows, -1), kind))
    assert whole.isfinite().all() and whole.std() > 0
    assert torch.equal(checkpoint.read("w"), whole)
    assert torch.equal(checkpoint.read("w", rows=(5, 11)), whole[5:11])
    assert torch.equal(checkpoint.read("w", columns=(7, block + 9)), whole[:, 7 : block + 9])
    assert torch.equal(checkpoint.read("w", rows=(2, 3), columns=(0, 1)), whole[2:3, :1])


def test_split_files(make_runner: MakeRunner, tmp_path: Path) -> None:
    model = random_model(tiny_config("llama", **SHAPE))
    write_model(tmp_path / "whole.gguf", model, quantized=GGMLQuantizationType.F32)
    names = split(tmp_path / "whole.gguf", parts=3)
    directory = tmp_path / "imported"
    directory.mkdir()
    import_gguf(tmp_path / names[0], directory)
    (tokens,) = prompts(20)
    logits = step(make_runner(directory), [tokens], [(0, 0, 20)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)
    (tmp_path / names[1]).unlink()
    with pytest.raises(SpecError, match=f"missing beside it: {names[1]}"):
        import_gguf(tmp_path / names[0], directory)


def split(whole: Path, *, parts: int) -> list[str]:
    """Split a file as llama-gguf-split does: metadata in the first part, tensors distributed over all."""
    reader = gguf.GGUFReader(whole)
    names = [f"m-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1)]
    for part, name in enumerate(names):
        writer = gguf.GGUFWriter(whole.parent / name, "llama")
        for key, field in reader.fields.items() if part == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                element = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], element)
        for tensor in reader.tensors[part::parts]:
            writer.add_tensor(tensor.name, tensor.data)
        finish(writer)
    return names
