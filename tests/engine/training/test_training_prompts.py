"""What a file says, and what is wrong with it; what the model asks itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.types.errors import RequestError, SpecError
from engine.training.answers import PART, SelfAsker
from engine.training.prompts import Conversation, opening, read_conversations
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import MakeModel, MakeRunner


class FakeWords:
    """A token for each character; `[role:content]` for each message."""

    def __init__(self, *, has_template: bool = True) -> None:
        self._has_template = has_template

    def chat(self, messages: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        if not self._has_template:
            raise RequestError("this model has no chat template", param="messages")
        said = "".join(f"[{message['role']}:{message['content']}]" for message in messages)
        return said + ("[assistant:" if opens_answer else "")

    def encode(self, text: str, *, is_whole: bool) -> list[int]:
        return [*([1] if is_whole else []), *(ord(letter) % VOCAB_SIZE for letter in text)]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(FakeWords().encode(text, is_whole=False))


def _read(path: Path, *lines: object) -> list[Conversation]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_conversations(path, FakeWords())


def test_chats_prompts_texts_and_lines_of_a_batch(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "a"}]
    found = _read(
        tmp_path / "data.jsonl",
        {"messages": asked},
        "",
        {"messages": [*asked, {"role": "assistant", "content": "b"}]},
        {"prompt": "cd"},
        {"text": "ef"},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": asked, "n": 1}},
    )
    opened = _ids("[user:a][assistant:")
    assert found == [
        Conversation(opened, len(opened)),
        Conversation((*opened, *_ids("b]")), len(opened), is_answered=True),
        Conversation((1, *_ids("cd")), 3),
        Conversation((1, *_ids("ef")), 1, is_answered=True),
        Conversation(opened, len(opened)),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"data.jsonl:2: no JSON: Expecting property name"),
        ("[1]", r"data.jsonl:2: neither messages, nor a prompt, nor a text; each line is a JSON object"),
        ('{"messages": []}', r"data.jsonl:2: neither messages"),
        ('{"messages": ["a"]}', r"data.jsonl:2: neither messages"),
        ('{"messages": [{"role": "user"}]}', r"data.jsonl:2: 'content'"),
        ('{"prompt": ""}', r"data.jsonl:2: neither messages"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        _read(tmp_path / "data.jsonl", {"prompt": "a"}, line)


def test_a_file_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is nothing in it"):
        _read(tmp_path / "data.jsonl", "", "")
    with pytest.raises(SpecError, match="cannot be read as text"):
        read_conversations(tmp_path / "none.jsonl", FakeWords())


def test_a_model_without_a_template_needs_a_file() -> None:
    assert opening(FakeWords()) == list(_ids("[user:"))
    with pytest.raises(SpecError, match="the model has no chat template that opens a user's turn; give a file"):
        opening(FakeWords(has_template=False))


def test_a_model_asks_itself_what_users_would(tiny_model: MakeModel, make_runner: MakeRunner, one_thread: None) -> None:
    """Prompts that came to an end, each once; a function of seed and part."""
    directory, _ = tiny_model("llama", eos_token_id=[5, 6, 7, 8, 9, 10, 11])
    runner = make_runner(directory, num_blocks=2048)

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids[:1]))  # many are alike

    asker = SelfAsker(FakeWords(), decode, seed=4)
    found = asker.part(1, runner)
    assert 2 < len(found) < PART
    assert all(PART <= number < 2 * PART for number in found)
    said = {one.tokens for one in found.values()}
    assert len(said) == len(found)
    assert all(one.tokens == _ids("[user:") + one.tokens[6:] and not one.is_answered for one in found.values())
    assert asker.part(1, runner) == found
    assert asker.part(0, runner).keys() != found.keys()
