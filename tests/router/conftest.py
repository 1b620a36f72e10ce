from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest
from fake_dispatcher import FakeDispatcher
from tiny_tokenizers import make_byte_fallback, make_byte_level

from cluster.metrics import Metrics
from router.chat_template import ChatTemplate, find_chat_template
from router.completion import Completions
from router.model_card import ModelCard
from router.tokenizer import Tokenizer


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


class MakeCompletions(Protocol):
    def __call__(
        self, dispatcher: FakeDispatcher, *, max_context: int = 256, max_request_s: float = 60
    ) -> Completions: ...


@pytest.fixture(scope="session")
def completions(byte_level_dir: Path, byte_level: Tokenizer) -> MakeCompletions:
    """Makes the service that both doors are given, for the model "tiny"."""
    template = ChatTemplate(find_chat_template(byte_level_dir), special_tokens=byte_level.special_tokens)

    def make(dispatcher: FakeDispatcher, *, max_context: int = 256, max_request_s: float = 60) -> Completions:
        return Completions(
            dispatcher=dispatcher,
            tokenizer=byte_level,
            chat_template=template,
            model=ModelCard(id="tiny", max_context=max_context, vocab_size=byte_level.vocab_size, dtype="float32"),
            metrics=Metrics(),
            max_request_s=max_request_s,
        )

    return make
