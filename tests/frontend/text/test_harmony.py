"""Answers of gpt-oss with its special tokens: what a constrained answer may be, and how each answer is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from core.grammar.compiler import GrammarCompiler
from core.types.errors import RequestError
from core.types.request import FinishReason, Grammar, GrammarKind, SampledToken
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat, thinking_budget, thinking_variables
from frontend.openai.constraints import forced_grammar
from frontend.openai.messages import FunctionAsTool
from frontend.structured_output.constrained_answer import bound_answer
from frontend.structured_output.lark import SpecialTokens
from frontend.text.answer_events import ChoiceText
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.masks import accepts, is_allowed
from tests.support.serving import TEMPLATES
from tests.support.tiny_service import MakeCompletions

_PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
_USER = {"role": "user", "content": "hi"}
_CHANNELS = TEMPLATES["channels"]
_POINTS = {"properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
_FUNCTIONS = [FunctionAsTool(name="look", parameters=_POINTS), FunctionAsTool(name="now", parameters=None)]
_TOOLS = tuple(function.for_template() for function in _FUNCTIONS)
_THOUGHT = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
_LOOK, _NOW = (
    f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    for name, arguments in (("look", '{"x": 1}'), ("now", "{}"))
)
_SAID = '<|channel|>final<|message|>{"x": 1}'


@dataclass
class _Model:
    directory: Path
    tokenizer: Tokenizer
    compiler: GrammarCompiler
    output_format: OutputFormat


@pytest.fixture(scope="module")
def model(byte_level_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> _Model:
    directory = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(byte_level_dir, directory)
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    names = ("start", "end", "message", "channel", "constrain", "return", "call")
    fast.add_special_tokens([f"<|{name}|>" for name in names])
    fast.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    compiler = GrammarCompiler(directory, vocab_size=tokenizer.vocab_size)
    output_format = OutputFormat.of(_CHANNELS, is_special=tokenizer.has_special)
    return _Model(
        directory, tokenizer, compiler, replace(output_format, special=SpecialTokens(compiler.special_tokens))
    )


def _request(grammar: Grammar | None, **chat: Any) -> CompletionRequest:
    prompt = Chat(messages=(_USER,), **chat)
    return CompletionRequest(id="r", prompt=prompt, grammar=grammar, grammar_field="field")


def _forced(name: str, *, strict: bool = False) -> CompletionRequest:
    functions = [one.model_copy(update={"strict": strict}) for one in _FUNCTIONS]
    return _request(forced_grammar(name, functions, is_parallel=True), tools=_TOOLS, forced=name)


def _accepts(model: _Model, request: CompletionRequest, text: str) -> bool:
    """Return whether the grammar accepts the whole text and may end there."""
    grammar = bound_answer(request, model.output_format, _PROMPT)
    assert grammar is not None
    (end,) = model.tokenizer.encode("<|call|>")
    return accepts(model.compiler.compile(grammar), model.tokenizer.encode(text), end)


def _read(model: _Model, request: CompletionRequest, text: str, output_format: OutputFormat | None = None) -> Delta:
    """Return what the model said, token by token; <|call|> ends it."""
    chat, form = request.prompt, output_format or model.output_format
    assert isinstance(chat, Chat)
    shown = model.tokenizer.ids_of(form.markers)
    reader = AnswerReader.of(chat, form, _PROMPT, grammar=request.grammar)
    choice = ChoiceText(request, 0, model.tokenizer, reader=reader, shown=shown)
    ids = model.tokenizer.encode(f"{text}<|call|>", add_special_tokens=False)
    said = Delta(0, "", [], [])
    for number, token in enumerate(ids):
        reason = FinishReason.STOP if number == len(ids) - 1 else None
        part = choice.add([SampledToken(token_id=token, finish_reason=reason)])
        said.text, said.thinking = said.text + part.text, said.thinking + part.thinking
        said.calls += part.calls
    assert choice.finished and choice.num_thinking <= len(ids)
    return said


_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"type": "object", **_POINTS}))


@pytest.mark.parametrize("before", ["", _THOUGHT], ids=["at once", "after thinking"])
@pytest.mark.parametrize(
    ("request_", "accepted", "rejected"),
    [
        (_forced("look"), [_LOOK], [_NOW, _SAID, '{"x": 1}', _LOOK.replace("1", "2"), _LOOK + _LOOK]),
        (_forced("look", strict=True), [_LOOK], [_NOW, _SAID]),
        (_forced(""), [_LOOK, _NOW], [_SAID, _NOW.replace("now", "no"), _LOOK.replace("{", "[{")]),
        (_request(_SCHEMA), [_SAID], [_LOOK, '{"x": 1}', _SAID.replace("final", "analysis")]),
        (_request(_SCHEMA, tools=_TOOLS), [_SAID, _LOOK, _NOW], [_LOOK.replace("1", "2"), _SAID.replace("1", "2")]),
    ],
    ids=["named", "strict", "required", "schema", "schema or calls"],
)
def test_constrained_answers_have_a_header(
    request_: CompletionRequest, accepted: list[str], rejected: list[str], before: str, model: _Model
) -> None:
    for text in accepted:
        assert _accepts(model, request_, before + text), text
        said = _read(model, request_, before + text)
        assert said.thinking == ("Hm {." if before else "")
        if text == _SAID:
            assert said.text == '{"x": 1}' and not said.calls
        else:
            assert [call.name for call in said.calls if call.name] == ["look" if text == _LOOK else "now"]
            assert "".join(call.arguments for call in said.calls) == ('{"x": 1}' if text == _LOOK else "{}")
    for text in rejected:
        assert not _accepts(model, request_, before + text), text


def test_special_tokens_of_a_header_separate_its_parts(model: _Model) -> None:
    for header in ("commentary to=functions.look<|constrain|>json", "commentary to=functions.look code"):
        said = _read(model, _request(None, tools=_TOOLS), f'<|channel|>{header}<|message|>{{"x": 1}}')
        assert [call.name for call in said.calls if call.name] == ["look"] and not said.text


def test_thinking_tokens_are_counted(model: _Model) -> None:
    request = _request(None)
    assert isinstance(request.prompt, Chat)
    reader = AnswerReader.of(request.prompt, model.output_format, _PROMPT)
    shown = model.tokenizer.ids_of(model.output_format.markers)
    choice = ChoiceText(request, 0, model.tokenizer, reader=reader, shown=shown)
    choice.add(SampledToken(token_id=token) for token in model.tokenizer.encode(f"{_THOUGHT}{_SAID}"))
    assert choice.num_thinking == len(model.tokenizer.encode("Hm {.<|end|>"))


def test_thinking_budget_ends_the_first_message(model: _Model) -> None:
    request = replace(_request(_SCHEMA), thinking_token_budget=3)
    grammar = bound_answer(request, model.output_format, _PROMPT)
    budget = thinking_budget(request, model.output_format, model.tokenizer, _PROMPT)
    assert grammar and budget and not budget.is_open
    (end,) = model.tokenizer.encode("<|call|>")
    mask = model.compiler.bounded(budget, model.compiler.compile(grammar).mask([end]))
    tokens = model.tokenizer.encode("<|channel|>analysis<|message|>")
    for token in model.tokenizer.encode("abc"):
        assert mask.only(tokens, 0) is None and is_allowed(mask.allowed(tokens, 0), token)
        tokens.append(token)
    tokens.append(mask.only(tokens, 0) or -1)
    assert model.tokenizer.decode(tokens[-1:], skip_special_tokens=False) == "<|end|>"
    for token in model.tokenizer.encode(f"<|start|>assistant{_SAID}"):
        assert is_allowed(mask.allowed(tokens, 0), token)
        tokens.append(token)


def test_operator_can_turn_parsers_off(model: _Model) -> None:
    answer, request = f"{_THOUGHT}{_SAID}", _request(None)
    without_tools = OutputFormat.of(_CHANNELS, tool_parser="none")
    assert without_tools.calls is None
    said = _read(model, request, answer, without_tools)
    assert (said.thinking, said.text) == ("Hm {.", '{"x": 1}')
    said = _read(model, request, answer, OutputFormat.of(_CHANNELS, reasoning_parser="none"))
    assert (said.thinking, said.text) == ("", 'Hm {.{"x": 1}')
    with pytest.raises(RequestError, match="cannot be combined"):
        bound_answer(_forced("look"), replace(without_tools, special=model.output_format.special), _PROMPT)


def test_continued_message_has_no_header(model: _Model) -> None:
    request = _request(None, is_continued=True)
    assert _read(model, request, f" more<|end|><|start|>assistant{_SAID}").text == ' more\n\n{"x": 1}'
    grammar = _request(_SCHEMA, is_continued=True)
    assert bound_answer(grammar, model.output_format, "<|channel|>final<|message|>so") == _SCHEMA


async def test_call_token_ends_the_answer(model: _Model) -> None:
    fake = FakeTokenService()
    service = MakeCompletions(model.directory, model.tokenizer)(fake, chat_template=_CHANNELS)
    async with (await service.open(_request(None, tools=_TOOLS))).run() as events:
        async for _ in events:
            break
    ends = model.tokenizer.ids_of(["<|return|>", "<|call|>", "<|im_end|>", "<|endoftext|>"])
    assert set(fake.started[0].sampling.stop_token_ids) == ends
    service.close()


@pytest.mark.parametrize(
    ("effort", "given"),
    [("none", "low"), ("minimal", "low"), ("low", "low"), ("high", "high"), ("max", "high"), (None, "medium")],
)
def test_efforts_are_those_of_the_training(effort: str | None, given: str) -> None:
    template = ChatTemplate(_CHANNELS, special_tokens={})
    chat = Chat(messages=(_USER,), reasoning_effort=effort)
    assert f"Reasoning: {given}<" in template.render(chat.messages, variables=thinking_variables(chat, template))


def test_template_that_needs_descriptions_gets_them() -> None:
    source = "{% for tool in tools or [] %}{{ '// ' + tool.function.description + tool.function.name }}{% endfor %}hi"
    assert ChatTemplate(source, special_tokens={}).render([_USER], tools=_TOOLS) == "// look// nowhi"
