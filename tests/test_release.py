"""Content of the wheel, and a run of the installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.import_graph import ROOT, modules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_BESIDE_CODE = ("*.h", "*.cpp", "*.txt", "*.html", "*.js", "*.css", "*.json")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the tree, because a build writes into its tree."""
    place = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / "tree" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), "./tree"]
    subprocess.run(command, cwd=place, check=True, timeout=240)
    return next(place.glob("xpyd-*.whl"))


def test_wheel_has_every_module_and_data_file(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    shipped = [path for name, path in modules().items() if not name.startswith("benchmarks")]
    beside = {
        file for package in {path.parent for path in shipped} for one in _BESIDE_CODE for file in package.glob(one)
    }
    expected = {str(path.relative_to(ROOT)) for path in {*shipped, *beside}}
    assert beside and not expected - inside
    assert not [name for name in inside if name.startswith(("benchmarks/", "tests/"))]


def test_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(target), "CLUSTER_CACHE": str(tmp_path / "cache")}
    program = (
        "import sys, cluster, engine.cpu.library as library\n"
        f"assert cluster.__file__.startswith({str(target)!r}), cluster.__file__\n"
        "from cluster.cli.app import run\n"
        "assert library.load_kernels() is not None\n"
        "sys.exit(run(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.startswith("cluster 0."), done.stdout + done.stderr
