"""Errors of invalid GGUF files: one line that names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from core.model.gguf_import import import_gguf
from core.types.errors import SpecError

_COUNTS = ["attention.head_count", "embedding_length", "feed_forward_length", "context_length"]
_SOUND: dict[str, Any] = dict.fromkeys((f"llama.{key}" for key in _COUNTS), 4) | {
    "llama.block_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


def _write(path: Path, metadata: dict[str, Any], embedding: np.ndarray, factors: Sequence[float] = ()) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", embedding)
    if factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_EMBEDDING = np.zeros((3, 4), np.float32)


def test_valid_file_is_imported(tmp_path: Path) -> None:
    import_gguf(_write(tmp_path / "a.gguf", _SOUND, _EMBEDDING), tmp_path)
    assert (tmp_path / "config.json").exists()


def test_sampling_defaults_of_the_file(tmp_path: Path) -> None:
    given = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.25}
    import_gguf(_write(tmp_path / "a.gguf", _SOUND | given, _EMBEDDING), tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert {k: found[k] for k in ("temperature", "top_k", "repetition_penalty")} == {
        "temperature": 0.5,
        "top_k": 7,
        "repetition_penalty": 1.25,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"general.type": "adapter"},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": -1},
        {"llama.attention.head_count": "many"},
        {"llama.attention.head_count_kv": 0.5},
        {"llama.embedding_length": True},
        {"llama.block_count": (1 << 31) - 1},
        {"llama.context_length": -1},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.attention.layer_norm_rms_epsilon": "small"},
        {"llama.rope.freq_base": 0.0},
        {"llama.rope.scaling.type": "yarn"},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 0.5},
        {"llama.rope.dimension_count": 4},
        {"llama.attention.value_length": 4},
        {"llama.logit_scale": 0.5},
        {"llama.attention.scale": 0.5},
        {"llama.final_logit_softcapping": 30.0},
        {"tokenizer.ggml.tokens": [1, 2, 3]},
        {"tokenizer.ggml.merges": ["a"]},
        {"tokenizer.ggml.merges": ["x y"]},
        {"tokenizer.ggml.token_type": 5},
        {"tokenizer.ggml.tokens": "abc"},
    ],
    ids=str,
)
def test_invalid_metadata_is_one_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = _write(tmp_path / "wrong.gguf", _SOUND | wrong, _EMBEDDING)
    with pytest.raises(SpecError, match=r"wrong\.gguf") as caught:
        import_gguf(path, tmp_path)
    assert "\n" not in str(caught.value)


def test_big_endian_file_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _SOUND, _EMBEDDING)
    content = path.read_bytes()
    path.write_bytes(content[:4] + content[4:8][::-1] + content[8:])
    with pytest.raises(SpecError, match="its numbers are big-endian; convert it with gguf-convert-endian"):
        import_gguf(path, tmp_path)


def test_tensor_without_dimensions_is_rejected(tmp_path: Path) -> None:
    path = _write(tmp_path / "wrong.gguf", _SOUND, np.float32(1.0).reshape(()))
    with pytest.raises(SpecError, match="has 0 dimensions"):
        import_gguf(path, tmp_path)


@pytest.mark.parametrize("factors", [[1.0], [1.0] * 3, [1.0, 0.0], [1.0, float("nan")]], ids=str)
def test_rope_factors_of_wrong_length_are_rejected(tmp_path: Path, factors: list[float]) -> None:
    two = {"llama.attention.key_length": 4}
    import_gguf(_write(tmp_path / "a.gguf", _SOUND | two, _EMBEDDING, [1.0, 8.0]), tmp_path)
    with pytest.raises(SpecError, match=r"wrong\.gguf: tensor rope_freqs\.weight does not divide the 2 frequencies"):
        import_gguf(_write(tmp_path / "wrong.gguf", _SOUND | two, _EMBEDDING, factors), tmp_path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("shape", [(8, 16), (64, 33), (64,), (256,)], ids=str)
def test_row_that_ends_within_a_block_is_rejected(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    """Its rows would share blocks with other rows, or start in the middle of one."""
    path, name = _write(tmp_path / "wrong.gguf", _SOUND, np.zeros(shape, np.float32)), b"token_embd.weight"
    content = bytearray(path.read_bytes())
    at = content.index(name) + len(name) + 4 + 8 * len(shape)  # offset of its type, after its dimensions
    struct.pack_into("<I", content, at, GGMLQuantizationType[kind])
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"wrong\.gguf: tensor token_embd\.weight .* whole blocks") as caught:
        import_gguf(path, tmp_path)
    assert "\n" not in str(caught.value)


_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"scaling.type": "none", "scaling.factor": 2.0}, None),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, _LINEAR),
        ({"scaling.factor": 2.0}, _LINEAR),
        ({"scale_linear": 2.0}, _LINEAR),
        ({"scaling.type": "linear"}, None),
        ({"scaling.factor": 1.0}, None),
        ({"scaling.type": "yarn", "scaling.factor": 2.0}, _YARN),
        ({"scaling.type": "yarn", "scaling.factor": 2.0, "scaling.original_context_length": 3},
         _YARN | {"original_max_position_embeddings": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_rope_scaling_has_the_defaults_of_llama_cpp(
    keys: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    metadata = _SOUND | {f"llama.rope.{key}": value for key, value in keys.items()}
    import_gguf(_write(tmp_path / "a.gguf", metadata, _EMBEDDING), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_scaling"] == expected
