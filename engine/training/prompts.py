"""What the model is asked, so that there are answers to learn from: by a file's lines, or by itself.

A chat model has been trained on users' turns, too. Where its template opens one and nothing follows, it goes on as a
user would have (Xu et al. 2024, arXiv:2406.08464): with as many different prompts as there are seeds, and no data set.

A file has a JSON object on each line, one of

    {"messages": [...]}         a chat; it is answered, unless its last message is an answer, which stands then
    {"prompt": "..."}           a text that the model goes on with
    {"text": "..."}             a text to be learnt as it is
    {"body": {...}}             a line as `cluster batch` takes it, whose body is one of the first two
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from core.types.errors import ClusterError, SpecError

_MARK = "PROMPT-GOES-HERE-91c3"
_NO_OPENING = "--data self: the model has no chat template that opens a user's turn; give a file"


class Words(Protocol):
    """A model's way from conversations and texts to token ids."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, opens_answer: bool) -> str:
        """By the model's template. Raises ClusterError."""
        ...

    def encode(self, text: str, *, is_whole: bool) -> list[int]:
        """is_whole: with what the model wants at the beginning of a text, and a template has already."""
        ...


@dataclass(frozen=True)
class Conversation:
    """Token ids, of which the first so many are no answer of the model's."""

    tokens: tuple[int, ...]
    num_prompt: int
    is_answered: bool = False


def opening(words: Words) -> list[int]:
    """What comes before a user's first word: the model goes on with a prompt. Raises SpecError without a template."""
    try:
        before, mark, _ = words.chat([{"role": "user", "content": _MARK}], opens_answer=True).partition(_MARK)
    except ClusterError as error:
        raise SpecError(_NO_OPENING) from error
    if not mark:
        raise SpecError(_NO_OPENING)
    return words.encode(before, is_whole=False)


def chat_prompt(words: Words, said: str) -> Conversation:
    """Of one user's turn."""
    tokens = words.encode(words.chat([{"role": "user", "content": said}], opens_answer=True), is_whole=False)
    return Conversation(tuple(tokens), len(tokens))


def read_conversations(path: Path, words: Words, option: str = "--data") -> list[Conversation]:
    """Of each line of a file. Raises SpecError with the number of the first line that is none. option: by which it was
    named."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{option} {path}: cannot be read as text: {error}") from error
    found = [_conversation(f"{path}:{number}", line, words) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SpecError(f"{option} {path}: there is nothing in it")
    return found


def _conversation(where: str, line: str, words: Words) -> Conversation:
    try:
        said = json.loads(line)
    except ValueError as error:
        raise SpecError(f"{where}: no JSON: {error}") from None
    if isinstance(said, dict) and isinstance(said.get("body"), dict):
        said = said["body"]
    match said:
        case {"messages": [*_, dict()] as messages} if all(isinstance(one, dict) for one in messages):
            return _chat(where, messages, words)
        case {"prompt": str(prompt)} if prompt:
            tokens = words.encode(prompt, is_whole=True)
            return Conversation(tuple(tokens), len(tokens))
        case {"text": str(text)} if text:
            return Conversation(tuple(words.encode(text, is_whole=True)), 1, is_answered=True)
    raise SpecError(f"{where}: neither messages, nor a prompt, nor a text; each line is a JSON object with one of them")


def _chat(where: str, messages: Sequence[Mapping[str, Any]], words: Words) -> Conversation:
    try:
        if messages[-1].get("role") != "assistant":
            tokens = words.encode(words.chat(messages, opens_answer=True), is_whole=False)
            return Conversation(tuple(tokens), len(tokens))
        asked = words.encode(words.chat(messages[:-1], opens_answer=True), is_whole=False)
        whole = words.encode(words.chat(messages, opens_answer=False), is_whole=False)
    except (ClusterError, KeyError) as error:
        raise SpecError(f"{where}: {error}") from error
    return Conversation(tuple(whole), min(len(asked), len(whole)), is_answered=True)
