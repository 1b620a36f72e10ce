"""Actors that a driver finds, starts and ends in a Ray."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from cluster.control.placement import on_the_head
from cluster.launch import driver
from cluster.ray import internals
from core.types.errors import DeployError
from tests.support.waiting import until


def test_controller_restarts_on_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock()
    monkeypatch.setattr(ray, "remote", lambda actor: made)
    driver.start_controller("a")
    options = made.options.call_args.kwargs
    assert options["resources"] == on_the_head()["resources"]
    assert options["max_restarts"] == -1 and "scheduling_strategy" not in options


@pytest.mark.filterwarnings("ignore")  # Serve's own pydantic warnings
@pytest.mark.parametrize(("others", "is_shut_down"), [((), True), (("blue",), False)])
def test_stop_router_keeps_routers_of_other_deployments(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], is_shut_down: bool
) -> None:
    """Also if Ray Serve was started for it: the other deployment came later."""
    from ray import serve

    from cluster.launch import router_app

    applications, shut_down = {name: None for name in ("green", *others)}, []
    monkeypatch.setattr(router_app, "is_serve_running", lambda: True)
    monkeypatch.setattr(router_app.internals, "serve_details", lambda: {"applications": {}})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    monkeypatch.setattr(serve, "delete", lambda name, _blocking=True: applications.pop(name) if _blocking else None)
    monkeypatch.setattr(serve, "shutdown", lambda: shut_down.append(True))
    router_app.stop_router("green", owns_serve=True)
    assert bool(shut_down) == is_shut_down
    assert is_shut_down or list(applications) == ["blue"]


def test_head_of_ray_up_is_detected() -> None:
    assert not driver.is_of_ray_up()
    command = [sys.executable, "-c", "input()", "--autoscaling-config=/home/ubuntu/ray_bootstrap_config.yaml"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as autoscaler:
        until(driver.is_of_ray_up)
        autoscaler.communicate(b"\n")
    assert not driver.is_of_ray_up()


def test_node_messages_are_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`cluster status --json` used to be followed by Ray's message about a lost host."""
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    internals.keep_off_stdout()
    messages = [{"job_id": None, "error_message": "Raylet is terminated."}]

    class Subscriber:
        def subscribe(self) -> None: ...

        def poll(self) -> tuple[bytes, Any]:
            if not messages:
                raise OSError
            return b"", messages.pop()

    driver_of_ray: Any = SimpleNamespace(gcs_error_subscriber=Subscriber(), current_job_id=ray.JobID.nil())
    worker.listen_error_messages(driver_of_ray, threading.Event())
    assert not messages and not capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # Serve's own pydantic warnings
def test_cause_of_a_failed_router_is_found_in_serves_message() -> None:
    from cluster.launch import router_app

    message = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "frontend/grpc/api.py", line 118, in open_grpc_api
core.types.errors.DeployError: gRPC port [::1]:50051 cannot be opened

During handling of the above exception, another exception occurred:
ray.exceptions.RayTaskError(DeployError): wrapped"""
    assert router_app.cause_of(message) == "gRPC port [::1]:50051 cannot be opened"
    assert not router_app.cause_of("KeyError: 'core'")


def test_ray_that_stands_still_is_reported_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(driver.ray, "init", lambda **_: never.wait(60))
    with pytest.raises(DeployError, match=r"does not answer within 0\.1 s: its control store or the raylet"):
        driver.connect("auto", "a", within_s=0.1)
    assert any(thread.name == driver.JOINING for thread in threading.enumerate())
    never.set()


def test_stopped_raylet_is_named_at_once() -> None:
    """ray.init would block in C++, where no deadline of ours ends it."""
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        title = f"/x/raylet/raylet --gcs-address={address} "
        raylet = subprocess.Popen([title, "60"], executable=shutil.which("sleep"))
        try:
            raylet.send_signal(signal.SIGSTOP)
            os.waitpid(raylet.pid, os.WUNTRACED)
            with pytest.raises(DeployError, match=f"raylet of this host is stopped; .* `kill -CONT {raylet.pid}`"):
                driver.connect(address, "a")
        finally:
            raylet.kill()
            raylet.wait()


def test_address_for_ssh_names_the_option_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        DeployError, match=r"an SSH address goes before the command: `cluster --address ubuntu@head \.\.\.`"
    ):
        driver.connect("ubuntu@head", "kept")
