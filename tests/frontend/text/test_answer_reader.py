"""Detection of a model's output format, and parsing of its answers."""

from __future__ import annotations

from typing import get_args

import pytest

from core.spec.schema import ToolParser
from core.types.request import FinishReason, SampledToken
from frontend.chat.output_format import OutputFormat
from frontend.parsers.call_reader import CallReader
from frontend.parsers.formats import CALL_FORMATS, hermes
from frontend.text.answer_reader import AnswerReader
from frontend.text.choice_text import ChoiceText
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta
from frontend.text.tokenizer import Tokenizer


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
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...)]", "pythonic"),
        ("{{ message.content }}", "generic"),
    ],
)
def test_template_identifies_the_call_format(template: str, calls: str) -> None:
    assert OutputFormat.of(template) == OutputFormat(calls)
    assert OutputFormat.of(template, knows_tools=False) == OutputFormat("generic")
    assert OutputFormat.of(template, tool_parser="none").calls is None
    assert OutputFormat.of(template, tool_parser="mistral").calls == "mistral"


def test_template_or_operator_decides_on_thinking() -> None:
    assert OutputFormat.of("{{ content.split('</think>')[-1] }}").thinks
    assert not OutputFormat.of("</think>", reasoning_parser="none").thinks
    assert OutputFormat.of("", reasoning_parser="think").thinks


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
        assert delta.text_with_broken(is_whole=True) == raw
        assert delta.text_with_broken(is_whole=False) == "oneoh}} two"
        assert "".join(call.arguments for call in delta.calls) == '{"a": '
