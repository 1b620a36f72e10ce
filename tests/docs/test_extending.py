"""docs/EXTENDING.md works as written: its code is written to files and its commands are run in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.__main__ import ROOT
from tests.support.grids import quick

_PAGE = (ROOT / "docs" / "EXTENDING.md").read_text()
FILES = dict(re.findall(r"`([\w.]+\.(?:py|jsonl))`[^`]*?\n\n```\w+\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE))
_COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```", _PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


_QUICK = [line for line in _COMMANDS if "test_my_drafts" in line or ("simulate" in line and "my_policies" in line)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with links to the checkout, and the page's files."""
    directory = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


def test_page_holds_all_files() -> None:
    assert set(FILES) == {
        "my_policies.py",
        "trace.jsonl",
        "my_links.py",
        "my_evictions.py",
        "my_kernel.py",
        "test_my_kernel.py",
        "my_drafts.py",
        "test_my_drafts.py",
    }
    assert _COMMANDS[0] == "export PYTHONPATH=$PWD"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", quick(_COMMANDS[1:], _QUICK))
def test_command_of_the_page(command: str, checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout)}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "pytest" in command:
        assert "passed" in done.stdout and "skipped" not in done.stdout
