"""Sources accepted by `speculation.model`, and the errors for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy
import pytest
from safetensors.numpy import save_file

from core.model import source as model_source
from core.model.draft_source import check_same_tokens, draft_source, fetch_for_a_switch, heads_source
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role
from tests.core.model.test_config import write, write_no_weights
from tests.support.character_tokenizer import save_tokenizer


def _spec(**keys: Any) -> Spec:
    return parse_spec({"speculation": keys})


def _model(directory: Path) -> Path:
    directory.mkdir()
    write(directory, architectures=["LlamaForCausalLM"])
    write_no_weights(directory)
    save_tokenizer(directory)
    return directory


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"medusa_num_heads": 3}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "eagle"),
        (None, "draft"),
    ],
)
def test_auto_detects_the_kind_of_draft(tmp_path: Path, config: dict[str, Any] | None, kind: str) -> None:
    directory = _model(tmp_path / "it")
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    found = draft_source(_spec(method="auto", model=str(directory)))
    assert found and (found.kind, found.directory) == (kind, directory)
    assert found.heads == (None if kind == "draft" else kind)


def test_eagle_1_is_detected_by_its_weights(tmp_path: Path) -> None:
    directory = _model(tmp_path / "it")
    write(directory, architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    for columns, kind in ((2, "eagle"), (3, "draft")):
        weights = {"fc.weight": numpy.zeros((4, 4 * columns), numpy.float32)}
        save_file(weights, directory / "model.safetensors")
        found = draft_source(_spec(method="auto", model=str(directory)))
        assert found and found.kind == kind


@pytest.mark.parametrize("tree", [{"architectures": None}, {"architectures": 5}, [1], "text", None])
def test_unknown_directory_is_rejected_in_one_line(tmp_path: Path, tree: Any) -> None:
    directory = _model(tmp_path / "it")
    (directory / "config.json").write_text(json.dumps(tree))
    with pytest.raises(SpecError, match=r"config\.json: "):
        draft_source(_spec(method="auto", model=str(directory)))


@pytest.mark.parametrize("source", ["it", "it/model.gguf", "hf:org/name/model.gguf"])
def test_gguf_directory_is_a_draft_model(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_source, "resolve", lambda source, progress=None: Path("resolved") / source)
    found = draft_source(_spec(method="auto", model=source))
    place = source if source.startswith("hf:") else tmp_path / source
    assert found and (found.kind, found.directory) == ("draft", Path("resolved") / place)


def test_named_source_is_resolved(tmp_path: Path) -> None:
    directory = _model(tmp_path / "it")
    for kind in ("draft", "medusa", "eagle"):
        found = draft_source(_spec(method=kind, model=str(directory)))
        assert found and found.kind == kind
    assert draft_source(_spec(method="auto")) is None
    assert draft_source(_spec(method="off", model=str(directory))) is None
    assert draft_source(_spec(method="self")) is None


def test_mtp_uses_the_models_directory(tmp_path: Path) -> None:
    directory = _model(tmp_path / "it")
    served = {"model": {"source": str(directory)}}
    of_its_own = {"num_nextn_predict_layers": 1}

    def found(**keys: Any) -> str | None:
        source = draft_source(parse_spec(served | {"speculation": keys}))
        assert source is None or source.directory == directory
        return source and source.kind

    assert found(method="mtp") == "mtp", "loading reports missing layers"
    assert found(method="auto", model=str(directory)) == "draft"
    write(directory, architectures=["LlamaForCausalLM"], **of_its_own)
    assert found(method="auto", model=str(directory)) == "mtp"
    assert found(method="auto") is None, "they take memory, so `auto` needs an explicit model"
    other = _model(tmp_path / "other")
    write(other, architectures=["LlamaForCausalLM"], **of_its_own)
    source = draft_source(parse_spec(served | {"speculation": {"method": "auto", "model": str(other)}}))
    assert source and source.kind == "draft" and source.directory == other


@pytest.mark.parametrize("method", ["draft", "auto", "medusa", "eagle"])
def test_unusable_source_names_the_spec_key(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    directory = _model(tmp_path / "it")
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    wrong = {str(tmp_path / "nowhere"): "nowhere: no such", "hf:org/heads": "hf:org/heads: no connection"}
    if method == "draft":
        wrong[str(directory)] = "these are eagle heads; set speculation.method to eagle"
    for source, expected in wrong.items():
        with pytest.raises(SpecError, match=rf"^speculation\.model: .*{expected}"):
            draft_source(_spec(method=method, model=source))


def test_prefill_replica_loads_heads_but_no_draft_model(tmp_path: Path) -> None:
    assert heads_source(_spec(method="draft", model=str(tmp_path / "elsewhere"))) is None
    directory = _model(tmp_path / "it")
    assert heads_source(_spec(method="auto", model=str(directory))) is None
    found = heads_source(_spec(method="eagle", model=str(directory)))
    assert found and found.heads == "eagle"
    with pytest.raises(SpecError, match=r"^speculation\.model: .*elsewhere: no such"):  # `auto` may mean heads
        heads_source(_spec(method="auto", model=str(tmp_path / "elsewhere")))


@pytest.mark.parametrize(
    ("role", "tree", "is_fetched"),
    [
        (Role.PREFILL, {}, True),
        (Role.DECODE, {}, False),  # loads the draft model anyway
        (Role.PREFILL, {"decode": {"kv_memory_gib": 2}}, False),  # cannot switch its role
        (Role.PREFILL, {"speculation": {"method": "ngram"}}, False),
    ],
)
def test_draft_model_is_fetched_before_a_role_switch(
    role: Role, tree: dict[str, Any], is_fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing source does not keep a prefill replica from starting."""
    resolved: list[str] = []

    def resolve(source: str, *, progress: object = None) -> Path:
        resolved.append(source)
        raise SpecError("model.source: no such repository")

    monkeypatch.setattr(model_source, "resolve", resolve)
    spec = parse_spec({"speculation": {"method": "draft", "model": "hf:some/small"}} | tree)
    fetch_for_a_switch(spec, role)
    assert resolved == (["hf:some/small"] if is_fetched else [])


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"speculation": {"method": "draft"}}, "draft needs a smaller model of the same tokenizer; name its source"),
        ({"speculation": {"method": "eagle"}}, "eagle needs draft heads; name their directory"),
        ({"speculation": {"method": "self", "model": "m"}}, "self needs none; leave it out"),
        ({"speculation": {"method": "mtp", "model": "m"}}, "mtp needs none; leave it out"),
        ({"speculation": {"method": "ngram", "model": "m"}}, "ngram needs none; leave it out"),
        ({"speculation": {"method": "self"}, "decode": {"tensor_parallel": 2}},
         "self needs decode.tensor_parallel: 1; draft runs beside any"),
    ],
)  # fmt: skip
def test_method_and_model_must_match(tree: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        parse_spec(tree)


def test_directory_without_heads_names_the_spec_key(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"^speculation\.model: .*no weights: expected \.safetensors"):
        model_source.resolve_heads(str(tmp_path))


def test_different_vocabulary_is_rejected(tmp_path: Path) -> None:
    ours, theirs = _model(tmp_path / "ours"), _model(tmp_path / "theirs")
    check_same_tokens(theirs, ours)
    tokenizer = json.loads((theirs / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["!!"] = len(tokenizer["model"]["vocab"]) + 1
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SpecError, match=r"theirs has another vocabulary than the served model: \d+ of \d+ tokens"):
        check_same_tokens(theirs, ours)
