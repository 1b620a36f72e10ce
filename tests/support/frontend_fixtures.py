from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.openai_door import OpenAIEndpoint, open_openai_endpoint
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_server(completions: MakeCompletions) -> AsyncIterator[OpenAIEndpoint]:
    async with open_openai_endpoint(completions) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(openai_server: OpenAIEndpoint) -> OpenAIEndpoint:
    """HTTP endpoint of the module's server, with a new token service per test. All tests share an event loop."""
    openai_server.service.token_service = FakeTokenService()
    openai_server.is_healthy = True
    return openai_server
