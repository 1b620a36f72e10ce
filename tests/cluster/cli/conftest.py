"""Commands in the test's process, and a controller that answers as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.cli.command import CommandInProcess
from tests.cluster.deployments import save_state

Answer = Callable[..., Any]
Control = Callable[[Answer], list[str]]


@pytest.fixture
def cluster(
    state_root: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> CommandInProcess:
    return CommandInProcess(capsys, monkeypatch)


@pytest.fixture
def control(state_root: object, monkeypatch: pytest.MonkeyPatch) -> Control:
    """control(answer): deployment `a`, whose controller answers `answer(method, *args)`. Returns the methods called."""
    from cluster.launch import driver

    def install(answer: Answer, *, name: str = "a") -> list[str]:
        methods: list[str] = []

        def ask(controller: object, method: str, *args: Any, **more: Any) -> Any:
            methods.append(method)
            return answer(method, *args)

        save_state(name)
        monkeypatch.setattr(driver, "connect", lambda address, name: None)
        monkeypatch.setattr(driver, "find_controller", lambda name: "its handle")
        monkeypatch.setattr(driver, "ask", ask)
        return methods

    return install
