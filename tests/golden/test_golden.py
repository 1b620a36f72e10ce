"""Comparison of this tree with the golden records; `python -m tests.golden check` compares every case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.records import RECORDS, check_text, check_tokens, names
from tests.golden.texts import TEXTS
from tests.golden.tokens import GROUPS, differences

_QUICK = [name for name, group in GROUPS.items() if group.quick]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", TEXTS)
def test_text_equals_its_record(name: str) -> None:
    assert not (wrong := check_text(name)), "\n".join(wrong)


@pytest.mark.parametrize("name", _QUICK)
@pytest.mark.usefixtures("one_thread")
def test_tokens_equal_their_record(name: str, models: Path, redis_url: str) -> None:
    _check(name, models, redis_url, only_quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.usefixtures("one_thread")
def test_tokens_of_every_case_equal_their_record(name: str, models: Path, redis_url: str) -> None:
    _check(name, models, redis_url, only_quick=False)


def _check(name: str, models: Path, redis_url: str, *, only_quick: bool) -> None:
    result = check_tokens(name, models, redis_url, only_quick=only_quick)
    assert not result.wrong, "\n".join(result.wrong)
    if result.notes:
        pytest.skip("; ".join(result.notes))


def test_every_record_has_its_file_and_no_file_is_left_over() -> None:
    assert len(list(RECORDS.iterdir())) == len(names())


def test_differences_are_found() -> None:
    old = [{"request": "r", "tokens": "1 2 3", "logprobs": "-0.10000 -0.20000", "top": "5:-0.10000 6:-0.20000"}]
    assert not differences(old, old, within=0.0)
    for key, value, line in (
        ("tokens", "1 2 4", "r: tokens[2]: expected 3, found 4"),
        ("tokens", "1 2", "r: tokens: expected 3 values, found 2"),
        ("logprobs", "-0.10000 -0.21000", "r: logprobs[1]: expected -0.20000, found -0.21000"),
        ("top", "5:-0.10000 7:-0.20000", "r: top[1]: expected 6:-0.20000, found 7:-0.20000"),
    ):
        assert differences(old, [old[0] | {key: value}], within=0.001) == [line]
    assert not differences(old, [old[0] | {"logprobs": "-0.10000 -0.20050"}], within=0.001)
    assert differences(old, [], within=0.001) == ["0 answers, expected 1"]
