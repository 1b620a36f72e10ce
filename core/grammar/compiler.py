"""From a client's grammar to masks over one model's vocabulary. llguidance does both, and is known here alone.

Its own limits bound what a hostile grammar can cost; where they are passed, it is that grammar that fails. Nothing that
is compiled serves two requests: matchers of one origin share what they have found out, and with it those limits.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray
from tokenizers import Tokenizer

from core.grammar.mask import GrammarMask, bits_of
from core.grammar.strict_schema import ESCAPES, exact, has_unwritten
from core.grammar.thinking_mask import ThinkingMask
from core.grammar.unsatisfiable_schema import is_endless
from core.types.constraints import SCHEMA_RULE, Grammar, GrammarKind
from core.types.errors import RequestError
from core.types.json_schema import WRITTEN
from core.types.thinking_budget import ThinkingBudget

logger = logging.getLogger(__name__)

_END = "<the grammar may end here>"
_MAX_ERROR = 300  # characters
_MAX_COMPILE_S = 0.5  # of a thread's time; what would take much longer, a limit refuses before
_QUICK_S = 0.02
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,  # some 2 ms
    step_lexer_fuel=50_000,  # some 4 ms
    step_max_items=20_000,
    max_items_in_row=10_000,  # a schema of 1,000 optional properties needs 4,007
    max_lexer_states=10_000,  # some 10 MB
    max_grammar_size=20_000,  # symbols; that schema takes 0.2 s
    verbose_errors=False,
)
_BEGINS_LARK = re.compile(r"\s*(%llguidance\b|start\s*:)")


class GrammarCompiler:
    """Any thread may use it. Making one holds the interpreter for as long as the vocabulary takes, 0.3 s of 49,152."""

    def __init__(self, model_dir: Path, *, vocab_size: int) -> None:
        """vocab_size: of the logits. A model whose tokenizer is not understood has no grammars, and serves the rest."""
        self._tokenizer, self.special_tokens = _open_tokenizer(model_dir / "tokenizer.json", vocab_size)
        if self._tokenizer is not None:
            of_tokenizer = self._tokenizer.vocab_size
            self._tokens = bits_of(range(vocab_size), of_tokenizer) & ~bits_of(self._tokenizer.eos_tokens, of_tokenizer)

    def compile(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        """For one request. Mostly some ms, without the interpreter. Raises RequestError that names `param`."""
        tokenizer = self._understood(param)
        grammar.check(param)
        begin = time.thread_time()
        try:
            source = _source(grammar)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
            problem = matcher.get_error() or _first_problem(matcher)
        except ValueError as error:  # of a schema that is none, and of a grammar that cannot be rewritten
            problem = str(error)
        took_s = time.thread_time() - begin
        if not problem and took_s > _MAX_COMPILE_S:
            problem = f"takes longer than {_MAX_COMPILE_S} s to compile"
        if problem:
            raise RequestError(f"{param}: {_in_one_line(problem)}", param=param)

        def anew() -> LLMatcher:
            return LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)

        again = anew if took_s < _QUICK_S else None
        return CompiledGrammar(matcher, tokens=self._tokens, vocab_size=tokenizer.vocab_size, anew=again)

    def bounded(
        self, budget: ThinkingBudget, grammar: GrammarMask | None = None, *, param: str = "thinking"
    ) -> ThinkingMask:
        """The mask of the first choice of a request, which thinks for so long, around that of its grammar. Raises
        RequestError that names `param`."""
        tokenizer = self._understood(param)

        markers = (budget.opening.encode(), budget.closing.encode())

        def bytes_of(token_id: int) -> bytes:
            said = tokenizer.decode_bytes([token_id])
            is_hidden = tokenizer.is_special_token(token_id) and said not in markers
            return b"" if is_hidden else said

        return ThinkingMask(budget, bytes_of=bytes_of, vocab_size=tokenizer.vocab_size, grammar=grammar)

    def _understood(self, param: str) -> LLTokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{param}: this model's tokenizer allows no grammars", param=param)
        return self._tokenizer


class CompiledGrammar:
    """The compiled grammar of one request, for the masks of its choices: they share what these may cost."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        tokens: NDArray[np.uint32],
        vocab_size: int,
        anew: Callable[[], LLMatcher] | None,
    ) -> None:
        """tokens: bits of what the model has, without the matcher's own end. vocab_size: of the matcher. anew: compiles
        it again, soon; None: it takes long."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._anew = anew
        self.is_quick = anew is not None  # compiling it took so little that nobody need count how often it is done

    def mask(self, stop_token_ids: Iterable[int]) -> GrammarMask:
        """Of the first choice, at its beginning. stop_token_ids: what may end it where the grammar lets it end."""
        ends = bits_of(stop_token_ids, self._vocab_size)
        return GrammarMask(self._matcher.deep_copy(), tokens=self._tokens, ends=ends, anew=self._anew)


def _open_tokenizer(path: Path, vocab_size: int) -> tuple[LLTokenizer | None, dict[str, int]]:
    """With one token more, which no model has: the end of an answer. Left to itself, llguidance may take token 0.

    And the tokens that no text of a grammar matches, only `<[id]>` does, by their text: llguidance takes every added
    token in angle brackets for one of these.
    """
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        known = set(tokenizer.get_vocab().values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in known:
            raise ValueError("it has no room for a token more")
        opened = LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end + 1, 1 + max(known)), eos_token=[end])
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        return opened, {text: i for text, i in added.items() if i != end and opened.is_special_token(i)}
    except Exception as error:  # of tokenizers, plain Exception
        logger.warning("no grammars: %s: %s", path, _in_one_line(str(error)))
        return None, {}


def _source(grammar: Grammar) -> str:
    """As llguidance reads it. Raises ValueError."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(SCHEMA_RULE.sub(_exact_rule, _as_lark(grammar.text)))
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("structural tags are Lark before they are compiled")
    is_lenient = grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    return LLMatcher.grammar_from_json_schema(_exact_text(grammar.text, {**WRITTEN, "lenient": is_lenient}))


def _exact_rule(rule: re.Match[str]) -> str:
    """Of a grammar in Lark, a rule that is a schema. What is no schema, llguidance says."""
    try:
        options = json.loads(rule[2]).get("x-guidance", {})
    except (ValueError, AttributeError, RecursionError):
        return rule[0]
    return rule[1] + _exact_text(rule[2], options if isinstance(options, dict) else {})


def _exact_text(text: str, options: dict[str, Any]) -> str:
    """options: how it is written; what the schema says of that is not asked, for it could take back what is done here.

    JSON is written as json.dumps does: whoever may add blanks may go on for ever. Raises ValueError.
    """
    is_lenient = options.get("lenient") is True
    try:
        schema = exact(json.loads(text), is_lenient=is_lenient)
        if is_endless(schema):
            raise ValueError("no answer to it ends: it only leads back to itself")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    escapes = {} if is_lenient and has_unwritten(schema) else {"json_allowed_escapes": ESCAPES}
    return json.dumps({**schema, "x-guidance": {**options, **escapes}})


def _as_lark(text: str) -> str:
    """Also from llama.cpp's notation. Raises ValueError."""
    if any(_BEGINS_LARK.match(line) for line in text.splitlines()):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error


def _first_problem(matcher: LLMatcher) -> str:
    """Why no answer can even begin."""
    probe = matcher.deep_copy()
    has_any = any(probe.compute_bitmask())
    if has_any and not probe.is_error():
        return ""
    said = probe.get_error().partition("\n")[0].replace("NoExtensionBias", "").strip()  # which is that, in its words
    return f"no answer keeps to it ({said or 'nothing fits'})"


def _in_one_line(text: str) -> str:
    said = text.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    return " ".join(said.split())[:_MAX_ERROR]
