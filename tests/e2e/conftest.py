"""Fixtures: random checkpoints for whole clusters, running clusters, and reference answers of a single process."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from core.types.request import SampledToken, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import random_model, tiny_config
from tests.support.character_tokenizer import save_tokenizer

# Imported where they are used: machines for GPU tests lack some packages.
if TYPE_CHECKING:
    from tests.cluster.cli.command import ClusterCommand
    from tests.support.local_cluster import LocalCluster
    from tests.support.shared_clusters import SharedClusters

Checkpoint = Callable[..., Path]


def exact_tree(prefill: int, decode: int, *, tp: tuple[int, int] = (1, 1), **router: Any) -> dict[str, Any]:
    """Return the spec of a deployment that reproduces the reference token for token.

    Every prompt is computed on a prefill replica, in several steps. tp: ranks of a prefill and of a decode replica.
    """
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {
            "replicas": prefill,
            "tensor_parallel": tp[0],
            "kv_memory_gib": 0.01,
            "max_batch_tokens": 32,
            "answer_share": 0,
        },
        "decode": {"replicas": decode, "tensor_parallel": tp[1], "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0} | router,
    }


def smollm2_tree(**router: Any) -> dict[str, Any]:
    """Return the spec of a deployment of SmolLM2 whose answers depend on neither the route nor the batch."""
    return {"model": {"served_name": "smollm2", "dtype": "float32"}, "kv": {"wire_dtype": "raw"}, "router": router}


def on_device(device: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the spec for `device`. On a GPU all ranks share it."""
    if device == "cuda":
        for role in ("prefill", "decode"):
            tree[role] |= {"resources": {"gpus": 0.1}}
    return tree


def gib_of_blocks(number: int) -> float:
    """Return the size in GiB of a pool for exactly `number` blocks of the tiny Llama in float32."""
    bytes_per_block = 3 * 2 * 2 * 16 * 4 * 16  # layers, k and v, kv heads, head_dim, float32, block
    return (number + 0.5) * bytes_per_block / 2**30


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, where pytest-asyncio is missing: a GPU machine may lack it."""
    test = pyfuncitem.obj
    if pyfuncitem.config.pluginmanager.has_plugin("asyncio") or not inspect.iscoroutinefunction(test):
        return None
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint("llama", num_key_value_heads=1) -> a model directory with random weights and a tokenizer."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            made[key] = directory = tmp_path_factory.mktemp(family)
            random_model(tiny_config(family, **changes)).save_pretrained(directory)
            tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB_SIZE)}))
            tokenizer.decoder = ByteLevel()
            tokenizer.save(str(directory / "tokenizer.json"))
        return made[key]

    return make


@pytest.fixture(scope="session")
def letters_dir(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model directory of the tiny Llama with a token for each character, for grammars and markers."""
    directory = shutil.copytree(checkpoint("llama"), tmp_path_factory.mktemp("letters") / "model")
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def shared_cluster(redis_url: str) -> Iterator[SharedClusters]:
    """Clusters for tests that change nothing of them."""
    from tests.support.shared_clusters import SharedClusters

    shared = SharedClusters(redis_url)
    yield shared
    shared.close()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[ClusterCommand]:
    """The `cluster` command for a deployment on Ray, which ends with the test."""
    from tests.cluster.cli.command import ClusterCommand

    command = ClusterCommand(tmp_path / "state")
    yield command
    command.run("down")


class Reference:
    """The engine in one process: reference(model_dir, prompts, samplings, dtype="float32", …) -> its tokens.

    It blocks the event loop: with a large model call it before the cluster starts, or routers miss its heartbeats.
    """

    def __init__(self) -> None:
        self._runners: dict[EngineConfig, ModelRunner] = {}

    def __call__(
        self,
        model_dir: Path,
        prompts: list[list[int]],
        samplings: Sampling | list[Sampling],
        *,
        dtype: str = "float32",
        **engine: Any,
    ) -> list[list[SampledToken]]:
        config = EngineConfig(model_dir=model_dir, dtype=dtype, kv_memory_gib=0.1, **engine)
        if config not in self._runners:
            self._runners[config] = ModelRunner(config)
        return generate(self._runners[config], prompts, samplings)

    def ids(
        self, model_dir: Path, prompts: list[list[int]], samplings: Sampling | list[Sampling], **engine: Any
    ) -> list[list[int]]:
        """Return the ids of the tokens only."""
        return [[token.token_id for token in tokens] for tokens in self(model_dir, prompts, samplings, **engine)]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@dataclass(frozen=True)
class Lab:
    """What a test of whole clusters uses: models, the answers of one process, and clusters.

    async with lab.shared(model_dir, **exact_tree(1, 1)) as cluster:    # unless it changes the cluster
    async with lab.own(model_dir, **exact_tree(1, 1)) as cluster:
    """

    checkpoint: Checkpoint
    reference: Reference
    shared: SharedClusters
    redis_url: str

    def own(self, model_dir: Path, **options: Any) -> AbstractAsyncContextManager[LocalCluster]:
        from tests.support.local_cluster import local_cluster

        return local_cluster(model_dir, self.redis_url, **options)


@pytest.fixture(scope="session")
def lab(checkpoint: Checkpoint, reference: Reference, shared_cluster: SharedClusters, redis_url: str) -> Lab:
    return Lab(checkpoint, reference, shared_cluster, redis_url)
