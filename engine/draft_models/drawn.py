"""Drafted tokens are drawn as the sequence's own will be: at the same number for the same position.

Where the drafting model's distribution is the target's, so is every token. Where they differ, tokens agree as often as
the two cumulative distributions have the same token at a number drawn evenly. Of a model that is little alike, its
likeliest token is right more often than that; so it is learnt, by temperature, which of the two is to be taken.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.likeliest import likeliest
from engine.sampler import sample
from engine.sampling import SamplingRow
from engine.sequence import Sequence

# R rows, V vocabulary

NUM_DEGREES = 16  # of confidence
_GREEDY, _DRAWN, _LIKELIEST = range(3)  # kinds of tokens: of who draws none; of who does, drawn, and not
_KEEP = 0.98  # weight of the past at each time that the two are not the same and one of them is right
_EVIDENCE = 4.0  # times more that the likeliest has been right than what was drawn


class DrawnTokens:
    """Owned by the step thread. How tokens of sequences are drafted from a model's logits. What is asked of a sequence
    beyond temperature, top-k, top-p and min-p is not asked of its drafts: penalties, rules and grammars judge them when
    they are verified."""

    def __init__(self, *, learns: bool = True) -> None:
        """learns: else every token of who draws is drawn."""
        self._rows: WeakKeyDictionary[Sequence, SamplingRow] = WeakKeyDictionary()
        self._learns = learns
        self._balance: dict[float, float] = {}  # by temperature, in tenths: above 0 where the likeliest is right
        self._said: WeakKeyDictionary[Sequence, tuple[int, int, int]] = WeakKeyDictionary()

    def draw(
        self, logits_RV: Tensor, sequences: Seq[Sequence], place: int, *, ids_V: Tensor | None = None
    ) -> list[tuple[int, int] | None]:
        """Of each the token behind so many drafted ones, and its kind (see Proposal): how sure the model is. None where
        the logits are not finite. Waits for the device.

        logits_RV: fp32, may be overwritten; ids_V: of which tokens they are, on the same device; None: of all. Where
        they ascend, that gives what all would if the others' logits were far below."""
        if all(sequence.sampling_row.sampling.is_greedy for sequence in sequences):
            places_R, most_R = likeliest(logits_RV, {})
            chances_R = 1.0 / (logits_RV - most_R.unsqueeze(-1)).exp().sum(dim=-1)
            return _drawn(places_R, chances_R, most_R.isfinite(), [_GREEDY] * len(sequences), ids_V)
        rows = [self._row(sequence).behind(place) for sequence in sequences]
        temperatures = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        given_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device).unsqueeze(-1)
        log_norms_R1 = given_RV.logsumexp(dim=-1, keepdim=True)
        likeliest_R = given_RV.argmax(dim=-1)
        drawn_R = torch.as_tensor(sample(logits_RV, rows).token_ids, device=logits_RV.device).long()
        if place == 0 and self._learns:
            ids = [_ids(places_R, ids_V).tolist() for places_R in (drawn_R.clamp_min(0), likeliest_R)]
            self._learn(sequences, *ids)
        kinds = [_GREEDY if row.sampling.is_greedy else self._kind(row.sampling.temperature) for row in rows]
        takes_likeliest_R = torch.tensor([kind == _LIKELIEST for kind in kinds], device=logits_RV.device)
        places_R = torch.where(takes_likeliest_R, likeliest_R, drawn_R.clamp_min(0))
        chances_R = (given_RV.gather(-1, places_R.unsqueeze(-1)) - log_norms_R1).exp().squeeze(-1)
        return _drawn(places_R, chances_R, drawn_R >= 0, kinds, ids_V)

    def _kind(self, temperature: float) -> int:
        return _LIKELIEST if self._balance.get(round(temperature, 1), 0.0) > _EVIDENCE else _DRAWN

    def _learn(self, sequences: Seq[Sequence], drawn: Seq[int], likeliest: Seq[int]) -> None:
        """From what became of the last time that each was asked about: both would have been a draft's first token."""
        for sequence, *both in zip(sequences, drawn, likeliest, strict=True):
            if sequence.sampling_row.sampling.is_greedy:
                continue
            position, *before = self._said.get(sequence, (len(sequence.tokens), -1, -1))
            self._said[sequence] = len(sequence.tokens), *both
            if position >= len(sequence.tokens) or before[0] == before[1]:
                continue
            if (token := sequence.tokens[position]) in before:
                key = round(sequence.sampling_row.sampling.temperature, 1)
                gain = 1.0 if token == before[1] else -1.0
                self._balance[key] = self._balance.get(key, 0.0) * _KEEP + gain

    def _row(self, sequence: Sequence) -> SamplingRow:
        row = self._rows.get(sequence)
        if row is None:
            own = sequence.sampling_row
            sampling = replace(
                own.sampling,
                min_tokens=0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                num_logprobs=None,
                token_rules=None,
            )
            row = self._rows[sequence] = SamplingRow(
                sampling=sampling, seed=own.seed, tokens=sequence.tokens, num_prompt_tokens=own.num_prompt_tokens
            )
        return row


def _drawn(
    places_R: Tensor, chances_R: Tensor, is_drawn_R: Tensor, kinds: Seq[int], ids_V: Tensor | None
) -> list[tuple[int, int] | None]:
    degrees_R = (chances_R * NUM_DEGREES).nan_to_num().clamp(0, NUM_DEGREES - 1).long()
    ids = _ids(places_R, ids_V).tolist()
    found = zip(ids, degrees_R.tolist(), is_drawn_R.tolist(), kinds, strict=True)
    return [(token, NUM_DEGREES * kind + degree) if is_drawn else None for token, degree, is_drawn, kind in found]


def _ids(places_R: Tensor, ids_V: Tensor | None) -> Tensor:
    return places_R if ids_V is None else ids_V[places_R]
