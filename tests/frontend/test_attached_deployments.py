"""Attached deployments: added, failing and removed without effect on other models."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.types.errors import DeployError, ModelUnavailable, UnknownModel
from frontend import attached_deployments as attached_module
from frontend.attached_deployments import AttachedDeployment, AttachedDeployments
from frontend.served_model import RouterMembership, ServedModel
from frontend.text.completion import Models
from tests.core.model.test_config import write_no_weights
from tests.engine.tiny_models import tiny_config
from tests.support.fake_token_service import FakeTokenService
from tests.support.identities import in_clear, router
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_module, "_REFRESH_S", 0.05)


@dataclass
class Ray:
    """Fake cluster that lists the attached deployments."""

    attached_deployments: list[AttachedDeployment] = field(default_factory=list)
    is_unavailable: bool = False
    num_asked: int = 0
    left: list[str] = field(default_factory=list)

    async def find(self) -> Sequence[AttachedDeployment]:
        self.num_asked += 1
        if self.is_unavailable:
            raise DeployError("Ray is away")
        return list(self.attached_deployments)

    async def has_been_asked(self) -> None:
        """Wait until the current list has been read."""
        before = self.num_asked
        await becomes(lambda: self.num_asked >= before + 2)

    def attached(
        self, name: str, model_dir: Path, redis_url: str, *, served_name: str = "", fails: bool = False
    ) -> AttachedDeployment:
        tree = {"name": name, "model": {"source": str(model_dir), "served_name": served_name or name}}
        spec = parse_spec(tree | {"router": {"endpoints": "main"}, "security": {"tls": "off"}})

        async def enter() -> RouterMembership:
            if fails:
                raise DeployError(f"{name}'s controller is gone")
            identity = in_clear(router(deployment=name))
            return RouterMembership(identity=identity, leave=lambda: self.left.append(name))

        return AttachedDeployment(spec=spec, credentials=DeploymentSecrets.new(index_url=redis_url), enter=enter)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory, byte_level_dir: Path) -> Path:
    """Model files as far as a router reads them."""
    directory = tmp_path_factory.mktemp("attached")
    shutil.copytree(byte_level_dir, directory, dirs_exist_ok=True)
    tiny_config("llama", vocab_size=512, architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    write_no_weights(directory)
    return directory


@asynccontextmanager
async def following(ray: Ray, completions: MakeCompletions) -> AsyncIterator[tuple[Models, AttachedDeployments]]:
    models = Models(completions(FakeTokenService(), name="own"))
    open_model = partial(ServedModel.open, node="127.0.0.1", has_many_tenants=lambda: False, tracing=None)
    attached_deployments = AttachedDeployments(models, ray.find, open_model)
    await attached_deployments.settle()
    task = asyncio.create_task(attached_deployments.follow_forever())
    try:
        yield models, attached_deployments
    finally:
        await attached_deployments.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_opened_before_the_endpoints_and_followed_later(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    early, late = (ray.attached(name, checkpoint_dir, redis_url) for name in ("early", "late"))
    ray.attached_deployments = [early]
    async with following(ray, completions) as (models, attached_deployments):
        assert models.names == ["own", "early"] and not attached_deployments.is_any_ready(), "it has no replica"
        ray.attached_deployments = [early, late]
        await becomes(lambda: models.names == ["own", "early", "late"])
        found = models.find("late")
        ray.attached_deployments = [late]
        await becomes(lambda: models.names == ["own", "late"])
        await becomes(lambda: ray.left == ["early"])
        assert models.find("late") is found
        with pytest.raises(UnknownModel, match="'own' and 'late' are"):
            models.find("early")
    assert sorted(ray.left) == ["early", "late"]


async def test_recreated_deployment_is_reopened(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    ray.attached_deployments = [ray.attached("g", checkpoint_dir, redis_url)]
    async with following(ray, completions) as (models, _):
        first = models.find("g")
        ray.attached_deployments = [ray.attached("g", checkpoint_dir, redis_url)]  # with other credentials
        await becomes(lambda: "g" in models.names and models.find("g") is not first)
        assert ray.left == ["g"]


async def test_rejected_duplicate_leaves_the_first_one_alone(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    first = ray.attached("a", checkpoint_dir, redis_url, served_name="same", fails=True)
    ray.attached_deployments = [first, ray.attached("b", checkpoint_dir, redis_url, served_name="same")]
    async with following(ray, completions) as (models, _):
        ray.attached_deployments = [first]
        await ray.has_been_asked()
        with pytest.raises(ModelUnavailable):
            models.find("same")


async def test_model_is_unavailable_while_its_deployment_is_reopened(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if closing is slow or fails."""
    ray, found = Ray(), list[str]()
    ray.attached_deployments = [ray.attached("g", checkpoint_dir, redis_url)]
    async with following(ray, completions) as (models, _):
        first, close = models.find("g"), ServedModel.close

        async def close_in_vain(served: ServedModel) -> None:
            with pytest.raises(ModelUnavailable, match="the model is loading"):
                models.find("g")
            found.append("away")
            await close(served)
            raise RuntimeError("in vain")

        with monkeypatch.context() as patch:
            patch.setattr(ServedModel, "close", close_in_vain)
            ray.attached_deployments = [ray.attached("g", checkpoint_dir, redis_url)]
            await becomes(lambda: "g" in models.names and models.find("g") is not first)
        assert found == ["away"]


async def test_failing_deployment_does_not_affect_others(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    broken, well = (
        ray.attached(name, checkpoint_dir, redis_url, fails=name == "broken") for name in ("broken", "well")
    )
    ray.attached_deployments = [broken, well]
    async with following(ray, completions) as (models, _):
        assert models.names == ["own", "well"], "settle waits for one attempt only"
        with pytest.raises(
            ModelUnavailable, match="'broken' is unavailable at this router: its deployment is unreachable"
        ):
            models.find("broken")
        ray.attached_deployments = [well]
        await becomes(lambda: is_unknown(models, "broken"))


def is_unknown(models: Models, name: str) -> bool:
    with suppress(ModelUnavailable):
        try:
            models.find(name)
        except UnknownModel:
            return True
    return False


async def test_deployments_stay_while_they_cannot_be_listed(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    ray.attached_deployments = [ray.attached("g", checkpoint_dir, redis_url)]
    async with following(ray, completions) as (models, _):
        ray.attached_deployments, ray.is_unavailable = [], True
        await ray.has_been_asked()
        assert models.names == ["own", "g"]
        ray.is_unavailable = False
        await becomes(lambda: models.names == ["own"])


async def test_first_of_two_with_one_model_name_is_served(
    completions: MakeCompletions, checkpoint_dir: Path, redis_url: str
) -> None:
    ray = Ray()
    ray.attached_deployments = [
        ray.attached("b", checkpoint_dir, redis_url, served_name="same"),
        ray.attached("a", checkpoint_dir, redis_url, served_name="same"),
        ray.attached("c", checkpoint_dir, redis_url, served_name="own"),
    ]
    async with following(ray, completions) as (models, _):
        found = models.find("same")
        await ray.has_been_asked()
        assert models.names == ["own", "same"] and models.find("same") is found
        assert models.find("own") is models.default
        second = ray.attached_deployments[0]
        ray.attached_deployments = [second]  # the first is gone
        await becomes(lambda: ray.left == ["a"] and "same" in models.names)
        assert models.find("same") is not found
