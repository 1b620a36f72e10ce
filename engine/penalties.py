"""What penalties do to the logits of one sequence, kept while it grows."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from cluster.words.request import Sampling

# N distinct tokens that have a penalty

_ROOM = 64  # for tokens that come


class Penalties:
    """The tokens that a sequence has penalties for, each once, and how much is taken from each one's logit after the
    repetition penalty. Owned by the step thread. A step adds what is new: mostly one token."""

    def __init__(self, sampling: Sampling, tokens: Seq[int], num_prompt_tokens: int) -> None:
        """tokens: the sequence's own, which will grow."""
        self.repetition = sampling.repetition_penalty
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._takes = bool(self._presence or self._frequency)
        self._tokens = tokens
        self._num_noted = num_prompt_tokens
        prompt = sorted(set(tokens[:num_prompt_tokens])) if sampling.repetition_penalty != 1.0 else []
        self._place_of = {token: place for place, token in enumerate(prompt)}
        self.num_sorted = len(prompt)  # of token_ids: these ascend
        self._counts = [0] * len(prompt)  # how often each was generated
        self._ids = np.array(prompt, dtype=np.int32)
        self._taken = np.zeros(len(prompt), dtype=np.float32)
        self._make_room()

    def __len__(self) -> int:
        """N"""
        return len(self._place_of)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of both arrays."""
        return self._addresses

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(N,)"""
        return self._ids[: len(self)]

    @property
    def taken(self) -> NDArray[np.float32]:
        """(N,)"""
        return self._taken[: len(self)]

    def note(self) -> None:
        """The tokens that have come since the last call."""
        for token in self._tokens[self._num_noted :]:
            place = self._place_of.setdefault(token, len(self._counts))
            if place == len(self._counts):
                self._counts.append(0)
                if place == len(self._ids):
                    self._make_room()
                self._ids[place] = token
            self._counts[place] += 1
            if self._takes:
                self._taken[place] = self._presence + self._frequency * np.float32(self._counts[place])
        self._num_noted = len(self._tokens)

    def _make_room(self) -> None:
        more = max(_ROOM, len(self._ids))
        self._ids, self._taken = np.pad(self._ids, (0, more)), np.pad(self._taken, (0, more))
        self._addresses = self._ids.ctypes.data, self._taken.ctypes.data
