"""The file by which somebody operates without Ray: theirs alone, and whole."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cluster.cli.connection import find_state
from cluster.launch.person_file import CERTIFICATE, PersonFile
from core.identity.authority import Authority
from core.identity.process_name import ProcessName
from core.types.errors import SpecError
from tests.support.identities import proven

_WHO = ProcessName.of_person("mine", "viewer", "bob")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "bob.json"
    PersonFile(address="10.0.0.1:7000", identity=proven(Authority.create("mine"), _WHO)).save(file)
    return file


def test_what_is_saved_is_found_again_and_is_nobody_elses_to_read(saved: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    found = PersonFile.load(str(saved))
    assert (found.address, found.identity.name) == ("10.0.0.1:7000", _WHO)
    assert found.identity.tls_credentials and b"PRIVATE KEY" in found.identity.tls_credentials.key
    assert "PRIVATE" not in repr(found)
    saved.chmod(0o640)
    with pytest.raises(SpecError, match="chmod 600"):
        PersonFile.load(str(saved))


def test_a_file_that_is_there_is_not_written_over(saved: Path) -> None:
    for free_or_not in (saved, saved / "no" / "directory"):
        with pytest.raises(SpecError, match="choose another file with --out"):
            PersonFile.check_free(free_or_not)
    with pytest.raises(SpecError, match="choose another file with --out"):
        PersonFile.load(str(saved)).save(saved)


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"name": "xpyd://a/b", "key": "", "certificate": ""}'])
def test_what_is_no_such_file_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    with pytest.raises(SpecError, match="No such file"):
        PersonFile.load(str(file))
    file.touch(mode=0o600)
    file.write_text(text)
    with pytest.raises(SpecError, match="is not what `cluster operators create` has written"):
        PersonFile.load(str(file))


def test_it_is_for_one_deployment_and_for_some_commands(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CERTIFICATE, str(saved))
    assert find_state(None, by_certificate=True).name == find_state("mine", by_certificate=True).name == "mine"
    for name, by_certificate in ((None, False), ("other", True)):
        with pytest.raises(SpecError, match="logs, scale, switch, drain and keys of mine; do all else w"):
            find_state(name, by_certificate=by_certificate)
