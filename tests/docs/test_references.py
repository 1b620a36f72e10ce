"""Every file, test, module, link and spec key that a document or a docstring names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.spec.schema import Spec
from docs.generate.__main__ import ROOT, documents
from tests.support.import_graph import PACKAGES

_TOPS = (*PACKAGES, "benchmarks", "proto", "deploy", "docs", "tests")
_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(_TOPS)})/[\w./*-]*\w)(?:::(\w+))?")
_SUFFIXES = {".py", ".md", ".h", ".cpp", ".json", ".yaml", ".proto", ".sh"}
_LINK = re.compile(r"\]\(([^)#\[\]]+)[^)]*\)")
_MODULE = re.compile(r"python -m ([a-z_]+(?:\.\w+)+)")
_DOTTED = re.compile(rf"`((?:{'|'.join([*Spec.model_fields, 'prefill_worker'])})\.[a-z_.]+)(?:: ?[^`]+|=[^`]+)?`")
_TEST_OF = re.compile(r"`(tests/[\w/]+\.py)`((?:,? `(?!cluster )[^`/]+`)+)")
_BARE = re.compile(r"`(\w+\.(?:py|h|cpp|proto))`")
# They name files and commands of earlier versions.
_HISTORY = {"docs/LOG.md", "CHANGELOG.md"}
# They hold paths that are relative to another place.
_SKIPPED = {"test_references.py", "test_tests.py", "test_frame_server.py"}


def _sources() -> list[Path]:
    folders = [*PACKAGES, "benchmarks", "tests", "deploy"]
    found = [
        path for top in folders for path in (ROOT / top).rglob("*") if path.suffix in {".py", ".yaml", ".h", ".cpp"}
    ]
    return [path for path in found if "rpc" not in path.parts and path.name not in _SKIPPED]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_existing_things(path: Path) -> None:
    text = path.read_text()
    if str(path.relative_to(ROOT)) in _HISTORY:
        return
    missing = [*_missing_paths(text), *_missing_modules(text), *_missing_tests(text), *_missing_keys(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    missing += [name for name in _BARE.findall(prose) if not _is_there(name)]
    missing += [link for link in _LINK.findall(prose) if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_architecture_names_every_package_and_folder() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)?)`", (ROOT / "docs" / "ARCHITECTURE.md").read_text()))
    files = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    folders = {"/".join(file.parts[:2]) + "/" for file in files if len(file.parts) > 2}
    assert folders | {f"{package}/" for package in PACKAGES} <= named


def test_docstrings_and_comments_name_existing_paths() -> None:
    missing = {str(path.relative_to(ROOT)): _missing_paths(path.read_text()) for path in _sources()}
    assert not {path: names for path, names in missing.items() if names}


def _missing_paths(text: str) -> list[str]:
    missing = []
    for name, test in _PATH.findall(text):
        if Path(name).suffix not in _SUFFIXES and "." in Path(name).name:
            continue
        # docs/benchmarks holds pages, benchmarks/ programs; links in docs/ leave out `docs/`.
        found = [*ROOT.glob(name), *(ROOT / "docs").glob(name)]
        if not found or (test and f"def {test}" not in found[0].read_text()):
            missing.append(f"{name}::{test}" if test else name)
    return missing


def _missing_modules(text: str) -> list[str]:
    files = {name: ROOT / name.replace(".", "/") for name in _MODULE.findall(text) if name.split(".")[0] in _TOPS}
    return [
        name
        for name, path in files.items()
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ]


def _missing_tests(text: str) -> list[str]:
    """Find tests written as `tests/…/test_x.py` `part_of_a_name…` that are not in that file."""
    missing = []
    for name, words in _TEST_OF.findall(text):
        source = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        for word in re.findall(r"`([^`]+)`", words):
            part = re.split(r"[…\[*]", word.strip("…"))[0]
            if part not in source:
                missing.append(f"{name} {word}")
    return missing


def _missing_keys(text: str) -> list[str]:
    """Find spec keys that do not exist; `engine` and `router` are packages as well."""
    keys = set(_keys(Spec.model_json_schema(), "$root"))
    return [
        name
        for name in _DOTTED.findall(text)
        if name.rstrip(".") not in keys and not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    ]


def _keys(schema: dict, section: str, prefix: str = "") -> list[str]:
    found = []
    for key, field in (schema if section == "$root" else schema["$defs"][section])["properties"].items():
        found.append(prefix + key)
        for part in (field, *field.get("anyOf", ())):  # an optional section is one of several
            if "$ref" in part:
                found += _keys(schema, part["$ref"].rpartition("/")[2], f"{prefix}{key}.")
    return found


def _is_there(name: str) -> bool:
    """Return whether a file of this name exists; `my_…` are written by the reader."""
    return name.removeprefix("test_").startswith("my_") or any(
        path.name == name for top in _TOPS for path in (ROOT / top).rglob(name)
    )
