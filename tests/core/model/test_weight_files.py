"""Choice of the weight files of every published layout, and of the file of each tensor."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from core.model.source import resolve, resolve_heads
from core.model.weight_files import locate_tensors, weight_files
from core.spec.schema import ModelSpec
from core.types.errors import SpecError
from tests.core.model.test_config import LLAMA
from tests.core.model.test_source import run_resolve

_INDEX = "model.safetensors.index.json"
_SET = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def fill(directory: Path, *files: str, index: dict[str, str] | None = None, index_name: str = _INDEX) -> Path:
    """Write files with one tensor each, named as the file's stem, and perhaps an index."""
    for file in files:
        save_file({file.partition(".")[0]: np.zeros(1)}, directory / file)
    if index is not None:
        (directory / index_name).write_text(json.dumps({"weight_map": index}))
    return directory


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", *_SET], ["model.safetensors"]),
        (_SET, _SET),
        ([*_SET, "gptq_model-4bit-128g.safetensors"], _SET),
        ([*_SET, "model-00001-of-00003.safetensors"], _SET),
        (["gptq_model-4bit-128g.safetensors"], ["gptq_model-4bit-128g.safetensors"]),
        (["pytorch_model.safetensors", "._pytorch_model.safetensors"], ["pytorch_model.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"]),
    ],
    ids=str,
)
def test_files_without_an_index(present: list[str], chosen: list[str], tmp_path: Path) -> None:
    files = weight_files(fill(tmp_path, *present))
    assert [path.name for path in files.paths] == list(chosen)
    assert bool(files.note) == (list(chosen) != ["model.safetensors"]), "transformers reads that name only"


@pytest.mark.parametrize("name", [_INDEX, "gptq_model.safetensors.index.json"])
def test_index_decides(name: str, tmp_path: Path) -> None:
    save_file({"x": np.ones(1)}, tmp_path / "a.safetensors")
    save_file({"x": np.zeros(1), "y": np.ones(1), "stale": np.ones(1)}, tmp_path / "b.safetensors")
    fill(tmp_path, "model.safetensors", index={"x": "a.safetensors", "y": "a.safetensors"}, index_name=name)
    fill(tmp_path, index={"x": "a.safetensors", "y": "b.safetensors"}, index_name=name)
    files = weight_files(tmp_path)
    located, unindexed = locate_tensors(files)
    assert {tensor: path.name for tensor, path in located.items()} == {"x": "a.safetensors", "y": "b.safetensors"}
    assert unindexed == {"stale"} and "transformers" in files.note


def test_stale_index_beside_a_whole_file(tmp_path: Path) -> None:
    files = weight_files(fill(tmp_path, "model.safetensors", index={"a": _SET[0]}))
    assert [path.name for path in files.paths] == ["model.safetensors"] and _SET[0] in files.note


@pytest.mark.parametrize("present", [["model.safetensors"], [*_SET]], ids=["whole", "parts"])
def test_weights_in_mistrals_own_format_beside_the_models(present: list[str], tmp_path: Path) -> None:
    """The hub's repositories have both, each with its index."""
    own = {"x": "consolidated-00001-of-00001.safetensors"}
    fill(tmp_path, *present, own["x"], index=own, index_name="consolidated.safetensors.index.json")
    assert [path.name for path in weight_files(tmp_path).paths] == present
    for name in present:
        (tmp_path / name).unlink()
    (tmp_path / "params.json").touch()
    files = weight_files(tmp_path)
    assert [path.name for path in files.paths] == [own["x"]] and not files.note


def test_wrong_file_in_the_index(tmp_path: Path) -> None:
    """Files that the index names may hold each other's tensors."""
    fill(tmp_path, "a.safetensors", "b.safetensors", index={"a": "b.safetensors", "b": "a.safetensors"})
    located, _ = locate_tensors(weight_files(tmp_path))
    assert {name: path.stem for name, path in located.items()} == {"a": "a", "b": "b"}


@pytest.mark.parametrize(
    ("present", "index", "complaint"),
    [
        ([], None, r"no weights: expected \.safetensors files or a \.gguf file"),
        ([_SET[0]], None, rf"parts of the weights are missing: {_SET[1]}; download"),
        ([_SET[0]], {"a": _SET[0], "b": ""}, "weight files are missing: "),
        ([_SET[0]], {"a": _SET[0], "b": _SET[1]}, rf"weight files are missing: .*{_SET[1]}; download"),
        (["a.safetensors"], {"a": "../a.safetensors"}, "a file name in this directory is expected"),
        (["a.safetensors"], {"a": "/a.safetensors"}, "a file name in this directory is expected"),
        (["a.safetensors"], {}, "weight_map is missing or empty"),
    ],
)
def test_incomplete_layouts(present: list[str], index: dict[str, str] | None, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=complaint):
        weight_files(fill(tmp_path, *present, index=index))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(SpecError, match=r"pytorch_model\.bin is pickled .* write safetensors with transformers"):
        weight_files(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without access")
def test_file_of_another_user_gets_one_line() -> None:
    """safetensors reports such a file as missing."""
    with tempfile.TemporaryDirectory() as directory:  # unlike tmp_path, below directories that all users may enter
        path = Path(directory)
        path.chmod(0o755)
        (fill(path, "model.safetensors") / "model.safetensors").chmod(0)
        os.seteuid(65534)
        try:
            with pytest.raises(SpecError, match=r"model.safetensors cannot be opened: Permission denied; make it read"):
                locate_tensors(weight_files(path))
        finally:
            os.seteuid(0)


def test_tensor_in_two_files_without_index_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"x": np.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SpecError, match=r"tensor x is in a\.safetensors and b\.safetensors; remove the files"):
        locate_tensors(weight_files(tmp_path))


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Write a repository in the hub's cache layout: blobs, and a snapshot of links to them."""
    repository = tmp_path / "hub" / "models--org--Tiny-1B"
    snapshot = repository / "snapshots" / "c0ffee"
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    save_file({"x": np.zeros(1)}, repository / "blobs" / "0")
    (repository / "blobs" / "1").write_text(json.dumps(LLAMA))
    (repository / "blobs" / "2").write_text("{}")
    for name, blob in (("model.safetensors", "0"), ("config.json", "1"), ("tokenizer.json", "2")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return repository


def test_repository_of_the_hubs_cache(cached: Path) -> None:
    snapshot = cached / "snapshots" / "c0ffee"
    assert resolve(str(cached)) == resolve(str(snapshot)) == resolve_heads(str(cached)) == snapshot
    assert {ModelSpec(source=str(path)).name for path in (cached, snapshot)} == {"org/Tiny-1B"}
    (cached / "snapshots" / "other").mkdir()
    assert resolve(str(cached)) == snapshot
    (cached / "refs" / "main").unlink()
    with pytest.raises(SpecError, match=r"snapshots without refs/main: c0ffee, other; name a directory below"):
        resolve(str(cached))
    (cached / "refs" / "main").write_text("gone")
    with pytest.raises(SpecError, match="the snapshot gone of refs/main is missing"):
        resolve(str(cached))


def test_hub_source_is_found_in_the_hubs_cache(cached: Path, tmp_path: Path) -> None:
    (cached.parent / "version.txt").write_text("1")
    environment = {"HF_HUB_CACHE": str(cached.parent), "HF_HUB_OFFLINE": "1", "CLUSTER_CACHE": str(tmp_path / "ours")}
    stdout, stderr = run_resolve("hf:org/Tiny-1B", **environment).communicate(timeout=50)
    assert stdout.strip() == str(cached / "snapshots" / "c0ffee"), stderr


def test_directory_with_another_tokenizer_file_is_complete(cached: Path) -> None:
    snapshot = cached / "snapshots" / "c0ffee"
    (snapshot / "tokenizer.json").rename(snapshot / "tekken.json")
    assert resolve(str(cached)) == snapshot


@pytest.mark.parametrize(
    ("tensor", "config", "named"),
    [
        ("l.weight l.scales l.biases", {}, "l.biases: MLX"),
        ("l.weight l.svdquant_lora_a", {}, "l.svdquant_lora_a: ModelOpt NVFP4_SVD"),
        ("l.lora_A.weight", {}, "l.lora_A.weight: LoRA"),
        ("layers.0.attention.wq.weight", {}, "under Mistral's or Meta's own names"),
        ("x", {"quant_method": "hqq"}, "weights quantized by hqq are not supported"),
        ("x", {"group_size": 64, "bits": 4}, "weights quantized by MLX are not supported"),
        ("x", {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R3": {}}}}, r"\(R3\)"),
    ],
)
def test_unsupported_formats_are_named(tensor: str, config: dict[str, object], named: str, cached: Path) -> None:
    snapshot = cached / "snapshots" / "c0ffee"
    save_file({name: np.zeros(1) for name in tensor.split()}, snapshot / "model.safetensors")
    settings = {"quantization_config": config} if config else {}
    (snapshot / "config.json").write_text(json.dumps(LLAMA | settings))
    with pytest.raises(SpecError, match=named) as caught:
        resolve(str(cached))
    assert "use the " in str(caught.value) and "\n" not in str(caught.value)
