"""The thinking budget holds exactly, as a function of the tokens alone, for any caller and after a migration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from core.grammar.compiler import GrammarCompiler
from core.grammar.mask import ThinkingMask
from core.types.errors import RequestError
from core.types.request import Grammar, GrammarKind, ThinkingBudget
from tests.support.character_tokenizer import CHARACTERS, END, save_tokenizer
from tests.support.masks import character_ids, make_compiler

_OPENING, _CLOSING = "<think>", "</think>"
_PROMPT = [5, 6, 7]
_START = len(_PROMPT)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return make_compiler(tmp_path_factory.mktemp("letters"), vocab_size=131)


def _budget(num_tokens: int, *, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens,
        is_open=is_open,
        opening=_OPENING,
        closing=_CLOSING,
        closing_ids=tuple(character_ids(_CLOSING)),
    )


def _output(mask: ThinkingMask, wanted: str, num_tokens: int = 40) -> str:
    """Return the output of a model that wants to write `wanted` in a loop and obeys forced tokens."""
    tokens, script = list(_PROMPT), character_ids(wanted)
    for _ in range(num_tokens):
        forced = mask.only(tokens, _START)
        words = mask.allowed(tokens, _START)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        assert allowed == [forced] if forced is not None else len(allowed) > 130
        wish = script.pop(0) if forced is None and script else CHARACTERS.index(".")
        tokens.append(wish if forced is None else forced)
    return "".join(CHARACTERS[token] for token in tokens[_START:]).rstrip(".")


@pytest.mark.parametrize(
    ("num_tokens", "is_open", "wanted", "expected"),
    [
        (5, True, "abcdefgh", "abcde</think>fgh"),
        (0, True, "abc", "</think>abc"),
        (3, False, "<think>abcdef", "<think>abc</think>def"),
        (0, False, " <think>abc", " <think></think>abc"),
        (12, True, "ab</think>cdefghijkl", "ab</think>cdefghijkl"),
        (10, True, "ab</think>cd", "ab</think>cd"),  # its last token closes the thinking
        (9, True, "ab</think>cd", "ab</think</think>>cd"),  # it would have closed one token later
        (4, True, "ab</think>cd", "ab</</think>think>cd"),
        (2, False, "abcd<think>abcdef", "abcd<think>abcdef"),  # the answer starts without thinking
        (2, False, "<thi>abc", "<thi>abc"),
        (1, True, "</think>a<think>bcd", "<</think>/think>a<think>bcd"),
        (8, True, "</think>a<think>bcdefghijkl", "</think>a<think>bcdefghijkl"),  # only the first thinking counts
    ],
)
def test_thinking_ends_at_its_budget(
    compiler: GrammarCompiler, num_tokens: int, is_open: bool, wanted: str, expected: str
) -> None:
    assert _output(compiler.bounded(_budget(num_tokens, is_open=is_open)), wanted) == expected


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 60])
def test_state_is_a_function_of_the_tokens(compiler: GrammarCompiler, num_tokens: int, is_open: bool) -> None:
    """A mask that saw each token, a new one, and a fork agree; may_forbid is true whenever a token is forced."""
    budget = _budget(num_tokens, is_open=is_open)
    for wanted in ("abcdefg", "<think>ab</think>c", "ab</th</think>d", ".<think>a"):
        tokens = [*_PROMPT, *character_ids(_output(compiler.bounded(budget), wanted))]
        grown = compiler.bounded(budget)
        forced = [grown.only(tokens[:end], _START) for end in range(_START, len(tokens) + 1)]
        for number, one in enumerate(forced):
            so_far = tokens[: _START + number]
            assert compiler.bounded(budget).only(so_far, _START) == one
            assert grown.fork().only(so_far, _START) == one
            for coming in (0, 1):
                may_forbid = compiler.bounded(budget).may_forbid(so_far[: len(so_far) - coming], _START, coming)
                assert may_forbid or number < coming or one is None, "a forced token without may_forbid"


def test_unconstrained_answer_is_masked_only_near_the_end_of_its_thinking(compiler: GrammarCompiler) -> None:
    """Other steps can be scheduled asynchronously."""
    tokens = [*_PROMPT, *character_ids("abcdef</think>ghij")]
    mask = compiler.bounded(_budget(6))
    may_forbid = [mask.may_forbid(tokens[:end], _START, 0) for end in range(_START, len(tokens) + 1)]
    assert may_forbid == [False] * 6 + [True] * 8 + [False] * 5


def test_grammar_continues_after_a_forced_end(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"enum": ["yes"], "x-guidance": {"whitespace_flexible": False}})
    text = f'start: thinking answer\nthinking[suffix="</think>"]: /(?s:.*)/\nanswer: %json {schema}'
    grammar = compiler.compile(Grammar(kind=GrammarKind.LARK, text=text)).mask([END])
    mask = compiler.bounded(_budget(4), grammar)
    tokens = [*_PROMPT, *character_ids("abcd")]
    while tokens[-1] != END and (known := mask.only(tokens, _START)) is not None:
        tokens.append(known)
    assert tokens[_START:] == [*character_ids('abcd</think>"yes"'), END]
    assert mask.may_forbid(tokens, _START, 0) and mask.fork().failure == mask.failure == ""


@pytest.mark.parametrize("num_tokens", range(8))
def test_thinking_with_a_grammar_does_not_end_within_a_character(tmp_path: Path, num_tokens: int) -> None:
    """The grammar allows only whole characters, but the marker would otherwise be forced within one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token per byte
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler, thought = GrammarCompiler(tmp_path, vocab_size=256), "aé\U0001f9ff"
    text = f'start: thinking "b"\nthinking[suffix="{_CLOSING}"]: /(?s:.*)/'
    ids, closing = (tokenizer.encode(text).ids for text in (thought, _CLOSING))
    budget = replace(_budget(num_tokens), closing_ids=tuple(closing))
    mask = compiler.bounded(budget, compiler.compile(Grammar(kind=GrammarKind.LARK, text=text)).mask([]))
    tokens, wanted = list(_PROMPT), list(ids)
    while not (tokenizer.decode(tokens[_START:]).endswith(_CLOSING) or mask.failure):
        forced = mask.only(tokens, _START)
        assert mask.fork().only(tokens, _START) == forced
        tokens.append(wanted.pop(0) if forced is None else forced)
    whole = next(end for end in range(5) if len(thought[:end].encode()) >= num_tokens)
    assert tokenizer.decode(tokens[_START:]) == thought[:whole] + _CLOSING
    mask.allowed(tokens, _START)
    assert not mask.failure


def test_a_marker_that_is_one_token_special_or_not(tmp_path: Path) -> None:
    """Special tokens, which have no text, count as no text."""
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(_OPENING, special=False, normalized=False)])
    tokenizer.add_special_tokens([_CLOSING])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opening, closing = (tokenizer.token_to_id(text) for text in (_OPENING, _CLOSING))
    compiler = GrammarCompiler(tmp_path, vocab_size=131)
    mask = compiler.bounded(replace(_budget(2, is_open=False), closing_ids=(closing,)))

    def forced(*tokens: int) -> int | None:
        return mask.fork().only([*_PROMPT, *tokens], _START)

    assert [forced(END, opening, *character_ids("ab")[:number]) for number in range(3)] == [None, None, closing]
    assert (
        forced(opening, *character_ids("ab"), closing) is None
        and forced(opening, 3, closing, *character_ids("abc")) is None
    )


@pytest.mark.parametrize(
    "wrong",
    [{"num_tokens": -1}, {"closing_ids": ()}, {"closing_ids": (131,)}, {"closing": ""}, {"opening": "a" * 300}],
)
def test_invalid_budget_is_rejected(wrong: dict[str, object]) -> None:
    _budget(3).check(131)
    with pytest.raises(RequestError) as rejected:
        replace(_budget(3), **wrong).check(131)  # type: ignore[arg-type]
    assert rejected.value.param == "thinking"


def test_unsupported_tokenizer_rejects_a_budget(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="tokenizer") as rejected:
        GrammarCompiler(tmp_path, vocab_size=8).bounded(_budget(1), param="field")
    assert rejected.value.param == "field"
