"""Thinking budgets: conversion for replicas, and counting of thinking tokens."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from core.grammar.compiler import GrammarCompiler
from core.types.errors import UnsupportedField
from core.types.request import Grammar, GrammarKind, SampledToken
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat, thinking_budget
from frontend.parsers.thinking import TAGS, THINK, Tags
from frontend.structured_output.constrained_answer import bound_answer
from frontend.structured_output.lark import SpecialTokens
from frontend.text.answer_events import ChoiceText
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer
from tests.support.masks import is_allowed

_THINKS = OutputFormat(tags=THINK)
_CHAT = Chat(messages=({"role": "user", "content": "hi"},))
_CHANNEL = next(tags for tags in TAGS if tags.opening == "<|channel>thought")
_REGEX = Grammar(kind=GrammarKind.REGEX, text="a")
_TAGS = Grammar(kind=GrammarKind.STRUCTURAL_TAG, text='{"format": {"type": "any_text"}}')
_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, text="{}")


def _request(num_tokens: int | None = 4, **fields: object) -> CompletionRequest:
    return CompletionRequest(id="r", thinking_token_budget=num_tokens, **{"prompt": _CHAT, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "prompt", "is_open"),
    [
        (_request(), "assistant\n<think>\n", True),
        (_request(), "assistant\n", False),
        (_request(), "assistant\n<think>\n\n</think>\n\n", False),
        (_request(prompt="Think. <think>"), "Think. <think>", True),
        (_request(grammar=_SCHEMA), "<think>", True),
        (_request(None), "<think>", None),
        (_request(grammar=_REGEX), "<think>", None),  # no room for thinking
        (_request(grammar=_SCHEMA), "</think>", None),
        (_request(prompt="a<think>", grammar=_SCHEMA), "a<think>", None),
    ],
)
def test_budget_sent_to_replicas(
    request_: CompletionRequest, prompt: str, is_open: bool | None, byte_level: Tokenizer
) -> None:
    budget = thinking_budget(request_, _THINKS, byte_level, prompt)
    assert (None if budget is None else budget.is_open) is is_open
    if budget:
        assert budget.num_tokens == 4 and byte_level.decode(budget.closing_ids) == budget.closing == "</think>"


def test_model_that_does_not_think_has_no_budget(byte_level: Tokenizer) -> None:
    with pytest.raises(UnsupportedField, match="does not think") as rejected:
        thinking_budget(_request(thinking_field="its name"), OutputFormat("hermes"), byte_level, "<think>")
    assert rejected.value.param == "its name"
    assert thinking_budget(_request(None), OutputFormat(), byte_level, "") is None


@pytest.mark.parametrize("seed", range(40))
def test_counted_thinking_stays_within_the_budget(
    seed: int, byte_level_dir: Path, byte_level: Tokenizer, compiler: GrammarCompiler
) -> None:
    """For random pieces of text, the router counts thinking as the replicas do."""
    rng = random.Random(seed)
    pieces = ["<think> so", *"<thikn>", "th", "</", "/", ">\n", " ", "\n", "🎉", "a", "</think>", "<think>"]
    written = [token for _ in range(60) for token in byte_level.encode(rng.choice(pieces), add_special_tokens=False)]
    if seed % 2:  # opens thinking, then emits near misses of the closing marker
        written = byte_level.encode(rng.choice(["<think>", "\n<think> so"]), add_special_tokens=False) + written
    end = rng.choice(["assistant\n", "assistant\n<think>\n"])
    budget = thinking_budget(_request(rng.choice([0, 1, 5, 20])), _THINKS, byte_level, end)
    assert budget
    mask, tokens = compiler.bounded(budget), list[int]()
    while len(tokens) < 60:
        forced = mask.only(tokens, 0)
        tokens.append(written.pop(0) if forced is None else forced)
    reader = AnswerReader.of(_CHAT, _THINKS, end)
    choice = ChoiceText(_request(), 0, byte_level, reader=reader)
    delta = choice.add(SampledToken(token_id=token) for token in tokens)
    is_unopened = delta.num_thought is not None  # thinking without an opening tag has no budget
    assert is_unopened or choice.num_thinking <= budget.num_tokens + len(budget.closing_ids)


@pytest.fixture(scope="module")
def compiler(byte_level_dir: Path, byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_level_dir, vocab_size=byte_level.vocab_size)


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("form", [_SCHEMA, _TAGS], ids=["schema", "tags"])
@pytest.mark.parametrize("tags", [THINK, _CHANNEL], ids=lambda tags: tags.opening)
def test_grammar_begins_after_marker_tokens(
    tags: Tags, form: Grammar, is_open: bool, is_special: bool, byte_level_dir: Path, tmp_path: Path
) -> None:
    """Markers may be special tokens, begin with one, or be spelled out."""
    fast = FastTokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    for text in (tags.opening.removesuffix("thought"), tags.closing):
        fast.add_special_tokens([text]) if is_special else fast.add_tokens([text])
    shutil.copytree(byte_level_dir, tmp_path / "model")
    fast.save(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "model")
    compiler = GrammarCompiler(tmp_path / "model", vocab_size=tokenizer.vocab_size)
    output_format = OutputFormat(tags=tags, special=SpecialTokens(compiler.special_tokens))
    request, end = _request(3, grammar=form), f"assistant\n{tags.opening}" if is_open else "assistant\n"
    grammar, budget = bound_answer(request, output_format, end), thinking_budget(request, output_format, tokenizer, end)
    assert grammar and budget and len(budget.closing_ids) == 1
    (ends,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    for opening in ([] if is_open else tokenizer.encode(tags.opening, add_special_tokens=False),):
        mask = compiler.bounded(budget, compiler.compile(grammar).mask([ends]))
        tokens = [*opening]
        if is_special and len(opening) > 1:  # a channel of another name is no thinking
            (other,) = tokenizer.encode("a", add_special_tokens=False)
            assert not is_allowed(compiler.compile(grammar).mask([ends]).allowed(opening[:1], 0), other)
        for token in tokenizer.encode("abc", add_special_tokens=False):
            assert mask.only(tokens, 0) is None and is_allowed(mask.allowed(tokens, 0), token)
            tokens.append(token)
        tokens.append(mask.only(tokens, 0) or -1)
        assert tokenizer.decode(tokens, skip_special_tokens=False).endswith(f"abc{tags.closing}")
        for token in [*tokenizer.encode("{}", add_special_tokens=False), ends]:
            assert is_allowed(mask.allowed(tokens, 0), token), tokenizer.decode(tokens)
            tokens.append(token)
        reader = AnswerReader.of(_CHAT, output_format, end, grammar=form)
        shown = tokenizer.special_ids_in(output_format.markers)
        delta = ChoiceText(request, 0, tokenizer, reader=reader, shown=shown).add(map(SampledToken, tokens))
        assert (delta.thinking, delta.text) == ("abc", "{}")


@pytest.mark.parametrize("stop", ["</think>, so be it", ">!"])
def test_text_held_back_by_a_stop_string_counts_in_order(byte_level: Tokenizer, stop: str) -> None:
    thought, answer = (byte_level.encode(text, add_special_tokens=False) for text in ("Well</think>", ", so be sure"))
    choice = ChoiceText(_request(stop=(stop,)), 0, byte_level, reader=AnswerReader.of(_CHAT, _THINKS, "<think>"))
    delta = choice.add(SampledToken(token_id=token) for token in [*thought, *answer])
    assert choice.num_thinking == len(thought)
    assert delta.thinking + delta.text == "Well, so be sure"
