from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.http.connections import GRPC_ENDPOINT, ConnectionLimits
from frontend.responses.stored import StoredResponses
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve, Served, serving
from tests.support.tiny_service import MakeCompletions
from tests.support.tiny_tokenizers import make_byte_fallback, make_byte_level


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer(byte_level_dir)


@pytest.fixture(scope="session")
def byte_fallback(byte_fallback_dir: Path) -> Tokenizer:
    return Tokenizer(byte_fallback_dir)


@pytest.fixture(scope="session")
def completions(byte_level_dir: Path, byte_level: Tokenizer) -> MakeCompletions:
    return MakeCompletions(byte_level_dir, byte_level)


@pytest.fixture
async def serve(completions: MakeCompletions) -> AsyncIterator[Serve]:
    """await serve(access=…, max_context=…) opens both endpoints of a new service until the test ends."""
    async with AsyncExitStack() as stack:

        async def opened(
            *,
            access: Access | None = None,
            spec: RouterSpec | None = None,
            stored: StoredResponses | None = None,
            grpc_limits: ConnectionLimits = GRPC_ENDPOINT,
            **options: Any,
        ) -> Served:
            service = completions(**options)
            opening = serving(service, access=access, spec=spec, stored=stored, grpc_limits=grpc_limits)
            return await stack.enter_async_context(opening)

        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(completions: MakeCompletions) -> AsyncIterator[Served]:
    async with serving(completions()) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(server: Served) -> Served:
    """Endpoints of the module's server, with a new token service per test. All tests share an event loop."""
    server.service.token_service = FakeTokenService()
    server.is_healthy = True
    return server
