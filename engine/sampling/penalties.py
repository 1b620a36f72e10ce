"""Penalties of one sequence, updated as it grows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from core.types.request import Sampling

# N distinct penalised tokens

_ROOM = 64  # minimum number of appended tokens between two sorts
_STRETCH = 1024  # tokens; see engine/cpu/choice.h
# Penalties up to this value turn no logit into a NaN, finite or not.
_USUAL = 1e6

# engine/cpu/choice.h: RowPenalties
_ROW = np.dtype(
    [
        ("token_ids", np.int64),
        ("taken", np.int64),
        ("tokens", np.int64),
        ("sorted", np.int64),
        ("stretches", np.int64),
        ("bits", np.int64),
        ("begins", np.int64),
        ("stays", np.int64),
        ("only_lowers", np.int64),
        ("repetition", np.float64),
    ]
)


class Penalties:
    """Penalised tokens of a sequence, each once, with the amount subtracted after the repetition penalty.

    Owned by the step thread. Each step adds the new tokens, usually one.
    """

    def __init__(self, sampling: Sampling, tokens: Seq[int], num_prompt_tokens: int) -> None:
        """tokens: the sequence's list, which keeps growing."""
        self.repetition = sampling.repetition_penalty
        # False if only the greatest penalised logit is used.
        self.is_read = not sampling.is_greedy
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._takes = bool(self._presence or self._frequency)
        self._tokens = tokens
        self._num_noted = num_prompt_tokens
        prompt = sorted(set(tokens[:num_prompt_tokens])) if sampling.repetition_penalty != 1.0 else []
        self._counts = dict.fromkeys(prompt, 0)  # times generated, if that matters
        self._ids = np.array(prompt, dtype=np.int32)
        self._taken = np.zeros(len(prompt), dtype=np.float32)
        self._row = np.zeros(1, dtype=_ROW)
        self.address = self._row.ctypes.data  # of the kernel's `RowPenalties`
        self._row["stays"] = not self.is_read and _are_usual(sampling)
        self._row["only_lowers"] = self.repetition >= 1 and min(self._presence, self._frequency) >= 0
        self._row["repetition"] = self.repetition
        self._row["tokens"] = len(prompt)
        self._sort(len(prompt))

    def __len__(self) -> int:
        """Return N, the number of penalised tokens."""
        return len(self._counts)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Penalised tokens (N,)."""
        return self._ids[: len(self)]

    @property
    def taken(self) -> NDArray[np.float32]:
        """Amounts (N,) to subtract from their logits."""
        return self._taken[: len(self)]

    def note(self) -> None:
        """Add the tokens that were appended since the last call."""
        num_tokens = len(self._tokens)
        for i in range(self._num_noted, num_tokens):
            token = self._tokens[i]
            count = self._counts.get(token)
            if count is None:
                count = 0
                self._add(token)
            if self._takes:
                self._counts[token] = count + 1
                self._taken[self._place(token)] = self._presence + self._frequency * np.float32(count + 1)
        self._num_noted = num_tokens

    def _add(self, token: int) -> None:
        place = len(self._counts)
        if place == len(self._ids) or token >> 3 >= len(self._bits):
            self._sort(place, token)
        self._counts[token] = 0
        self._ids[place] = token
        self._unsorted[token] = place
        self._bits[token >> 3] |= 1 << (token & 7)
        self._row["tokens"] = place + 1

    def _place(self, token: int) -> int:
        place = self._unsorted.get(token)
        return place if place is not None else int(self._ids[: self._num_sorted].searchsorted(token))

    def _sort(self, count: int, most: int = 0) -> None:
        """Sort the first `count` tokens and make room for more, and for ids up to `most`."""
        order, more = self._ids[:count].argsort(), max(_ROOM, count // 8)
        self._ids, self._taken = np.pad(self._ids[order], (0, more)), np.pad(self._taken[order], (0, more))
        self._num_sorted, self._unsorted = count, dict[int, int]()
        most = max(most, int(self._ids[:count].max(initial=0)))
        num_stretches = 1 << (most // _STRETCH).bit_length()
        marks = np.zeros(num_stretches * _STRETCH, dtype=np.bool_)
        marks[self._ids[:count]] = True
        bits = np.packbits(marks, bitorder="little")
        self._bits = bits.data
        self._begins = self._ids[:count].searchsorted(np.arange(num_stretches + 1) * _STRETCH).astype(np.int32)
        self._row["token_ids"], self._row["taken"] = self._ids.ctypes.data, self._taken.ctypes.data
        self._row["bits"], self._row["begins"] = bits.ctypes.data, self._begins.ctypes.data
        self._row["sorted"], self._row["stretches"] = count, num_stretches


def _are_usual(sampling: Sampling) -> bool:
    taken = abs(sampling.presence_penalty), abs(sampling.frequency_penalty)
    return 1 / _USUAL <= sampling.repetition_penalty <= _USUAL and max(taken) <= _USUAL
