"""best_of: selection of the choices with the highest mean log-probability, as in OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from frontend.text.events import Delta, Event, Finished


async def best_of(
    events: AsyncIterator[list[Event]], *, num_best: int, shows_logprobs: bool
) -> AsyncIterator[list[Event]]:
    """Yield the events of the best choices, renumbered, once all choices have ended; then the summary.

    events: their tokens must have logprobs, which are removed unless shows_logprobs.
    """
    collected: dict[int, list[Delta | Finished]] = {}
    async for arrived in events:
        for event in arrived:
            if isinstance(event, Delta | Finished):
                collected.setdefault(event.choice, []).append(event)
                continue
            best = sorted(collected, key=lambda choice: (-_mean_logprob(collected[choice]), choice))
            for number, choice in enumerate(best[:num_best]):
                yield [_shown(one, number, shows_logprobs=shows_logprobs) for one in collected[choice]]
            yield [event]


def _mean_logprob(events: list[Delta | Finished]) -> float:
    found = [t.logprob.logprob for one in events if isinstance(one, Delta) for t in one.tokens if t.logprob]
    return sum(found) / len(found)


def _shown(event: Delta | Finished, number: int, *, shows_logprobs: bool) -> Event:
    if isinstance(event, Finished) or shows_logprobs:
        return replace(event, choice=number)
    return replace(event, choice=number, tokens=[replace(token, logprob=None) for token in event.tokens])
