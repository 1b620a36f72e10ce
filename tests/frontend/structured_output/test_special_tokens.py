"""Markers that are special tokens: an answer may use the token or spell the text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from core.grammar.compiler import GrammarCompiler
from core.types.request import Grammar, GrammarKind
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.parsers.thinking import THINK
from frontend.structured_output.constrained_answer import bound_answer
from frontend.structured_output.lark import SpecialTokens
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer
from tests.support.masks import is_allowed

_ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|call|>")
_CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
_TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"additionalProperties": False}}},)
_EMPTY = {"type": "json_schema", "json_schema": {"const": {}}}


@pytest.fixture(scope="module", params=["added", "special"])
def model_dir(request: pytest.FixtureRequest, byte_level_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(byte_level_dir, directory)
    fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    (fast.add_tokens if request.param == "added" else fast.add_special_tokens)(list(_ADDED))
    fast.save(str(directory / "tokenizer.json"))
    return directory


def _accepts(model_dir: Path, grammar: Grammar, text: str, *, is_spelt: bool, thinks: bool = False) -> bool:
    """Return whether the grammar accepts all of it and may end there."""
    tokenizer = Tokenizer(model_dir)
    compiler = GrammarCompiler(model_dir, vocab_size=tokenizer.vocab_size)
    output_format = OutputFormat("hermes", THINK if thinks else None, special=SpecialTokens(compiler.special_tokens))
    chat = Chat(messages=({"role": "user", "content": "hi"},), tools=_TOOLS)
    request = CompletionRequest(id="r", prompt=chat, grammar=grammar, grammar_field="field")
    made = bound_answer(request, output_format, "")
    assert made is not None
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    mask, left, said = compiler.compile(made).mask([end]), text.encode(), list[int]()
    apart = set(compiler.special_tokens.values())
    tokens = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if not (is_spelt and i in apart)}
    while left:  # longest allowed token first
        words = mask.allowed(said, 0)
        known = [token for token, text in tokens.items() if text and left.startswith(text) and is_allowed(words, token)]
        if not known:
            return False
        said.append(max(known, key=lambda token: len(tokens[token])))
        left = left[len(tokens[said[-1]]) :]
    assert is_spelt is not bool(apart & {*said}), "its markers are not what they were to be"
    return is_allowed(mask.allowed(said, 0), end)


def _tags(form: Any) -> Grammar:
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"format": form}))


def _tag(begin: str, content: Any = _EMPTY, end: str = "</tool_call>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _triggered(trigger: str, *tags: dict[str, Any]) -> Grammar:
    return _tags({"type": "triggered_tags", "triggers": [trigger], "tags": tags})


@pytest.mark.parametrize("is_spelt", [False, True])
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"const": 1}'), f"{_CALL}\n{_CALL}"),
        (_triggered("<tool_call>", _tag("<tool_call>\n")),
         "Hm. <tool_call>\n{}</tool_call> and <tool_call>\n{}</tool_call>"),
        (_triggered("<tool", _tag("<tool_call>a "), _tag("<tool_call>b ")), "Hm. <tool_call>b {}</tool_call> so"),
        (_triggered("<|call|>f", _tag("<|call|>f")), "<|call|>f{}</tool_call>"),
        (_triggered("call:", _tag("call:", end="<|call|>")), "a call:{}<|call|>"),
        (_tags(_tag("<think>", {"type": "any_text"}, "</think>")), "<think>Hm, so.</think>"),
        (_tags(_tag("<think>", {"type": "any_text"}, "</think>!")), "<think>Hm, so.</think>!"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_marker_can_be_its_token(model_dir: Path, grammar: Grammar, text: str, is_spelt: bool) -> None:
    assert _accepts(model_dir, grammar, text, is_spelt=is_spelt)


@pytest.mark.parametrize("is_spelt", [False, True])
def test_text_after_a_marker_token_is_constrained(model_dir: Path, is_spelt: bool) -> None:
    tags = _triggered("<tool", _tag("<tool_call>a "), _tag("<tool_call>b "))
    for wrong in ("<tool_call>c {}</tool_call>", "<tool_call>a 1</tool_call>", "Hm <tool_call>"):
        assert not _accepts(model_dir, tags, wrong, is_spelt=is_spelt)
    schema = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"const": 1}')
    for text, is_accepted in (("<think>a</think>1", True), ("<think>a</think>2", False), ("</think>1", False)):
        assert _accepts(model_dir, schema, text, is_spelt=is_spelt, thinks=True) is is_accepted
