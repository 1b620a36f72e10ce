"""Thinking, text and calls of an answer: what each kind of answer holds, whole and streamed, cut at every character."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from core.spec.schema import ToolParser
from core.types.request import FinishReason, Grammar, GrammarKind, SampledToken
from frontend.anthropic.answer import content_of
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.http.event_stream import to_json
from frontend.parsers.formats import CALL_FORMATS, hermes
from frontend.parsers.scanner import CallReader
from frontend.parsers.thinking import TAGS, THINK, Tags, ThinkingReader
from frontend.responses.answer import ResponseOutput
from frontend.text.answer_events import ChoiceText
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer
from tests.frontend.parsers.recorded import RECORDED, TOOLS
from tests.support.growth import growth
from tests.support.said_answers import said_streamed, said_whole, whole_choice

_TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": of}} for name, of in TOOLS.items())
_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_NOW = [("now", {})]

# name: (end of the prompt, answer, thinking, text, calls)
_ANSWERS: dict[str, tuple[str, str, str, str, list[tuple[str, Any]]]] = {
    "opened by the prompt": ("<think>\n", "r\n</think>\n\na", "r", "a", []),
    "opened by the model": ("", "<think>\nr\n</think>\n\na", "r", "a", []),
    "opened by both": ("<think>\n", "<think>\nr</think>a", "r", "a", []),
    "not opened": ("", "r\n</think>\n\na", "r", "a", []),
    "not opened, before a call": ("", f"r</think>{_CALL}", "r", "", _NOW),
    "not opened, nothing behind": ("", "r</think>", "r", "", []),
    "closed by the prompt": ("<think>\n\n</think>\n\n", "a </think> b", "", "a </think> b", []),
    "closed twice": ("<think>", "r</think>a </think> b", "r", "a </think> b", []),
    "never closed": ("<think>", "r a", "r a", "", []),
    "never closed, ends within a tag": ("<think>", "1 </thi", "1 </thi", "", []),
    "never opened or closed": ("", "1 < 2 </thin", "", "1 < 2 </thin", []),
    "a call in thinking that is never closed": ("<think>\n", f"I call. {_CALL}", "I call.", "", _NOW),
    "two calls in thinking that is never closed": ("<think>", f"r\n{_CALL}\n{_CALL}\n", "r", "", _NOW * 2),
    "a call quoted in thinking": ("<think>", f"r {_CALL} s</think>a", f"r {_CALL} s", "a", []),
    "a call quoted, another made": ("<think>", f"r {_CALL}</think>{_CALL}", f"r {_CALL}", "", _NOW),
    "thinking between calls": (
        "",
        f"<think>r</think>{_CALL}\n<think>\ns\n</think>\n{_CALL}<think>t",
        "rst",
        "",
        _NOW * 2,
    ),
    "text between calls": ("", f"<think>r</think>{_CALL}a <think> b{_CALL}c", "r", "a <think> bc", _NOW * 2),
    "no call in thinking that is never closed": ("<think>", "r <tool_call> s", "r <tool_call> s", "", []),
    "a closing tag in a call": (
        "",
        _CALL.replace("{}", '{"city": "</think>"}'),
        "",
        "",
        [("now", {"city": "</think>"})],
    ),
}


def _reader(end: str, output_format: OutputFormat | None = None, **chat: Any) -> AnswerReader:
    asked = Chat(messages=({"role": "user", "content": "hi"},), tools=_TOOLS, **chat)
    reader = AnswerReader.of(asked, output_format or OutputFormat("hermes", THINK), end)
    assert reader
    return reader


def _deltas(reader: AnswerReader, parts: Iterable[str], *, is_cut: bool = False) -> list[Delta]:
    deltas = list[Delta]()
    for parsed in [*map(reader.add, parts), reader.finish(is_cut=is_cut)]:
        delta = Delta(0, "", [SampledToken(token_id=0)], [0])
        delta.add(parsed)
        deltas.append(delta)
    return deltas


@pytest.mark.parametrize("case", _ANSWERS)
def test_answer_is_read_alike_however_it_is_split(case: str, byte_level: Tokenizer) -> None:
    end, answer, thinking, text, calls = _ANSWERS[case]
    for tags in TAGS:
        prompt, raw, *expected = (
            one.replace("<think>", tags.opening).replace("</think>", tags.closing)
            for one in (end, answer, thinking, text)
        )
        made = [(name, json.loads(json.dumps(of).replace("</think>", tags.closing))) for name, of in calls]
        splits = [[raw], list(raw), *([raw[:at], raw[at:]] for at in range(len(raw)))]
        for parts in splits:
            deltas = _deltas(_reader(prompt, OutputFormat("hermes", tags)), parts)
            *said, called = said_whole(deltas)
            assert (said, [(name, json.loads(of)) for name, of in called]) == (expected, made), parts
            if not any(delta.num_thought is not None for delta in deltas):  # a stream cannot take text back
                assert said_streamed(deltas, byte_level) == (*said, called)


@pytest.mark.parametrize("size", [1, 2, 7, 40, 200])
def test_parts_of_an_answer_keep_their_blocks(size: int) -> None:
    """Thinking behind a call never interrupts the rest of that call, however many tokens a delta has."""
    call = _CALL.replace("{}", '{"city": "Paris"}')
    raw = f"<think>r</think>a{call}<think>s</think>{call}<think>t</think>b"
    deltas = _deltas(_reader(""), [raw[at : at + size] for at in range(0, len(raw), size)])
    output = ResponseOutput("x", lambda _: [])
    for delta in deltas:
        output.add(delta)
    output.finish(Finished(0, FinishReason.STOP))
    content = list(content_of(whole_choice(deltas)))
    made = [(block["type"], json.loads(to_json(block.get("input")))) for block in content]
    assert [of for kind, of in made if kind == "tool_use"] == [{"city": "Paris"}] * 2
    arguments = [item["arguments"] for item in output.items if item["type"] == "function_call"]
    assert [json.loads(of) for of in arguments] == [{"city": "Paris"}] * 2
    assert "".join(block.get("thinking", "") for block in content) == "rst"


def test_stream_of_unopened_thinking_loses_nothing_but_the_tag(byte_level: Tokenizer) -> None:
    for raw in ("some thoughts</think>\n\nanswer", "</think>a"):
        deltas = _deltas(_reader(""), raw)
        assert said_streamed(deltas, byte_level) == ("", raw.replace("</think>\n\n", "").replace("</think>", ""), [])
        deltas = _deltas(_reader("", OutputFormat("hermes", THINK, begins_inside=True)), raw)
        assert said_streamed(deltas, byte_level) == said_whole(deltas) == (*raw.replace("\n", "").split("</think>"), [])


@pytest.mark.parametrize("recorded", RECORDED, ids=[f"{one.format}-{at}" for at, one in enumerate(RECORDED)])
def test_calls_in_thinking_that_is_never_closed(recorded: Any) -> None:
    if recorded.format not in CALL_FORMATS:
        return
    output_format = OutputFormat(recorded.format, THINK)
    thinking, text, calls = said_whole(_deltas(_reader("<think>", output_format), [f"r\n{recorded.raw}"]))
    marks = CALL_FORMATS[recorded.format].begins
    if recorded.calls and any(mark.replace("NAME", recorded.calls[0][0]) in recorded.raw for mark in marks):
        assert [(name, json.loads(of)) for name, of in calls] == list(recorded.calls), (thinking, text)
    assert text == "" and thinking.startswith("r")


@pytest.mark.parametrize("name", ["now", ""], ids=["named", "required"])
def test_forced_call_cut_by_length_is_never_content(name: str, byte_level: Tokenizer) -> None:
    arguments = '{"city": "Par", "days": 3}'
    raw = arguments if name else f'[{{"name": "now", "arguments": {arguments}}}]'
    for tags in (None, THINK):
        for at in range(len(raw) + 1):
            deltas = _deltas(_reader("", OutputFormat("hermes", tags), forced=name), raw[:at], is_cut=True)
            thinking, text, calls = said_whole(deltas)
            assert (thinking, text) == ("", "") and said_streamed(deltas, byte_level) == ("", "", calls)
            assert all(call == "now" and arguments.startswith(of) for call, of in calls)
        assert calls == [("now", arguments)]


@pytest.mark.parametrize(
    ("content", "answer", "expected"),
    [
        ("<think>\nI was", " here.</think>Yes", ("here.", "Yes")),
        ("<think>so</think>The", " end", ("", " end")),
        ("The", " end </think> is near", ("", " end </think> is near")),
    ],
)
def test_answer_continues_a_message(content: str, answer: str, expected: tuple[str, str]) -> None:
    chat = Chat(messages=({"role": "assistant", "content": content},), is_continued=True)
    for begins_inside in (False, True):
        reader = AnswerReader.of(chat, OutputFormat(None, THINK, begins_inside=begins_inside), content[-4:])
        assert reader and said_whole(_deltas(reader, answer))[:2] == expected


def test_constrained_answer_may_contain_the_closing_tag() -> None:
    chat = Chat(messages=({"role": "user", "content": "hi"},))
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text="{}")
    reader = AnswerReader.of(chat, OutputFormat(None, THINK), "", grammar=grammar)
    assert reader and said_whole(_deltas(reader, ['"</think>"']))[1] == '"</think>"'


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.opening)
def test_tags_are_found_in_the_template_or_among_special_tokens(tags: Tags) -> None:
    special = {tags.opening, tags.closing}.__contains__
    assert OutputFormat.of("{{ '" + tags.closing + "' }}").tags == tags
    for parser in ("auto", "think", "deepseek_r1"):
        assert OutputFormat.of("", reasoning_parser=parser, is_special=special).tags == tags
    assert OutputFormat.of(tags.closing, reasoning_parser="none", is_special=special).tags is None
    assert OutputFormat.of("", reasoning_parser="think").tags == THINK, "unless the operator says so"


@pytest.mark.parametrize("stop", [(), ("so</think>yes, or",), (">!",)], ids=str)
@pytest.mark.parametrize(
    ("end", "parts"),
    [
        ("", ["", "hm, so</think>", "yes"]),
        ("", ["<think>", "hm, so</think>", "yes"]),
        ("<think>\n", ["", "hm, so</think>", "yes"]),
        ("", ["<think>", "hm</think>", f"{_CALL}<think>", "so it is</think>", f"{_CALL}yes"]),
        ("", [f"{_CALL}\n<think>", "never closed", ""]),
    ],
)
def test_thinking_tokens_are_counted(end: str, parts: list[str], stop: tuple[str, ...], byte_level: Tokenizer) -> None:
    """Every second part is thinking."""
    encoded = [byte_level.encode(part) for part in parts]
    *ids, last = [i for part in encoded for i in part]
    choice = ChoiceText(CompletionRequest(id="r", prompt="a", stop=stop), 0, byte_level, reader=_reader(end))
    choice.add(SampledToken(token_id=i) for i in ids)
    choice.add([SampledToken(token_id=last, finish_reason=FinishReason.LENGTH)])
    assert choice.num_thinking == sum(map(len, encoded[1::2]))


def test_long_thinking_is_read_once() -> None:
    def read(size: int) -> None:
        reader = ThinkingReader(THINK, "inside", calls=["<tool_call>"])
        for _ in range(size):
            reader.add("<tool_call> ")
        reader.finish()

    assert growth(read, 4_000) < 9


def test_spec_can_name_every_format() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *CALL_FORMATS}


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=", "qwen3_coder"),
        ('{{- "<|python_tag|>" + tool_call.name }}', "llama3_json"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek_v3"),  # noqa: RUF001
        ("'<｜tool▁sep｜>' + tool.name + '```json' + '<｜tool▁call▁end｜><｜tool▁calls▁begin｜>'", "deepseek_v3"),  # noqa: RUF001
        ("'<｜tool▁sep｜>' + tool.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁begin｜>'", "deepseek_v31"),  # noqa: RUF001
        ("<|header_start|>", "llama4_pythonic"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "pythonic"),
        ("{{ message.content }}", "generic"),
    ],
)
def test_template_identifies_the_call_format(template: str, calls: str) -> None:
    assert OutputFormat.of(template) == OutputFormat(calls)
    assert OutputFormat.of(template, knows_tools=False) == OutputFormat("generic")
    assert OutputFormat.of(template, tool_parser="none").calls is None
    assert OutputFormat.of(template, tool_parser="mistral").calls == "mistral"


def test_marker_tokens_are_read_and_other_special_tokens_hidden(byte_level: Tokenizer) -> None:
    reader = AnswerReader(None, CallReader(hermes, {"f": {}}))
    shown = byte_level.ids_of(["<|im_start|>", "no such token"])
    choice = ChoiceText(CompletionRequest(id="r", prompt="a"), 0, byte_level, reader=reader, shown=shown)
    ids = byte_level.encode("<|endoftext|>a<|im_start|>b<|im_end|>")
    tokens = [SampledToken(token_id=i, logprob=None, finish_reason=None) for i in ids[:-1]]
    tokens.append(SampledToken(token_id=ids[-1], logprob=None, finish_reason=FinishReason.STOP))
    assert choice.add(tokens).text == "a<|im_start|>b"


def test_text_around_a_broken_call_keeps_its_place() -> None:
    """A whole answer has all of the broken call's text, a stream only the unsent rest."""
    raw = 'one <tool_call>{"name": "f", "arguments": {"a": oh}} two'
    for parts in ([raw], list(raw)):
        reader = AnswerReader(None, CallReader(hermes, {"f": {}}))
        delta = Delta(0, "", [], [])
        for said in [*map(reader.add, parts), reader.finish()]:
            delta.add(said)
        assert said_whole([delta])[1] == raw and delta.text_with_rest == "oneoh}} two"
        assert "".join(call.arguments for call in delta.calls) == '{"a": '
