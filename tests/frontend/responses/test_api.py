"""/v1/responses with OpenAI's client: whole, streamed, tools, thinking, formats, and continuation."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, closing
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from core.process.ports import free_port
from core.types.errors import ReplicaLost
from core.types.request import ANY_OBJECT, GrammarKind
from frontend.responses.api import HeldAnswer
from frontend.responses.store import MAX_VALUE_BYTES, StoreBounds
from frontend.responses.stored import StoredResponses
from frontend.responses.types import ResponsesBody, StoredTurn
from tests.frontend.access.keys import access_with, issue
from tests.support.memory_responses import in_memory_responses
from tests.support.serving import TEMPLATES, Serve, Served

_HERMES = TEMPLATES["hermes_tools"]
_THINKS = _HERMES + "{# </think> #}"
_PARIS = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris 🎉", "days": 3}}\n</tool_call>'
_LYON = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
_BROKEN = '<tool_call>{"name": "Weather", "arguments": {"city": oh}} </tool_call>'
_THOUGHTS = ("Hm.", "Oh.")
_NEITHER = ("id", "created_at", "completed_at")  # fields unique to each response
_BOUNDS = StoreBounds(max_bytes=2**20, ttl_s=1000)


class Weather(BaseModel):
    """Weather of a city."""

    city: str
    days: int | None = None


_TOOL: Any = openai.pydantic_function_tool(Weather)
_FUNCTION: Any = {"type": "function", **_TOOL["function"]}


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await _served(serve)


async def _served(serve: Serve, template: str = _THINKS, **options: Any) -> Served:
    return await serve(**{"chat_template": template, "max_context": 4096} | options)


async def _rejected(served: Served, **body: Any) -> tuple[int, str | None, str]:
    answer = await served.http.post("/v1/responses", json={"input": "hi", **body})
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def both(served: Served, **fields: Any) -> tuple[Response, Response, list[Any]]:
    """Return the whole response, the final response of a stream, and its events; both have the same text."""
    whole = await served.responses.create(**fields)
    events = [event async for event in await served.responses.create(**fields, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return whole, events[-1].response, events


def same(response: Response) -> dict[str, Any]:
    """Return the response without the values unique to it."""
    told = response.to_dict()
    ids = response.id.partition("_")[2]
    for item in told["output"]:  # type: ignore[attr-defined]
        item["id"] = item["id"].replace(ids, "")
        item.pop("call_id", None)
    return {name: value for name, value in told.items() if name not in _NEITHER}


def kinds(events: list[Any]) -> list[str]:
    """Return the event types, repeated ones once."""
    told = [event.type.removeprefix("response.") for event in events]
    return [type for at, type in enumerate(told) if not at or type != told[at - 1]]


async def test_text_whole_and_streamed(served: Served) -> None:
    served.say("Bonjour 🎉!")
    whole, last, events = await both(
        served, input="hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=30
    )
    assert same(whole) == same(last)
    assert whole.id.startswith("resp_") and (whole.status, whole.output_text) == ("completed", "Bonjour 🎉!")
    assert (whole.metadata, whole.instructions, whole.temperature) == ({"a": "b"}, "Be brief.", 0.5)
    assert whole.usage and whole.usage.input_tokens == len(served.fake.started[0].token_ids)
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in served.prompt
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3 and "".join(deltas) == "Bonjour 🎉!"
    async with served.responses.stream(input="hi", model="tiny") as stream:
        assert (await stream.get_final_response()).output_text == "Bonjour 🎉!"
    answer = await served.http.post("/v1/responses", json={"input": "hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    for name, data in (block.split("\n") for block in answer.text.strip().split("\n\n")):
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_calls_and_thinking(served: Served) -> None:
    served.say(f"<think>\nHm.\n</think>\n\nLet me look.\n{_PARIS}\n{_LYON}\n")
    whole, last, events = await both(served, input="hi", tools=[_FUNCTION], reasoning={"summary": "auto"})
    assert same(whole) == same(last)
    thought, said, *calls = whole.output
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "Hm."
    assert said.type == "message" and whole.output_text == "Let me look."
    assert whole.usage and whole.usage.output_tokens_details.reasoning_tokens > 3
    made = [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"]
    assert made == [("Weather", {"city": "Paris 🎉", "days": 3}), ("Weather", {"city": "Lyon"})]
    a_part = ["content_part.done", "output_item.done", "output_item.added"]
    a_call = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", *a_part,
        "content_part.added", "output_text.delta", "output_text.done", *a_part,
        *a_call, "output_item.added", *a_call, "completed",
    ]  # fmt: skip
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 10 and {piece.output_index for piece in pieces} == {2, 3}
    served.fake.together = 4096  # all at once
    together, last, _ = await both(served, input="hi", tools=[_FUNCTION], reasoning={"summary": "auto"})
    assert same(together) == same(last) == same(whole), "however its tokens come"
    async with served.responses.stream(input="hi", model="tiny", tools=[_FUNCTION]) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "by items"])
async def test_agent_turns(served: Served, by_id: bool) -> None:
    """The model sees the same prompt whether history is referenced by id or sent again."""
    served.say(f"<think>Hm.</think>Look.\n{_PARIS}{_LYON}", "It is sunny.")
    fields: dict[str, Any] = {"model": "tiny", "tools": [_FUNCTION], "instructions": "Be brief."}
    history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Is it?"}]}]
    first = await served.responses.parse(input=history, **fields)
    history += [item.to_dict() for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"sunny in {call.parsed_arguments['city']}"}
        for call in calls
    ]
    if by_id:
        second = await served.responses.create(input=outputs, previous_response_id=first.id, **fields)
    else:
        second = await served.responses.create(input=[*history, *outputs], store=False, **fields)
    assert (second.output_text, second.previous_response_id) == ("It is sunny.", first.id if by_id else None)
    assert served.prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert served.prompt.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\nIs it?<|im_end|>\n"
        f"<|im_start|>assistant\nLook.\n{_PARIS}\n{_LYON}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nsunny in Paris 🎉\n</tool_response>\n<tool_response>\n"
        "sunny in Lyon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ), served.prompt


@pytest.mark.parametrize("type", [{"type": "item_reference"}, {"type": None}, {}], ids=str)
async def test_items_are_referenced_by_id(served: Served, type: dict[str, Any]) -> None:
    """Vercel's AI SDK sends items back in this form. OpenAI's API does not require the type."""
    served.say(f"Look.\n{_PARIS}", "It is sunny.", "Yes.")
    first = await served.responses.create(input="Is it?", tools=[_FUNCTION])
    call: Any = first.output[1]
    history: list[Any] = [
        {"role": "user", "content": "Is it?"},
        *({**type, "id": item.id} for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    second = await served.responses.create(input=history, tools=[_FUNCTION])
    assert f"<|im_start|>assistant\nLook.\n{_PARIS}<|im_end|>" in served.prompt
    assert "<tool_response>\nsunny\n" in served.prompt
    await served.responses.delete(first.id)
    third = await served.responses.create(input="Sure?", previous_response_id=second.id)
    assert third.output_text == "Yes." and "Look." in served.prompt, "referenced items are stored with the response"
    for id in (call.id, "msg_1", f"{second.output[0].id}9"):
        with pytest.raises(openai.NotFoundError) as caught:
            await served.responses.create(input=[{"type": "item_reference", "id": id}])
        assert caught.value.code == "response_not_found" and str(caught.value.param).startswith("input")
    large = await served.responses.create(input="x" * 3000, max_output_tokens=9)
    (item,) = (await served.responses.input_items.list(large.id)).data
    ids = [f"msg_{number:032x}_0" for number in range(65)]
    for many, why in (([item.id] * 4096, "exceeds 10485760 bytes"),
                      (ids, "refer to 65 responses")):  # fmt: skip
        rejected = await _rejected(served, input=[{"type": "item_reference", "id": id} for id in many])
        assert rejected[:2] == (400, "input") and why in rejected[2]


async def test_items_hidden_from_the_model_are_not_stored(served: Served) -> None:
    """Otherwise a stored request could exceed any context."""
    unseen, thought = ({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "xy")
    said = {"role": "assistant", "content": "c"}
    items: Any = [unseen, {"role": "user", "content": "a"}, thought, said, unseen, unseen]
    first = await served.responses.create(input=items, max_output_tokens=9)
    second = await served.responses.create(input=items[1:2], previous_response_id=first.id, max_output_tokens=9)
    for response, told in ((first, [*"ayc"]), (second, [*"ayc", first.output_text, "a"])):
        listed = (await served.responses.input_items.list(response.id, order="asc")).data
        assert [item.content[0].text for item in listed] == told  # type: ignore[union-attr,index]


async def test_large_responses_hold_memory_until_sent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed and encoded on other threads."""
    key, threads, of = issue("acme"), set[str](), StoredTurn.of

    def watched(value: bytes) -> StoredTurn:
        threads.add(threading.current_thread().name.partition("_")[0])
        return of(value)

    monkeypatch.setattr(StoredTurn, "of", watched)
    stored = in_memory_responses(StoreBounds(max_bytes=2**26, ttl_s=1000))
    large = {"response": {"output": []}, "input": [{"id": "a", "text": "x" * (MAX_VALUE_BYTES - 100)}]}
    assert await stored.put(key.key.tenant, "resp_a", json.dumps(large).encode())
    served = await _served(serve, access=access_with(key), stored=stored)
    async with AsyncExitStack() as clients:
        headers, path = {"authorization": key.header}, "/v1/responses/resp_a/input_items"
        readers, loop = list[socket.socket](), asyncio.get_running_loop()
        for _ in range(8):
            readers.append(clients.enter_context(socket.socket()))
            readers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            readers[-1].setblocking(False)
            await loop.sock_connect(readers[-1], served.address)
            request = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {key.header}\r\n\r\n"
            await loop.sock_sendall(readers[-1], request.encode())
            assert await loop.sock_recv(readers[-1], 15) == b"HTTP/1.1 200 OK"
        for rejected in [await served.http.get(one, headers=headers) for one in (path, "/v1/responses/resp_a")]:
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "overloaded")
            assert rejected.headers["retry-after"] == "1"
        readers[0].close()
        while (answer := await served.http.get(path, headers=headers)).status_code == 429:
            pass  # the server has not noticed yet
        assert answer.json()["data"] == large["input"] and len(answer.content) > MAX_VALUE_BYTES - 100
    assert threads == {"text"}


async def test_slow_reader_is_cut_off() -> None:
    sent, held = list[Any](), ExitStack()
    is_over = held.enter_context(closing(FakeHold()))

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 2:
            await asyncio.Event().wait()

    async def receive() -> Any:
        raise AssertionError

    await HeldAnswer(bytes(2**20), {}, held, within_s=0.01)({"type": "http"}, receive, send)
    assert is_over.is_closed and all(message.get("more_body", True) for message in sent) and len(sent) == 3


async def test_stored_response_is_read_and_deleted(served: Served) -> None:
    served.say("One.", "Two.", "Three.")
    first = await served.responses.create(input="a", user="ann")
    second = await served.responses.create(input="b", previous_response_id=first.id)
    assert (await served.responses.retrieve(second.id)).to_dict() == second.to_dict()
    items = [item async for item in served.responses.input_items.list(second.id, order="asc", limit=2)]
    told = [(getattr(item, "role", ""), item.content[0].text) for item in items if item.type == "message"]
    assert told == [("user", "a"), ("assistant", "One."), ("user", "b")]
    page = await served.responses.input_items.list(second.id, after=items[2].id, limit=1)
    assert ([item.id for item in page.data], page.has_more) == ([items[1].id], True)
    await served.responses.delete(first.id)
    # Includes the whole history.
    third = await served.responses.create(input="c", previous_response_id=second.id)
    assert "a<|im_end|>" in served.prompt and "One.<|im_end|>" in served.prompt and third.output_text == "Three."
    for ask in (
        served.responses.retrieve,
        served.responses.delete,
        served.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError, match=f"response '{first.id}' not found"):
            await ask(first.id)
    with pytest.raises(openai.NotFoundError, match="previous_response_id: response") as caught:
        await served.responses.create(input="d", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "response_not_found")
    not_kept = await served.responses.create(input="e", store=False)
    assert (not_kept.to_dict()["store"], second.to_dict()["store"]) == (False, True)
    with pytest.raises(openai.NotFoundError):
        await served.responses.retrieve(not_kept.id)
    for query, param in (({"limit": 101}, "limit"), ({"order": "up"}, "order")):
        answer = await served.http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = await served.http.get(f"/v1/responses/{second.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_stored_responses_are_isolated_by_tenant(serve: Serve) -> None:
    ours, theirs, beside = issue("acme"), issue("other"), issue("acme")
    served = await _served(serve, access=access_with(ours, theirs, beside))
    served.say("One.")
    mine, pending_peer, colleague = (served.openai(one).responses for one in (ours, theirs, beside))
    first = await mine.create(input="a")
    assert (await colleague.retrieve(first.id)).id == first.id
    unknown = first.id[:-8] + "00000000"
    calls: list[Callable[[str], Awaitable[Any]]] = [
        pending_peer.retrieve, pending_peer.delete, pending_peer.input_items.list,
        lambda id: pending_peer.create(input="b", previous_response_id=id),
    ]  # fmt: skip
    for call in calls:
        said = set()
        for id in (first.id, unknown):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(id)
            said.add(str(caught.value.body).replace(id, "ID"))
        assert len(said) == 1, "another tenant cannot tell whether it exists"
    assert (await mine.retrieve(first.id)).output_text == "One."


async def test_answers_continue_without_the_store(serve: Serve) -> None:
    nowhere = f"redis://127.0.0.1:{free_port('127.0.0.1')}/0"
    away = StoredResponses.in_redis(nowhere, name="d", key=bytes(32), bounds=_BOUNDS)
    served = await _served(serve, stored=away)
    async with asyncio.timeout(20):
        served.say("One.")
        whole, last, events = await both(served, input="a")
        assert [one.to_dict()["store"] for one in (whole, last, events[0].response)] == [False, False, True]
        assert last.output_text == "One."
        for call in (
            served.responses.retrieve(whole.id),
            served.responses.delete(whole.id),
            served.responses.create(input="b", previous_response_id=whole.id),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                await call
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    await away.close()
    off = StoredResponses.in_redis(nowhere, name="d", key=bytes(32), bounds=StoreBounds(max_bytes=0, ttl_s=1))
    served = await _served(serve, stored=off)
    served.say("One.")
    assert (await served.responses.create(input="a")).to_dict()["store"] is False


async def test_broken_call_is_text(served: Served) -> None:
    """In a whole response it is text. A stream has sent part of a call by then, and ends the item as incomplete."""
    served.say(f"Well. {_BROKEN} so")
    whole, last, events = await both(served, input="hi", tools=[_FUNCTION])
    assert same(whole) == same(last) and whole.output_text == f"Well. {_BROKEN} so"
    assert {item.type for item in whole.output} == {"message"}
    (ended,) = [
        event.item
        for event in events
        if event.type == "response.output_item.done" and event.item.type == "function_call"
    ]
    assert (ended.status, ended.arguments) == ("incomplete", '{"city": ')
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == "Well.oh}} </tool_call> so", "space goes with a call"
    async with served.responses.stream(input="hi", model="tiny", tools=[_FUNCTION]) as stream:
        assert (await stream.get_final_response()).output_text == whole.output_text


async def test_truncated_answer_is_incomplete(served: Served) -> None:
    for text, kind in (
        ("One two three four", "message"),
        ("<think>One two three four", "reasoning"),
        ("", "message"),
    ):
        served.say(text)
        whole, last, events = await both(served, input="hi", max_output_tokens=12 if text else 1)
        assert same(whole) == same(last)
        is_cut = bool(text)
        assert whole.status == ("incomplete" if is_cut else "completed") == last.status
        assert events[-1].type == f"response.{whole.status}"
        assert (whole.incomplete_details and whole.incomplete_details.reason) == (
            "max_output_tokens" if is_cut else None
        )
        (item,) = whole.output
        assert (item.type, item.status) == (kind, whole.status)  # type: ignore[union-attr]
    served.say(_PARIS)
    whole, last, _ = await both(served, input="hi", tools=[_FUNCTION], max_output_tokens=60)
    assert same(whole) == same(last) and whole.status == "incomplete"
    (call,) = whole.output
    assert call.type == "function_call" and call.status == "incomplete", "a call that is cut off remains one"
    assert call.arguments and call.arguments in _PARIS


async def test_failed_stream_ends_with_an_event(served: Served) -> None:
    served.say("One two three")
    served.fake.fail_after = (4, ReplicaLost("decode-0 is gone"))
    events = [event async for event in await served.responses.create(input="hi", stream=True)]
    failed = events[-1]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert [event.response.model_extra["store"] for event in (events[0], failed)] == [True, False]
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "decode-0 is gone")
    assert failed.response.output[0].status == "incomplete" and "One two".startswith(failed.response.output_text)
    with pytest.raises(openai.InternalServerError, match="decode-0 is gone"):
        await served.responses.create(input="hi")
    served.fake.fail_after = (0, ReplicaLost("decode-0 is gone"))
    # Nothing had been sent, so the real status is returned.
    with pytest.raises(openai.InternalServerError, match="decode-0 is gone"):
        await served.responses.create(input="hi", stream=True)


async def test_answer_in_a_format(serve: Serve) -> None:
    served = await _served(serve, _HERMES, has_grammars=True)
    served.say('{"city": "Rome", "days": 2}')
    parsed = await served.responses.parse(model="tiny", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="Rome", days=2)
    grammar = served.fake.started[-1].grammar
    assert grammar and json.loads(grammar.text)["properties"].keys() == {"city", "days"}
    async with served.responses.stream(model="tiny", input="hi", text_format=Weather) as stream:
        assert (await stream.get_final_response()).output_parsed == Weather(city="Rome", days=2)
    bad = {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "nonsense"}}
    status, param, message = await _rejected(served, text={"format": bad})
    assert (status, param) == (400, "text.format") and message.startswith("text.format"), message


class FakeHold:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def _asked(**fields: Any) -> Any:
    (request,) = ResponsesBody.model_validate_json(json.dumps({"input": "hi", **fields})).requests("r")
    return request


def test_body_is_converted_to_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "s", "schema": schema}
    assert _asked(text={"format": {"type": "text"}}).grammar is None
    assert _asked(text={"format": {"type": "json_object"}}).grammar == ANY_OBJECT
    strict, lenient = (_asked(text={"format": {**form, "strict": is_strict}}).grammar for is_strict in (True, False))
    assert (strict.kind, lenient.kind) == (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)
    assert json.loads(strict.text) == schema == json.loads(lenient.text)
    request = _asked(tools=[_FUNCTION], tool_choice={"type": "function", "name": "Weather"}, parallel_tool_calls=False)
    assert (request.prompt.forced, request.prompt.is_parallel, request.grammar.kind) == (
        "Weather", False, GrammarKind.JSON_SCHEMA)  # fmt: skip
    assert _asked(tools=[_FUNCTION], tool_choice="required").prompt.forced == ""
    assert _asked(tools=[_FUNCTION], tool_choice="none").prompt.tools == ()
    assert _asked(tools=[_FUNCTION]).prompt.tools[0] == {
        "type": "function",
        "function": {name: _FUNCTION[name] for name in ("name", "description", "parameters")},
    }
    request = _asked(reasoning={"effort": "low"}, truncation="auto", max_output_tokens=9, user="ann", seed=3, top_p=0.5)
    assert (request.prompt.reasoning_effort, request.truncate_prompt_tokens, request.max_tokens) == ("low", -1, 9)
    assert (request.max_tokens_field, request.user, request.seed, request.top_p) == ("max_output_tokens", "ann", 3, 0.5)
    assert (_asked().logprobs, _asked(top_logprobs=2).logprobs) == (None, 2)
    assert _asked(include=["message.output_text.logprobs"]).logprobs == 0


def test_consecutive_assistant_items_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought, another = (
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in _THOUGHTS
    )
    said = {"role": "assistant", "content": "c"}
    items = [
        {"role": "user", "content": "a"}, thought, another, call, call,
        said, said, thought, {"role": "user", "content": "d"}, another,
    ]  # fmt: skip
    told = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert _asked(input=items).prompt.messages == (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.\nOh.", "tool_calls": [told, told]},
        said,
        said,
        {"role": "user", "content": "d"},
    )


@pytest.mark.parametrize("role", ["system", "developer", "user"])
def test_instructions_precede_the_input(role: str) -> None:
    first = {"role": role, "content": "b"}
    assert _asked(input=[first], instructions="a").prompt.messages == ({"role": "system", "content": "a"}, first)


async def test_logprobs_of_the_text(served: Served) -> None:
    served.say("<think>Hm</think>Yes 🎉")
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    whole, last, events = await both(served, input="hi", include=include, top_logprobs=1)
    assert same(whole) == same(last)
    message = whole.output[-1]
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert bytes(byte for one in logprobs for byte in one.bytes).startswith("Yes 🎉".encode())
    assert all((one.logprob, len(one.top_logprobs)) == (-0.5, 1) for one in logprobs)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == [one.token for one in logprobs]


_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type", "'input_image' is not supported",
    ),
    "a function without a name": ({"tools": [{"type": "function"}]}, "tools[0].name", "required"),
    "a call without a name": ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "required"),
    "a reference to nothing": ({"input": [{"type": "item_reference", "id": ""}]}, "input[0].id", "required"),
    "a message without a role": ({"input": [{"content": "a"}]}, "input[0].role", "required for type message"),
    "nothing": ({"input": []}, "input", "must not be empty"),
    "a number": ({"input": 5}, "input", "must be a string or a list of items"),
    "background": ({"background": True}, "background", "is not supported"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "is not supported"),
    "a prompt": ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
    "metadata": ({"metadata": {"a": "x" * 513}}, "metadata.a", "at most 512 characters"),
    "tokens": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: must be from 1"),
    "too long": ({"input": "x " * 9000}, "input", "context"),
    "a schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "text.format: missing"),
    "a choice": ({"tool_choice": {"type": "web_search"}}, "tool_choice", "must be"),
    "a choice of no tool": ({"tool_choice": "required"}, "tool_choice", "requires tools"),
    "messages": ({"messages": [{"role": "user", "content": "a"}]}, "messages", "messages: not supported by this"),
    "a field of chats": ({"messages": []} | {"stop": "x"}, "stop", "not supported by this endpoint"),
    "a tool twice": ({"tools": [_FUNCTION, _FUNCTION]}, "tools", "appears twice"),
    "many items": ({"input": [{"role": "user", "content": ""}] * 4097}, "input", "at most 4096 items"),
}  # fmt: skip


async def test_invalid_requests_are_rejected_by_name(serve: Serve) -> None:
    served = await _served(serve, has_grammars=True)
    for case, (body, param, message) in _REFUSED.items():
        status, named, said = await _rejected(served, **body)
        assert (status, named) == (400, param) and message in said and "\n" not in said, (case, named, said)
    assert not served.fake.started
    body = {"input": "hi", "mood": 1, "text": {"verbosity": "low"}, "max_output_tokens": 1.0,
            "context_management": [{"type": "compaction"}]}  # fmt: skip
    answer = await served.http.post("/v1/responses", json=body)
    assert answer.headers["x-ignored-fields"] == "mood, context_management, text.verbosity"


async def test_agent_requests_are_accepted(served: Served) -> None:
    """Requests of openai-agents 0.24's OpenAIResponsesModel, with its defaults and with user settings."""
    served.say("Yes.")
    answer = await served.responses.create(
        input=[{"content": "hi", "role": "user"}], model="tiny", include=[], tools=[], instructions="Be brief.",
        text={"format": {"type": "text"}}, store=False, truncation="disabled", prompt_cache_retention="24h",
        reasoning={"effort": None, "summary": "auto"}, metadata={"trace": "1"}, service_tier="auto",
    )  # fmt: skip
    assert answer.output_text == "Yes."
