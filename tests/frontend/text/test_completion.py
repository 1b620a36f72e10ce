"""Completions over a fake cluster: requests to workers, events, and cleanup."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.errors import (
    CapacityError,
    ContextLengthExceeded,
    DeadlineExceeded,
    ReplicaLost,
    RequestError,
)
from core.types.request import FinishReason, choice_seed
from frontend.chat.chat import Chat
from frontend.text.completion import Completions
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta, Event, Finished, Summary
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import blocked_threads
from tests.support.tiny_service import MakeCompletions, outcomes


def request(prompt: Any = "The capital", **fields: Any) -> CompletionRequest:
    return CompletionRequest(id="r1", prompt=prompt, **fields)


async def run(completions: Completions, asked: CompletionRequest) -> list[Event]:
    completion = await completions.open(asked)
    async with completion.run() as arrivals:
        return [event async for arrived in arrivals for event in arrived]


def text_of(events: Sequence[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta) and event.choice == choice)


@pytest.mark.parametrize("fields", [{"n": 4}, {"best_of": 4}, {"n": 2, "best_of": 4}])
async def test_too_many_choices_name_the_field_that_was_set(
    completions: MakeCompletions, fields: dict[str, int]
) -> None:
    """The router core reports only the number of choices that run."""
    said = "a replica runs at most 3 choices of one tenant at once, not 4"
    service = completions(FakeTokenService(reject=RequestError(f"n: {said}", param="n")))
    field = [*fields][-1]
    with pytest.raises(RequestError) as rejected:
        await run(service, request(**fields))
    assert (str(rejected.value), rejected.value.param) == (f"{field}: {said}", field)


async def test_tokens_become_text_and_one_account(completions: MakeCompletions, byte_level: Tokenizer) -> None:
    fake = FakeTokenService()
    service = completions(fake)
    ids = byte_level.encode("Paris 你好 🎉")
    events = await run(service, request("Paris 你好 🎉", max_tokens=2 * len(ids)))
    assert text_of(events) == "Paris 你好 🎉" * 2
    assert [type(event) for event in events] == [Delta] * 2 * len(ids) + [Finished, Summary]
    assert events[-2] == Finished(0, FinishReason.LENGTH)
    summary = events[-1]
    assert isinstance(summary, Summary)
    assert (summary.usage.prompt_tokens, summary.usage.completion_tokens, summary.usage.cached_tokens) == (
        len(ids),
        2 * len(ids),
        3,
    )
    assert (summary.usage.accepted_prediction_tokens, summary.usage.rejected_prediction_tokens) == (2, 7)
    assert summary.route.wire_bytes == 1000
    assert 0 < summary.ttft_s < 5 and 0 < summary.itl_s < 5
    assert [kind for _, kind in fake.ended] == [None]
    assert outcomes(service) == {"completed": 1}


async def test_cached_token_counts_are_hidden_if_not_reported(completions: MakeCompletions) -> None:
    """Also hidden: shipped and fetched blocks and replica names, which follow from it."""
    service = completions(FakeTokenService())
    for is_told in (True, False):
        *_, summary = await run(service, request(max_tokens=2, reports_cached_tokens=is_told))
        assert isinstance(summary, Summary)
        route = summary.route
        told = (summary.usage.cached_tokens, route.cached_tokens, route.blocks_shipped, route.wire_bytes)
        assert told == ((3, 3, 2, 1000) if is_told else (0, 0, 0, 0))
        drafted = summary.usage.accepted_prediction_tokens, summary.usage.rejected_prediction_tokens
        assert drafted == ((2, 7) if is_told else (0, 0)), "it would reveal other anonymous clients' prompts"
        assert (route.prefill_replica, route.decode_replica) == (("prefill-0", "decode-0") if is_told else ("", ""))
        assert route.attempts == 1 and summary.usage.completion_tokens == 2


async def test_sampling_is_resolved_for_the_workers(completions: MakeCompletions, byte_level: Tokenizer) -> None:
    fake = FakeTokenService()
    await run(
        completions(fake), request(n=2, salt="acme", priority=-1, stop_token_ids=(300,), top_k=-1, temperature=1e-9)
    )
    (sent,) = fake.started
    assert sent.token_ids == tuple(byte_level.encode("The capital"))
    assert (sent.num_prompt_tokens, sent.choices, sent.salt, sent.priority) == (len(sent.token_ids), (0, 1), "acme", -1)
    assert sent.sampling.max_tokens == 256 - len(sent.token_ids)
    assert set(sent.sampling.stop_token_ids) == {300, *byte_level.eos_token_ids}
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.is_greedy) == (0.0, 0, True)
    assert sent.deadline_s is not None and 0 < sent.deadline_s <= 60
    assert sent.id.startswith("r1-")


async def test_requests_of_one_id_are_distinguished(completions: MakeCompletions) -> None:
    fake = FakeTokenService()
    service = completions(fake)
    await asyncio.gather(*(run(service, request(max_tokens=2)) for _ in range(2)))
    assert len({sent.id for sent in fake.started}) == 2


async def test_seeds(completions: MakeCompletions) -> None:
    fake = FakeTokenService()
    service = completions(fake)
    for seed in (None, None, 7, 7, -1, 2**64 - 1):
        await run(service, request(seed=seed, max_tokens=1))
    first, second, third, fourth, negative, large = [sent.sampling.seed for sent in fake.started]
    assert first != second and third == fourth == 7
    assert 0 <= negative < 2**63 and 0 <= large < 2**63
    assert choice_seed(7, 0) == 7 and len({choice_seed(7, choice) for choice in range(100)}) == 100


@pytest.mark.parametrize("include_stop", [False, True])
async def test_stop_string_across_several_tokens(
    completions: MakeCompletions, byte_level: Tokenizer, include_stop: bool
) -> None:
    fake = FakeTokenService()
    ids = byte_level.encode("abcdefgh")
    assert len(ids) > 6  # so "cdef" spans tokens
    events = await run(completions(fake), request("abcdefgh", stop=("cdef", "zzz"), include_stop=include_stop))
    assert text_of(events) == ("abcdef" if include_stop else "ab")
    assert events[-2] == Finished(0, FinishReason.STOP, "cdef")
    summary = events[-1]
    assert isinstance(summary, Summary)
    assert summary.usage.completion_tokens == len(byte_level.encode("abcdef"))  # up to the one that completed it
    assert [choice for _, choice in fake.stopped] == [0]


async def test_one_choice_stops_and_the_other_continues(completions: MakeCompletions, byte_level: Tokenizer) -> None:
    scripts = [byte_level.encode("ab#"), byte_level.encode("xyz")]
    fake = FakeTokenService(script=lambda _, choice: scripts[choice])
    events = await run(completions(fake), request(n=2, max_tokens=6, stop=("#",)))
    assert (text_of(events, 0), text_of(events, 1)) == ("ab", "xyzxyz")
    finished = [event for event in events if isinstance(event, Finished)]
    assert finished == [Finished(0, FinishReason.STOP, "#"), Finished(1, FinishReason.LENGTH)]
    after = events[events.index(finished[0]) :]
    assert not any(isinstance(event, Delta) and event.choice == 0 for event in after)
    summary = events[-1]
    assert isinstance(summary, Summary) and summary.usage.completion_tokens == 3 + 6


async def test_end_of_sequence(completions: MakeCompletions, byte_level: Tokenizer) -> None:
    fake = FakeTokenService(script=lambda *_: byte_level.encode("ab<|im_end|>c"))
    service = completions(fake)
    shown = {"skip_special_tokens": False}
    assert text_of(await run(service, request())) == "ab"
    assert text_of(await run(service, request(**shown))) == "ab"
    assert text_of(await run(service, request(**shown, include_stop=True))) == "ab<|im_end|>"
    ignored = await run(service, request(**shown, ignore_eos=True, max_tokens=4))
    assert text_of(ignored) == "ab<|im_end|>c" and ignored[-2] == Finished(0, FinishReason.LENGTH)
    late = await run(service, request(**shown, min_tokens=3, max_tokens=8))
    assert text_of(late) == "ab<|im_end|>cab"


async def test_stop_string_at_the_limit(completions: MakeCompletions) -> None:
    fake = FakeTokenService()
    events = await run(completions(fake), request("abc", stop=("c",), max_tokens=3))
    assert text_of(events) == "ab" and events[-2] == Finished(0, FinishReason.STOP, "c")
    assert fake.stopped == []  # the workers ended it by themselves


async def test_stop_strings_wait_for_min_tokens(completions: MakeCompletions) -> None:
    events = await run(completions(FakeTokenService()), request("ab", stop=("a",), min_tokens=2, max_tokens=8))
    assert text_of(events) == "ab"


@given(data=st.data())
def test_text_does_not_depend_on_token_boundaries(
    completions: MakeCompletions, byte_level: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(200, 300), min_size=1, max_size=12))
    stops = data.draw(st.lists(st.sampled_from(["a", "is", "the ", "o", "�", "xy"]), max_size=3))
    fake = FakeTokenService(script=lambda *_: ids)
    events = asyncio.run(run(completions(fake), request(max_tokens=len(ids), ignore_eos=True, stop=tuple(stops))))
    whole = byte_level.decode(ids)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    expected = whole[: min(ends)[0] + min(ends)[1]] if ends else whole
    assert text_of(events) == expected


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("top_p", {"top_p": -0.5}),
    ("top_p", {"top_p": 1.1}),
    ("min_p", {"min_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": 1e-40}),
    ("presence_penalty", {"presence_penalty": 2.1}),
    ("frequency_penalty", {"frequency_penalty": -2.1}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("logprobs", {"logprobs": 21}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("seed", {"seed": 2**64}),
    ("stop", {"stop": ("",)}),
    ("stop", {"stop": ("x" * 1025,)}),
    ("stop", {"stop": ("x",) * 17}),
    ("stop_token_ids", {"stop_token_ids": (1_000_000,)}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": ()}),
    ("prompt", {"prompt": (1, -2)}),
    ("prompt", {"prompt": (1, 1_000_000)}),
    ("messages", {"prompt": Chat(messages=())}),
]


@pytest.mark.parametrize(("param", "fields"), WRONG, ids=str)
async def test_wrong_field_is_named(completions: MakeCompletions, param: str, fields: dict[str, Any]) -> None:
    fake = FakeTokenService()
    service = completions(fake)
    with pytest.raises(RequestError) as caught:
        await service.open(request(**fields))
    assert caught.value.param == param
    assert not fake.started
    assert outcomes(service) == {"invalid_value": 1}


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({"prompt": (1,) * 256}, "256 for the prompt"),
        ({"prompt": (1,) * 200, "max_tokens": 57}, "200 for the prompt and 57"),
        ({"prompt": (1,) * 200, "min_tokens": 57}, "200 for the prompt"),
        ({"prompt": "word " * 10_000_000}, "characters exceeds it"),
    ],
    ids=["prompt", "max_tokens", "min_tokens", "megabytes"],
)
async def test_prompt_exceeding_the_context_is_rejected(
    completions: MakeCompletions, fields: dict[str, Any], needs: str
) -> None:
    with pytest.raises(ContextLengthExceeded, match=needs):
        await completions(FakeTokenService()).open(request(**fields))
    await completions(FakeTokenService()).open(request((1,) * 200, max_tokens=56))


WORDS = "word " * 100_000


@pytest.mark.parametrize(
    "prompt",
    [
        WORDS,
        Chat(messages=({"role": "user", "content": WORDS},)),
        Chat(messages=({"role": "user", "content": "hi", "reasoning_content": WORDS},)),
    ],
    ids=["text", "chat", "reasoning"],
)
async def test_long_prompt_does_not_block_the_loop(
    completions: MakeCompletions, prompt: str | Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, has_turned, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def once_the_loop_has_turned(*args: Any, **options: Any) -> list[int]:
        has_begun.set()
        assert has_turned.wait(10), "it is tokenised on the event loop"
        return encode(*args, **options)

    monkeypatch.setattr(Tokenizer, "encode", once_the_loop_has_turned)
    everything = "{% for message in messages %}{{ message.content }}{{ message.reasoning_content }}{% endfor %}"
    service = completions(FakeTokenService(), max_context=1_000_000, chat_template=everything)
    opening = asyncio.ensure_future(service.open(request(prompt)))
    await asyncio.to_thread(has_begun.wait, 10)
    has_turned.set()
    assert len((await opening).prompt_ids) >= 100_000


async def test_leaving_early_ends_the_generation(completions: MakeCompletions) -> None:
    fake = FakeTokenService()
    service = completions(fake)
    completion = await service.open(request())
    async with completion.run() as events:
        async for _ in events:
            break
    assert fake.has_ended.is_set()
    assert outcomes(service) == {"cancelled": 1}


async def test_cancelled_task_ends_the_generation(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    service = completions(fake)
    task = asyncio.ensure_future(run(service, request()))
    await asyncio.wait_for(fake.is_hanging.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.ended == [(fake.started[0].id, asyncio.CancelledError)]
    assert outcomes(service) == {"cancelled": 1}


@pytest.mark.parametrize(
    ("faults", "kind", "outcome"),
    [
        ({"reject": CapacityError("full", retry_after_s=2)}, CapacityError, "overloaded"),
        ({"fail_after": (3, ReplicaLost("decode-0 died"))}, ReplicaLost, "replica_lost"),
        ({"fail_after": (3, ZeroDivisionError())}, ZeroDivisionError, "internal_error"),
        ({"end_after": 3}, ReplicaLost, "replica_lost"),
        ({"fail_after": (3, TimeoutError("not ours"))}, TimeoutError, "internal_error"),
    ],
    ids=["full", "lost", "bug", "ends early", "foreign timeout"],
)
async def test_failures_pass_through_and_are_counted(
    completions: MakeCompletions, faults: dict[str, Any], kind: type[Exception], outcome: str
) -> None:
    fake = FakeTokenService(**faults)
    service = completions(fake)
    with pytest.raises(kind):
        await run(service, request())
    assert len(fake.started) == len(fake.ended)
    assert outcomes(service) == {outcome: 1}


async def test_deadline_holds_for_a_slow_consumer(completions: MakeCompletions) -> None:
    fake = FakeTokenService()
    completion = await completions(fake).open(request(deadline_s=0.05))
    with pytest.raises(DeadlineExceeded):
        async with completion.run():
            await asyncio.get_running_loop().create_future()
    assert fake.has_ended.is_set()


@pytest.mark.parametrize("hang_after", [0, 2])
async def test_deadline_is_enforced(completions: MakeCompletions, hang_after: int) -> None:
    fake = FakeTokenService(hang_after=hang_after)
    service = completions(fake)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
        await run(service, request(deadline_s=0.05))
    assert fake.has_ended.is_set()
    assert outcomes(service) == {"deadline_exceeded": 1}


async def test_router_time_limit(completions: MakeCompletions) -> None:
    with pytest.raises(DeadlineExceeded):
        await run(completions(FakeTokenService(hang_after=0), max_request_s=0.01), request())


async def rejected(service: Completions, asked: CompletionRequest) -> str | None:
    with pytest.raises(RequestError) as caught:
        await service.open(asked)
    return caught.value.param


async def test_more_choices_than_a_replica_runs_are_rejected(completions: MakeCompletions) -> None:
    service = completions(FakeTokenService(), max_choices=8)
    await service.open(request(n=8))
    assert await rejected(service, request(n=9)) == "n"


async def test_answers_beyond_the_context_are_rejected(completions: MakeCompletions) -> None:
    service = completions(FakeTokenService(), max_context=64, max_choices=4)
    await service.open(request("a", n=4, max_tokens=60))
    for max_tokens in (65, 2**31 - 1):
        assert await rejected(service, request("a", n=4, max_tokens=max_tokens)) == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("id", "i" * 129, "request_id"),
        ("stop_token_ids", (1,) * 1025, "stop_token_ids"),
        ("prompt", Chat(messages=({"role": "r" * 65, "content": "hi"},)), "messages[0].role"),
        ("prompt", Chat(messages=({"role": "user", "content": ""},) * 257), "messages"),
    ],
)
async def test_long_names_and_long_lists_are_rejected(
    completions: MakeCompletions, field: str, value: Any, param: str
) -> None:
    service = completions(FakeTokenService())
    asked = CompletionRequest(**{"id": "r", "prompt": "a", field: value})
    assert await rejected(service, asked) == param


async def test_many_small_messages_are_rendered_on_a_thread(
    completions: MakeCompletions,
) -> None:
    """The threads are blocked meanwhile."""
    service = completions(FakeTokenService(), max_context=2048)
    few, many = (Chat(messages=({"role": "user", "content": ""},) * number) for number in (3, 100))
    async with blocked_threads(service):
        await service.open(request(few, max_tokens=1))
        opening = asyncio.ensure_future(service.open(request(many, max_tokens=1)))
        await service.open(request(few, max_tokens=1))
        assert not opening.done()
    assert len((await opening).prompt_ids) > 300
    service.close()


@pytest.mark.parametrize(("kept", "least"), [(None, 200), (3, 3), (500, 200), (-1, 200)])
def test_truncated_prompt_needs_fewer_tokens(completions: MakeCompletions, kept: int | None, least: int) -> None:
    prompts = completions(FakeTokenService()).prompts
    assert prompts.least_tokens(request((5,) * 200, truncate_prompt_tokens=kept, n=2)) == least + 2
