from __future__ import annotations

from pathlib import Path

import pytest
from tiny_service import MakeCompletions
from tiny_tokenizers import make_byte_fallback, make_byte_level

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


@pytest.fixture(scope="session")
def completions(byte_level_dir: Path, byte_level: Tokenizer) -> MakeCompletions:
    return MakeCompletions(byte_level_dir, byte_level)
