"""Answers of all APIs, whole and streamed, are equal, however an answer is split, and wherever and by what it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from core.rpc import inference_pb2 as pb
from core.types.request import FinishReason, Grammar, GrammarKind, SampledToken
from frontend.anthropic.answer import StreamedContent, content_of
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.grpc.messages import response_bytes
from frontend.http.event_stream import to_json
from frontend.parsers.formats import CALL_FORMATS
from frontend.parsers.thinking import THINK
from frontend.responses.answer import ResponseEvents, ResponseOutput
from frontend.text.answer_events import ChoiceText
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer
from tests.frontend.parsers.recorded import RECORDED, TOOLS
from tests.support.grids import quick
from tests.support.said_answers import Said, said_streamed, said_whole, whole_choice

_TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": of}} for name, of in TOOLS.items())
_FORCED = {"forced_call": "now", "forced_calls": ""}
_GRAMMAR = Grammar(kind=GrammarKind.JSON_SCHEMA, text="{}")
_RAW = [(one.format, one.raw) for one in RECORDED] + [
    ("llama3_json", '{ "name": "now", "parameters": {"city": "</think>"}}'),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}};{"name":"now","parameters":{"a": tru}}'),
    ("llama3_json",
     '<|python_tag|>{"parameters": {"a": 1}, "name": "now"}<|python_tag|>{"name": "now"} <|python_tag|>'),
    ("generic", '[ {"name": "now", "arguments": {"city": "</think>"}}]'),
    ("generic", 'a\n[ {"name": "now", "arguments": {"city": "b"}}]</think> c\n{"name": "now"}'),
    ("pythonic", '[ now(), get_weather(city="</think>", days=-3)] text'),
    ("pythonic", "[\n now(),\n unknown()]<|python_start|>[get_weather(places=['it\\'s \u2028'])]<|python_end|>"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<oops></function><function=now>\n</function>\n</tool_call>"),
    ("hermes", 'a <THINK> b < think> <tool_call>{"name": "now", "arguments": {"a": oh}} <tool_call>{"name": "now"} c'),
    ("hermes", "```\n<think>x</think>\n``` <think>y</think> <|channel|>analysis<|message|>z"),
    ("forced_calls", '[{"name": "now", "arguments": {"a": "</think>"}}, {"name": "now", "arguments": {}}]'),
]  # fmt: skip
_THOUGHTS = {  # tags, end of the prompt, answer before the recorded one
    "no thinking": (None, "", ""),
    "opened by the model": (THINK, "", "<think>r <think> {s} [t</think>\n"),
    "opened by the prompt": (THINK, "<think>\n", "r</think>"),
    "closed by the prompt": (THINK, "</think>\n\n", ""),
    "never closed": (THINK, "<think>", "r\n"),
    "never opened": (THINK, "", "r</think>"),
    "perhaps": (THINK, "", ""),
}
_CHOICES: dict[str, dict[str, Any]] = {
    "auto": {"tools": _TOOLS},
    "one": {"tools": _TOOLS, "is_parallel": False},
    "none": {},
}
_ENDINGS = ("end", "length", "stop")
# Thirds of all kinds of ending; each has every pair of thoughts, ending and choice.
_THIRDS = [
    [
        (thoughts, ending, choice)
        for (a, thoughts), (b, ending), (c, choice) in product(*map(enumerate, (_THOUGHTS, _ENDINGS, _CHOICES)))
        if (a + b + c) % 3 == third
    ]
    for third in range(3)
]


@dataclass
class _Case:
    """One way to answer `raw`."""

    format: str
    thoughts: str
    ending: str
    choice: str
    raw: str
    tokenizer: Tokenizer

    def events(self, size: int, *, stop: str = "") -> list[Delta | Finished]:
        """Return the events of the answer, whose characters arrive `size` at a time."""
        tags, end, before = _THOUGHTS[self.thoughts]
        forced = _FORCED.get(self.format)
        chosen = {"tools": _TOOLS, "forced": forced} if forced is not None else _CHOICES[self.choice]
        chat = Chat(messages=({"role": "user", "content": "hi"},), **chosen)
        calls = None if forced is not None else self.format
        output_format = OutputFormat(calls, tags)
        if self.format == "openai":  # has thoughts of its own
            output_format, end, before = OutputFormat.of("<|channel|>"), "", ""
        reader = AnswerReader.of(chat, output_format, end, grammar=None if forced is None else _GRAMMAR)
        request = CompletionRequest(id="r", prompt=chat, stop=(stop,) if stop else ())
        choice = ChoiceText(request, 0, self.tokenizer, reader=reader)
        tokens = [SampledToken(token_id=i) for char in before + self.raw for i in _ids(self.tokenizer, char)]
        if self.ending == "length" and tokens:
            tokens[-1] = SampledToken(token_id=tokens[-1].token_id, finish_reason=FinishReason.LENGTH)
        else:
            tokens.append(SampledToken(token_id=0, finish_reason=FinishReason.STOP))
        events = list[Delta | Finished]()
        for at in range(0, len(tokens), size):
            if choice.finished is None:
                events.append(choice.add(tokens[at : at + size]))
        assert choice.finished
        assert 0 <= choice.num_thinking <= choice.num_tokens <= len(tokens)
        return [*events, choice.finished]


@cache
def _ids(tokenizer: Tokenizer, char: str) -> list[int]:
    return tokenizer.encode(char, add_special_tokens=False)


def _data(written: bytes) -> Iterator[dict[str, Any]]:
    for line in written.decode().split("\n"):
        if line.startswith("data: "):
            yield json.loads(line[6:])


def _of_parts(parts: Sequence[tuple[str, str, str]]) -> Said:
    """Join parts of a kind, a name and a text."""
    thinking, text = ("".join(of for kind, _, of in parts if kind == one) for one in ("thinking", "text"))
    return thinking, text, [(name, of) for kind, name, of in parts if kind == "call"]


def _grpc_stream(events: Sequence[Delta | Finished], tokenizer: Tokenizer) -> Said:
    thinking, text, calls = "", "", dict[int, tuple[str, str]]()
    for event in events:
        delta = pb.GenerateResponse.FromString(response_bytes(event, request_id="r", tokenizer=tokenizer)).delta
        thinking += delta.reasoning
        text += delta.text
        for call in delta.tool_calls:
            name, said = calls.get(call.index, (call.name, ""))
            calls[call.index] = name, said + call.arguments
    return thinking, text, list(calls.values())


def _anthropic_whole(events: Sequence[Delta | Finished]) -> tuple[str, str, list[tuple[str, Any]]]:
    content = json.loads(to_json(list(content_of(whole_choice(events)))))
    thinking, text = ("".join(one[kind] for one in content if one["type"] == kind) for kind in ("thinking", "text"))
    return thinking, text, [(one["name"], one["input"]) for one in content if one["type"] == "tool_use"]


def _anthropic_stream(events: Sequence[Delta | Finished]) -> Said:
    blocks, parts, open_at = StreamedContent(hides_thinking=False), list[tuple[str, str, str]](), -1
    for event in events:
        event.write(blocks) if isinstance(event, Delta) else blocks.close()
    for event in _data(blocks.taken()):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert open_at == -1 and index == len(parts)
                kind, open_at = {"tool_use": "call"}.get(block["type"], block["type"]), index
                parts.append((kind, block.get("name", ""), ""))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == open_at
                kind, name, said = parts[-1]
                more = [delta.get(key, "") for key in ("thinking", "text", "partial_json")]
                parts[-1] = kind, name, said + "".join(more)
            case {"type": "content_block_stop", "index": index}:
                assert index == open_at
                open_at = -1
    assert open_at == -1
    return _of_parts(parts)


def _responses(events: Sequence[Delta | Finished]) -> tuple[Said, Said, Said]:
    """Return the whole response, the streamed pieces, and the response with which the stream ends."""
    stream, parts = ResponseEvents(), list[list[str]]()
    outputs = ResponseOutput("x", lambda _: []), ResponseOutput("x", lambda _: [], stream)
    for event, output in product(events, outputs):
        output.add(event) if isinstance(event, Delta) else output.finish(event)
    kinds = {"reasoning": "thinking", "message": "text", "function_call": "call"}
    for one in _data(stream.taken()):
        if one["type"] == "response.output_item.added":
            parts.append([kinds[one["item"]["type"]], one["item"].get("name", ""), ""])
        elif one["type"].endswith(".delta"):
            parts[one["output_index"]][2] += one["delta"]
        elif one["type"] == "response.function_call_arguments.done":
            assert parts[one["output_index"]][2] == one["arguments"]
    ended = list[list[tuple[str, str, str]]]()
    for output in outputs:
        said = [
            one.get("arguments") or "".join(part["text"] for part in one.get("content", ())) for one in output.items
        ]
        ended.append(
            [(kinds[one["type"]], one.get("name", ""), of) for one, of in zip(output.items, said, strict=True)]
        )
    return _of_parts(ended[0]), _of_parts([(kind, name, of) for kind, name, of in parts]), _of_parts(ended[1])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check(case: _Case, events: Sequence[Delta | Finished]) -> None:
    """Compare the answers of all APIs from these events."""
    whole, finished = said_whole(events), events[-1]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert isinstance(finished, Finished)
    was_sent_as_text = any(delta.num_thought is not None for delta in deltas)
    has_broken = any(call.broken is not None for delta in deltas for call in delta.calls)
    from_responses, pieces, last = _responses(events)
    assert from_responses == whole
    thinking, text, inputs = _anthropic_whole(events)
    assert (thinking, text, [name for name, _ in inputs]) == (*whole[:2], [name for name, _ in whole[2]])
    assert all(
        not _is_object(of) or json.loads(of) == given for (_, of), (_, given) in zip(whole[2], inputs, strict=True)
    )
    streamed = said_streamed(events, case.tokenizer)
    assert streamed == _grpc_stream(events, case.tokenizer) == _anthropic_stream(events) == pieces
    if not was_sent_as_text:  # a stream cannot take it back
        assert streamed[0] == whole[0] and last[:2] == whole[:2]
        assert has_broken or streamed == last == whole
    is_complete = bool(whole[2]) and all(_is_object(of) for _, of in whole[2])
    assert finished.word == (
        finished.reason.value if finished.reason is FinishReason.LENGTH or not is_complete else "tool_calls"
    )
    assert is_complete or not whole[2] or finished.reason is FinishReason.LENGTH or case.format in _FORCED


_PARTS = list(product(range(len(_RAW)), range(3)))
# The shorter half of each format's answers: the time grows with the square of the length.
_SHORT = {
    number
    for format in {format for format, _ in _RAW}
    for of in [sorted((len(raw), n) for n, (name, raw) in enumerate(_RAW) if name == format)]
    for _, number in of[: (len(of) + 1) // 2]
}


@pytest.mark.parametrize(
    ("number", "third"),
    quick(_PARTS, {(number, number % 3) for number in _SHORT}),
    ids=[f"{_RAW[number][0]}-{number}-{third}" for number, third in _PARTS],
)
def test_answers_agree(number: int, third: int, byte_level: Tokenizer) -> None:
    """A third of the kinds of ending, and of the places to cut a recorded answer.

    Cut, it ends in turns in each of the kinds; uncut, in all of them.
    """
    format, raw = _RAW[number]
    kinds = _THIRDS[third]
    for at in (*range(third, len(raw), 3), len(raw)):
        for kind in kinds if at == len(raw) else [kinds[(at // 3 + 5 * number) % len(kinds)]]:
            if format in _FORCED and kind[0] in ("never closed", "never opened"):
                continue  # the grammar excludes them
            case = _Case(format, *kind, raw[:at], byte_level)
            whole = case.events(10**6)
            _check(case, whole)
            for size in (1, 7) if at == len(raw) else (1 + at % 7,):
                events = case.events(size)
                assert said_whole(events) == said_whole(whole) and events[-1] == whole[-1]
                _check(case, events)
            if kind[1] == "stop":
                _check_stop(case, whole, raw[at : at + 2], replace(case, raw=raw))


def _check_stop(case: _Case, whole: Sequence[Delta | Finished], stop: str, uncut: _Case) -> None:
    """Check that an answer ends alike by a stop string and by itself. whole: events of the answer before `stop`."""
    before = (_THOUGHTS[case.thoughts][2] if case.format != "openai" else "") + case.raw
    if not stop or stop in (before + stop)[:-1]:
        return
    stopped, ended = uncut.events(3, stop=stop), whole[-1]
    assert isinstance(ended, Finished)
    assert said_whole(stopped) == said_whole(whole)
    assert stopped[-1] in (replace(ended, stop=stop), ended)  # the latter if the answer was over before


def test_every_format_is_tried() -> None:
    assert {format for format, _ in _RAW} == {*CALL_FORMATS, *_FORCED}
