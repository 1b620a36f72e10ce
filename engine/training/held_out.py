"""What a head gives on answers that it was not trained on: greedily, as an engine would go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.training.batches import batch_of, in_order
from engine.training.hidden_states_file import CachedAnswer
from engine.training.learner import Learner

# N answer tokens, K places of a draft


@dataclass(frozen=True)
class HeldOutAcceptance:
    """Of drafts of the same length behind each other."""

    num_tokens: int  # of the answers, less their first ones
    num_steps: int  # that they took
    mean_length: float  # tokens of a step: those accepted, and the one that comes anyway
    by_place: list[float]  # share of the drafts whose token at the place, and all before it, was accepted

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, answers: Sequence[Sequence[Sequence[bool]]]) -> HeldOutAcceptance:
        """answers: of each, for each of its tokens but the first, which places of a draft made there are right."""
        steps, tokens = 0, 0
        num_places = len(answers[0][0]) if answers and answers[0] else 0
        accepted = [0] * num_places
        for answer in answers:
            place = 0
            while place < len(answer):
                right = answer[place]
                num_right = next((i for i, is_right in enumerate(right) if not is_right), len(right))
                for i in range(num_right):
                    accepted[i] += 1
                steps += 1
                place += 1 + num_right
            tokens += len(answer)
        shares = [count / max(1, steps) for count in accepted]
        return cls(tokens, steps, tokens / max(1, steps), shares)


def acceptance(learner: Learner, texts: Sequence[CachedAnswer]) -> HeldOutAcceptance:
    """Of every text's answer."""
    answers: list[list[list[bool]]] = []
    for group in in_order(texts):
        batch = batch_of(group)
        is_right_NK = _right(batch.tokens_BT, batch.row_N, batch.place_N, learner.guesses(batch), group)
        counts = torch.bincount(batch.row_N, minlength=len(group)).tolist()
        # An answer's first token is the prompt's step's: nothing was drafted before it.
        answers += [part[1:].tolist() for part in torch.split(is_right_NK, counts) if len(part) > 1]
    return HeldOutAcceptance.of(answers)


def _right(
    tokens_BT: Tensor, row_N: Tensor, place_N: Tensor, guesses_NK: Tensor, group: Sequence[CachedAnswer]
) -> Tensor:
    lengths_N = torch.tensor([len(text.answer.tokens) for text in group])[row_N]
    num_tokens = tokens_BT.shape[1]
    columns = []
    for k in range(guesses_NK.shape[1]):
        at_N = place_N + 1 + k
        is_there_N = at_N < lengths_N
        columns.append(is_there_N & (tokens_BT[row_N, at_N.clamp_max(num_tokens - 1)] == guesses_NK[:, k]))
    return torch.stack(columns, dim=1)
