"""Log-probabilities of prompt tokens in the formats of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw

from core.types.prompt_logprobs import PromptLogprobs
from frontend.http.event_stream import to_json
from frontend.openai.forms import LOWEST_LOGPROB, Form, finite
from frontend.text.choice_text import Detokenizer
from frontend.text.completion import Completion
from frontend.text.tokenizer import Tokenizer

_MANY = 1024  # log-probabilities, some 3 ms of encoding; more go to another thread
_Entry = tuple[int, float, int]  # token id, log-probability, rank


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Prompt log-probabilities of a response; None where not requested."""

    listed: list[Any] | None = None  # vLLM's `prompt_logprobs`
    echoed: dict[str, list[Any]] | None = None  # OpenAI's `logprobs` of a repeated prompt

    def before(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Prepend the prompt's log-probabilities to those of an answer."""
        if self.echoed is None:
            return logprobs
        return {name: column + (logprobs[name] if logprobs else []) for name, column in self.echoed.items()}


async def prompt_scores(completion: Completion, form: Form, *, num_listed: int | None) -> PromptScores:
    """Return the prompt's scores, once its completion has yielded events. num_listed: most likely tokens in
    `prompt_logprobs`; None: not requested. Encodes many scores on another thread. Raises CapacityError."""
    if (prompt_logprobs := completion.prompt_logprobs) is None:
        return PromptScores()
    service, num_echoed = completion.service, form.num_echo_logprobs
    writer = _PromptWriter(service.tokenizer, completion.prompt_ids, prompt_logprobs)

    def write() -> PromptScores:
        return PromptScores(
            listed=None if num_listed is None else writer.listed(num_listed),
            echoed=None if num_echoed is None else writer.echoed(num_echoed, echo=form.echo),
        )

    if completion.num_prompt_numbers < _MANY:
        return write()
    return await service.threads.run(completion.request.key_id, write)


@dataclass(frozen=True)
class _PromptWriter:
    """Encoder for one prompt. Each token's scores are encoded to JSON at once: as Python objects, all of them would
    take a hundred times the memory."""

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    prompt_logprobs: PromptLogprobs

    def listed(self, num_top: int) -> list[Any]:
        """Return vLLM's format: null for the first token, then an object keyed by token id for each."""
        return [None, *(Raw(to_json(self._by_id(entries))) for entries in self._entries(num_top))]

    def echoed(self, num_top: int, *, echo: str) -> dict[str, list[Any]]:
        """Return OpenAI's format; the first token's entries are null."""
        logprobs: list[float | None] = [None]
        likeliest: list[Raw | None] = [None]
        for entries in self._entries(num_top):
            logprobs.append(finite(entries[0][1]))
            likeliest.append(Raw(to_json(self._by_text(entries))))
        return {
            "tokens": [self.tokenizer.token_text(token_id) for token_id in self.prompt_ids],
            "token_logprobs": logprobs,
            "top_logprobs": likeliest,
            "text_offset": self._offsets(echo),
        }

    def _entries(self, num_top: int) -> Iterator[list[_Entry]]:
        """Yield the scores of each token after the first: its own, then the most likely ones."""
        tokens = iter(self.prompt_ids[1:])
        # Converted to lists, because numpy scalars are slow to access one by one.
        for part in self.prompt_logprobs.parts():
            columns = (part.logprobs_P, part.ranks_P, part.top_ids_PK[:, :num_top], part.top_logprobs_PK[:, :num_top])
            for logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True):
                yield [(next(tokens), logprob, rank), *zip(ids, values, range(1, len(ids) + 1), strict=True)]

    def _by_id(self, entries: list[_Entry]) -> dict[str, Any]:
        text_of = self.tokenizer.token_text
        return {
            str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": text_of(token_id)}
            for token_id, value, rank in entries
        }

    def _by_text(self, entries: list[_Entry]) -> dict[str, float]:
        """Map texts to log-probabilities. Tokens of the same text keep the highest."""
        logprobs: dict[str, float] = {}
        for token_id, value, _ in entries:
            text = self.tokenizer.token_text(token_id)
            logprobs[text] = max(finite(value), logprobs.get(text, LOWEST_LOGPROB))
        return logprobs

    def _offsets(self, echo: str) -> list[int]:
        detokenizer, ends = Detokenizer(self.tokenizer, skip_special_tokens=False), [0]
        for token_id in self.prompt_ids:
            ends.append(ends[-1] + len(detokenizer.add(token_id)))
        # Subtract the prefix that the tokenizer adds before the text.
        num_before = max(0, ends[-1] + len(detokenizer.finish()) - len(echo))
        return [max(0, end - num_before) for end in ends[:-1]]
