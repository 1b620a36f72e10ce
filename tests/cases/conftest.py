"""Fixtures of the reported cases: a served model whose answer the test chooses, and small checkpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.tokenizer import Tokenizer
from tests.cases.served import Serve, Served
from tests.e2e.conftest import checkpoint, reference  # noqa: F401
from tests.support.fake_token_service import FakeTokenService
from tests.support.frontend_fixtures import byte_level, byte_level_dir, completions  # noqa: F401
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions


@pytest.fixture
def serve(completions: MakeCompletions, byte_level: Tokenizer) -> Serve:  # noqa: F811
    """serve(chat_template=…, spec=RouterSpec(…), …) opens the HTTP endpoint of a model on a fake token service."""

    @asynccontextmanager
    async def serving(
        *, spec: RouterSpec | None = None, model_dir: Path | None = None, **options: Any
    ) -> AsyncIterator[Served]:
        tokenizer = Tokenizer(model_dir) if model_dir else byte_level
        make = MakeCompletions(model_dir, tokenizer) if model_dir else completions
        service = make(fake := FakeTokenService(max_context=options.setdefault("max_context", 4096)), **options)
        app = create_app(service, access=Access.anybody(), is_healthy=lambda: True, spec=spec or RouterSpec())
        async with serve_http(app) as address, http_client(base_url="http://{}:{}".format(*address)) as http:
            yield Served(service, fake, tokenizer, http)
        service.close()

    return serving
