"""Every file, test, module and spec key that a document or a docstring names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from core.spec.schema import Spec
from docs.generate.__main__ import ROOT, documents

_PACKAGES = ("cluster", "router", "engine", "kvtransfer", "prefill_worker", "decode_worker")
_TOPS = (*_PACKAGES, "benchmarks", "proto", "deploy", "docs", "tests")
_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(_TOPS)})/[\w./*-]*\w)(?:::(\w+))?")
_SUFFIXES = {".py", ".md", ".h", ".cpp", ".json", ".yaml", ".proto", ".sh"}
_LINK = re.compile(r"\]\(([^)#\[\]]+)[^)]*\)")
_MODULE = re.compile(r"python -m ([a-z_]+(?:\.\w+)+)")
_DOTTED = re.compile(rf"`((?:{'|'.join([*Spec.model_fields, 'prefill_worker'])})\.[a-z_.]+)(?:: ?[^`]+|=[^`]+)?`")
_TEST_OF = re.compile(r"`(tests/[\w/]+\.py)`((?:,? `(?!cluster |python )[^`/]+`)+)")
_BARE = re.compile(r"`(\w+\.(?:py|h|cpp|proto))`")
_OLD = {"docs/LOG.md"}  # of what was there then
_SPEAK_OF_PATHS = {"test_references.py", "test_tests.py"}  # and say them from somewhere else
_NEVER = {"utils.py", "common.py", "helpers.py"}  # names that AGENTS.md rules out


def _sources() -> list[Path]:
    folders = [*_PACKAGES, "benchmarks", "tests", "deploy"]
    found = [
        path for top in folders for path in (ROOT / top).rglob("*") if path.suffix in {".py", ".yaml", ".h", ".cpp"}
    ]
    return [path for path in found if "rpc" not in path.parts and path.name not in _SPEAK_OF_PATHS]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(path: Path) -> None:
    text = path.read_text()
    if str(path.relative_to(ROOT)) in _OLD:
        return
    missing = [*_missing_paths(text), *_missing_modules(text), *_missing_tests(text), *_missing_keys(text)]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    missing += [name for name in _BARE.findall(prose) if not _is_there(name)]
    missing += [link for link in _LINK.findall(prose) if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_every_room_is_in_the_table_of_rooms() -> None:
    told = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)?)`", (ROOT / "docs" / "ARCHITECTURE.md").read_text()))
    rooms = {f"{path.parent.relative_to(ROOT)}/" for top in _PACKAGES for path in (ROOT / top).rglob("*.py")}
    bodies = {f"{package}/" for package in _PACKAGES} - {"cluster/", "kvtransfer/", "router/"}
    assert {room for room in rooms if room.count("/") > 1} | bodies <= told


def test_what_docstrings_and_comments_name_is_there() -> None:
    missing = {str(path.relative_to(ROOT)): _missing_paths(path.read_text()) for path in _sources()}
    assert not {path: names for path, names in missing.items() if names}


def _missing_paths(text: str) -> list[str]:
    missing = []
    for name, test in _PATH.findall(text):
        if Path(name).suffix not in _SUFFIXES and "." in Path(name).name:
            continue
        found = [*ROOT.glob(name), *(ROOT / "docs").glob(name)]  # documents name each other from docs/
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
    """`tests/…/test_x.py` `the_beginning_or_end…`: somewhere in that file."""
    missing = []
    for name, words in _TEST_OF.findall(text):
        source = (ROOT / name).read_text() if (ROOT / name).exists() else ""
        for word in re.findall(r"`([^`]+)`", words):
            part = re.split(r"[…\[*]", word.strip("…"))[0]
            if part not in source:
                missing.append(f"{name} {word}")
    return missing


def _missing_keys(text: str) -> list[str]:
    """Spec keys; `engine` and `router` are packages as well."""
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
        for part in (field, *field.get("anyOf", ())):  # a section that may be left out is one of any
            if "$ref" in part:
                found += _keys(schema, part["$ref"].rpartition("/")[2], f"{prefix}{key}.")
    return found


def _is_there(name: str) -> bool:
    """A file by its bare name; `my_…` are the reader's."""
    return (
        name in _NEVER
        or name.removeprefix("test_").startswith("my_")
        or any(path.name == name for top in _TOPS for path in (ROOT / top).rglob(name))
    )
