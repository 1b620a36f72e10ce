"""Drafted tokens are drawn as the sequence's own will be: at the same number for the same position.

Where the drafting model's distribution is the target's, so is every token. Where they differ, tokens agree as often as
the two cumulative distributions have the same token at a number drawn evenly.
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

NUM_DEGREES = 16  # of confidence; those of tokens that are drawn at random are another kind than those that are not


class DrawnTokens:
    """Owned by the step thread. How tokens of sequences are drafted from a model's logits. What is asked of a sequence
    beyond temperature, top-k, top-p and min-p is not asked of its drafts: penalties, rules and grammars judge them when
    they are verified."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[Sequence, SamplingRow] = WeakKeyDictionary()

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
            return _drawn(places_R, chances_R, most_R.isfinite(), [0] * len(sequences), ids_V)
        rows = [self._row(sequence).behind(place) for sequence in sequences]
        temperatures = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        given_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device).unsqueeze(-1)
        log_norms_R1 = given_RV.logsumexp(dim=-1, keepdim=True)
        sampled_R = torch.as_tensor(sample(logits_RV, rows).token_ids, device=logits_RV.device).long()
        places_R = sampled_R.clamp_min(0)
        chances_R = (given_RV.gather(-1, places_R.unsqueeze(-1)) - log_norms_R1).exp().squeeze(-1)
        kinds = [NUM_DEGREES * (not row.sampling.is_greedy) for row in rows]
        return _drawn(places_R, chances_R, sampled_R >= 0, kinds, ids_V)

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
    """kinds: of the rows, at no confidence."""
    ids_R = places_R if ids_V is None else ids_V[places_R]
    degrees_R = (chances_R * NUM_DEGREES).nan_to_num().clamp(0, NUM_DEGREES - 1).long()
    found = zip(ids_R.tolist(), degrees_R.tolist(), is_drawn_R.tolist(), kinds, strict=True)
    return [(token, kind + degree) if is_drawn else None for token, degree, is_drawn, kind in found]
