"""What the model has computed of a part of the answers, on disk: computing it once costs as much as a step of training
on it, and every text is trained on several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from core.process.atomic_file import move_whole
from engine.training.answers import OwnAnswer
from engine.training.teacher import HiddenStates, Teacher

_AT_ONCE = 1024  # tokens


@dataclass(frozen=True)
class CachedAnswer:
    """An answer of whose tokens is known what the model has computed."""

    answer: OwnAnswer
    first: int  # of its tokens, in the file
    file: Any  # that is open

    def features(self) -> HiddenStates:
        """Read from the file."""
        span = slice(self.first, self.first + len(self.answer.tokens))
        return HiddenStates(self.file.get_slice("fused")[span], self.file.get_slice("last")[span])


def cached(
    path: Path, answers: Sequence[OwnAnswer], teacher: Callable[[], Teacher], *, told: Callable[[int], None]
) -> list[CachedAnswer]:
    """The answers with their features, which are computed where the file is not there yet; it is whole or is not.

    told: the tokens that are done, now and then."""
    if not path.exists():
        _write(path, answers, teacher(), told)
    file = safe_open(path, framework="pt")
    firsts = accumulate((len(answer.tokens) for answer in answers), initial=0)
    return [CachedAnswer(answer, first, file) for answer, first in zip(answers, firsts, strict=False)]


def bytes_per_token(hidden_size: int) -> int:
    """Of a file."""
    return 4 * hidden_size * torch.bfloat16.itemsize


def _write(path: Path, answers: Sequence[OwnAnswer], teacher: Teacher, told: Callable[[int], None]) -> None:
    fused: list[Tensor] = []
    last: list[Tensor] = []
    waiting: list[Sequence[int]] = []
    for i, answer in enumerate(answers):
        waiting.append(answer.tokens)
        if i + 1 < len(answers) and sum(map(len, waiting)) + len(answers[i + 1].tokens) <= _AT_ONCE:
            continue
        for features in teacher.features(waiting):
            fused.append(features.fused_TE3)
            last.append(features.last_TE)
        told(sum(map(len, waiting)))
        waiting = []
    made = path.with_name(f".{path.name}")
    save_file({"fused": torch.cat(fused), "last": torch.cat(last)}, made)
    move_whole(made, path)
