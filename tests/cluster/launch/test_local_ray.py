"""Start of a local Ray, with scripted output of `ray start`."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import pytest

from cluster.launch import local_ray
from core.types.errors import DeployError


class FakeRay:
    """`ray start` as a process with scripted output that has ended or not."""

    def __init__(self, output: bytes, returncode: int | None) -> None:
        self._output = output
        self._returncode = returncode

    def __call__(self, command: list[str], *, stdout: IO[bytes], **_: Any) -> FakeRay:
        stdout.write(self._output)
        stdout.flush()
        return self

    def poll(self) -> int | None:
        return self._returncode


@pytest.mark.parametrize(
    ("output", "returncode", "error"),
    [
        (b"usage\nno such option: --colour\n", 2, "Ray did not start: no such option: --colour (full log"),
        (b"INFO scripts.py:1043 -- Local node IP: 127.0.0.1\n", None, "Ray did not start in time; retry when this"),
        (
            b"Traceback:\nException: The current node timed out during startup. This could happen.\n",
            1,
            "Ray did not start in time; retry when this machine is less busy (log",
        ),
    ],
    ids=["its error is quoted", "overloaded machine", "Ray's own deadline"],
)
def test_failed_start_is_explained(
    output: bytes, returncode: int | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[local_ray.LocalRay] = []
    monkeypatch.setattr(local_ray, "START_S", -1.0)
    monkeypatch.setattr(local_ray, "stop", stopped.append)
    monkeypatch.setattr(local_ray.subprocess, "Popen", FakeRay(output, returncode))
    place = local_ray.LocalRay(str(tmp_path / "ray"), 1)
    with pytest.raises(DeployError) as caught:
        local_ray.start(place, log=tmp_path / "ray.log")
    assert str(caught.value).startswith(error) and "ray.log" in str(caught.value) and stopped == [place]


def test_nothing_is_made_before_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A deploy that a later check stops leaves no directory behind."""
    assert not Path(local_ray.prepare().temp_dir).exists()
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: "/tmp/gone")
    place = local_ray.prepare()
    with pytest.raises(DeployError, match="No such file or directory; set TMPDIR to a writable directory, in ASCII"):
        local_ray.start(place, log=tmp_path / "ray.log")


@pytest.mark.parametrize("directory", ["/scratch/käse", "/scratch/users/ab/jobs/4711", None])
def test_a_temporary_directory_that_ray_cannot_use_is_passed_over(
    directory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gettempdir() -> str:
        if directory is None:
            raise FileNotFoundError("No usable temporary directory found")
        return directory

    monkeypatch.setattr(local_ray.tempfile, "gettempdir", gettempdir)
    assert local_ray.prepare().temp_dir.startswith("/tmp/xpyd-ray-")


def test_ray_that_gave_up_on_a_busy_machine_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = [FakeRay(b"The current node timed out during startup.\n", 1), FakeRay(b"Ray runtime started.\n", None)]
    monkeypatch.setattr(local_ray.subprocess, "Popen", lambda command, **how: starts.pop(0)(command, **how))
    local_ray.start(local_ray.LocalRay(str(tmp_path / "ray"), 1), log=tmp_path / "ray.log")
    assert not starts
