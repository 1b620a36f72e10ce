"""Fixtures: small random checkpoints in transformers' format, runners of them, and gangs of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.kernels.language import is_interpreted
from engine.runner.runner import ModelRunner
from tests.engine.gang import StartGang, on_rank
from tests.engine.kernels.launched import refer_on_cpu
from tests.engine.kernels.patched_once import language_patched_once
from tests.engine.tiny_models import MakeModel, MakeRunner, random_model, tiny_config
from tests.support.forks import forks

MAX_RANKS = 4


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> Iterator[None]:
    with language_patched_once() if is_interpreted() else nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def references() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        refer_on_cpu(patch)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """tiny_model("llama", head_dim=32) -> its model directory, and transformers' model in fp32."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(family: str, **changes: Any) -> tuple[Path, PreTrainedModel]:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            model = random_model(tiny_config(family, **changes))
            directory = tmp_path_factory.mktemp(family)
            model.save_pretrained(directory)
            made[key] = directory, model
        return made[key]

    return make


@pytest.fixture
def make_runner() -> MakeRunner:
    """make_runner(directory, dtype="bfloat16", pool_dtype="fp8_e4m3") on the CPU, one rank, blocks of 8 tokens."""

    def make(directory: Path, *, dtype: str = "float32", **config: Any) -> ModelRunner:
        return ModelRunner(
            EngineConfig(model_dir=directory, dtype=dtype, **({"block_size": 8, "num_blocks": 96} | config))
        )

    return make


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[list[ProcessPoolExecutor]]:
    """One process per rank, for all gangs of a test session: each imports what gangs need once."""
    processes = [ProcessPoolExecutor(1, mp_context=forks) for _ in range(MAX_RANKS)]
    yield processes
    for process in processes:
        process.shutdown()


@pytest.fixture
def start_gang(rank_processes: list[ProcessPoolExecutor], tmp_path: Path) -> Iterator[StartGang]:
    """start_gang(size, function, ...) runs function(parallel, ...) in `size` processes."""
    gangs, started = itertools.count(), list[tuple[int, Future[Any]]]()

    def start(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 20.0) -> list[Future[Any]]:
        place, prefix = tmp_path / "store of gangs", f"gang-{next(gangs)}"
        ranks = [
            rank_processes[i].submit(on_rank, function, place, prefix, i, size, timeout_s, arguments)
            for i in range(size)
        ]
        started.extend(enumerate(ranks))
        return ranks

    yield start
    for rank, result in started:
        if isinstance(result.exception(), BrokenProcessPool):  # the test has ended the process
            rank_processes[rank].shutdown()
            rank_processes[rank] = ProcessPoolExecutor(1, mp_context=forks)
