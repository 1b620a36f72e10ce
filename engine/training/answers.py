"""The model's own answers, which heads are trained on: made by the engine in parts, each of which is a file.

A part is there whole or not at all, and is a function of the run and its number: what was interrupted goes on with the
part that is missing. Of every 16 conversations one is held out; it is answered greedily, as are half of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from core.process.atomic_file import write_whole
from core.types.request import Sampling
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from engine.training.prompts import Conversation, Words, chat_prompt, opening

PART = 128  # conversations
_HELD_OUT_EVERY = 16
_MAX_PROMPT = 128  # tokens, of a prompt that the model makes
_PROMPT_TEMPERATURE = 0.8
_TEMPERATURE = 0.7  # of every second answer
_SEEDS = 1 << 32  # of a run


@dataclass(frozen=True)
class OwnAnswer:
    """A conversation with its answer."""

    number: int
    tokens: tuple[int, ...]
    num_prompt: int

    @property
    def is_held_out(self) -> bool:
        return self.number % _HELD_OUT_EVERY == 0

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt


class Asker(Protocol):
    """Where conversations come from."""

    def part(self, number: int, runner: ModelRunner) -> dict[int, Conversation]:
        """Those of one part, by their number in the run. Empty: there are no more."""
        ...


@dataclass(frozen=True)
class FileAsker:
    """Implements Asker: the lines of a file."""

    conversations: Sequence[Conversation]

    def part(self, number: int, runner: ModelRunner) -> dict[int, Conversation]:
        first = number * PART
        return dict(enumerate(self.conversations[first : first + PART], first))


class SelfAsker:
    """Implements Asker: prompts by the model itself. One that comes to no end in time is passed over."""

    def __init__(self, words: Words, decode: Decode, seed: int) -> None:
        """Raises SpecError for a model that cannot."""
        self._words = words
        self._decode = decode
        self._seed = seed
        self._opening = opening(words)

    def part(self, number: int, runner: ModelRunner) -> dict[int, Conversation]:
        numbers = range(number * PART, (number + 1) * PART)
        base = Sampling(max_tokens=_MAX_PROMPT, temperature=_PROMPT_TEMPERATURE, stop_token_ids=_ends(runner))
        samplings = [replace(base, seed=_seed(self._seed, "prompt", i)) for i in numbers]
        said = generate(runner, [self._opening] * len(numbers), samplings)
        found: dict[str, int] = {}
        for i, tokens in zip(numbers, said, strict=True):
            text = self._decode([token.token_id for token in tokens[:-1]]).strip()
            if tokens[-1].token_id in base.stop_token_ids and text:
                found.setdefault(text, i)
        return {i: chat_prompt(self._words, text) for text, i in found.items()}


class Decode(Protocol):
    """Token ids to text."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class AnswerParts:
    """The parts of a run, in a directory."""

    def __init__(self, directory: Path, asker: Asker, *, seed: int, max_tokens: int) -> None:
        """max_tokens: of an answer."""
        self._directory = directory
        self._asker = asker
        self._seed = seed
        self._max_tokens = max_tokens

    def existing(self) -> Iterator[list[OwnAnswer]]:
        """Part by part, those that there are."""
        return _existing(self._directory)

    def make(self, number: int, runner: ModelRunner) -> list[OwnAnswer]:
        """Another part. Empty: there are no more conversations."""
        asked = self._asker.part(number, runner)
        room = runner.max_tokens - 1
        asked = {i: cut for i, one in asked.items() if (cut := _cut(one, room)) is not None}
        waiting = {i: one for i, one in asked.items() if not one.is_answered}
        said = generate(runner, [one.tokens for one in waiting.values()], [self._sampling(i, runner) for i in waiting])
        for (i, one), tokens in zip(waiting.items(), said, strict=True):
            asked[i] = replace(one, tokens=(*one.tokens, *(token.token_id for token in tokens)))
        answers = [OwnAnswer(i, one.tokens, one.num_prompt) for i, one in asked.items()]
        if answers:
            lines = [json.dumps({"number": a.number, "num_prompt": a.num_prompt, "tokens": a.tokens}) for a in answers]
            write_whole(self._path(number), "\n".join(lines) + "\n")
        return answers

    def _sampling(self, number: int, runner: ModelRunner) -> Sampling:
        return Sampling(
            max_tokens=self._max_tokens,
            temperature=_TEMPERATURE if number % 2 else 0.0,
            seed=_seed(self._seed, "answer", number),
            stop_token_ids=_ends(runner),
        )

    def _path(self, number: int) -> Path:
        return _path(self._directory, number)


def held_out_prompts(directory: Path) -> list[list[int]]:
    """Of a run in this directory, what was asked of which it has learnt nothing. Empty: there is no run."""
    answers = (answer for part in _existing(directory / "training") for answer in part)
    return [list(one.tokens[: one.num_prompt]) for one in answers if one.is_held_out]


def _existing(directory: Path) -> Iterator[list[OwnAnswer]]:
    number = 0
    while (path := _path(directory, number)).exists():
        yield _read(path)
        number += 1


def _path(directory: Path, number: int) -> Path:
    return directory / f"answers-{number:05}.jsonl"


def _cut(one: Conversation, room: int) -> Conversation | None:
    """As much as fits; None where there is no room for an answer."""
    tokens = one.tokens[:room] if one.is_answered else one.tokens
    return replace(one, tokens=tokens) if one.num_prompt < min(room, len(tokens) + (not one.is_answered)) else None


def _read(path: Path) -> list[OwnAnswer]:
    lines = map(json.loads, path.read_text().splitlines())
    return [OwnAnswer(line["number"], tuple(line["tokens"]), line["num_prompt"]) for line in lines]


def _ends(runner: ModelRunner) -> tuple[int, ...]:
    return tuple(runner.config.eos_token_ids)


def _seed(run: int, what: str, number: int) -> int:
    return (run % _SEEDS << 31) + (number << 1) + (what == "answer")
