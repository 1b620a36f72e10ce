"""Compilation of grammars to token masks over one model's vocabulary. The only user of llguidance.

llguidance's limits bound the cost of a hostile grammar, and exceeding them fails only that grammar. Requests do not
share a compiled grammar: copies of a matcher share its lexer states and therefore its limits.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from core.grammar.mask import GrammarMask, ThinkingMask, bits_of
from core.grammar.strict_schema import ESCAPES, exact, has_unwritten, is_endless
from core.model.tokenizer_file import open_tokenizer
from core.types.errors import RequestError
from core.types.json_schema import WRITTEN
from core.types.request import SCHEMA_RULE, Grammar, GrammarKind, ThinkingBudget

logger = logging.getLogger(__name__)

_END = "<the grammar may end here>"
_MAX_ERROR = 300  # characters
_OPTION = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # llguidance's own; clients lack the option
_MAX_COMPILE_S = 0.5  # thread time; the limits below reject grammars that would take much longer
_QUICK_S = 0.02
_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,  # about 2 ms
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=20_000,
    max_items_in_row=10_000,  # a schema of 1,000 optional properties needs 4,007
    max_lexer_states=10_000,  # about 10 MB
    max_grammar_size=20_000,  # symbols; such a schema takes 0.2 s
    verbose_errors=False,
)
_OF_PATTERN = re.compile(r"regex parse error|^pattern: ")  # problems of regular expressions in schemas
_HAS_LENIENT = (GrammarKind.LENIENT_JSON_SCHEMA, GrammarKind.LARK)  # kinds that may hold lenient schemas
_BEGINS_LARK = re.compile(r"\s*(%llguidance\b|start\s*:)")


class GrammarCompiler:
    """Compiler for one tokenizer. Thread-safe. Its construction holds the GIL: 0.3 s for 49,152 tokens."""

    def __init__(self, model_dir: Path, *, vocab_size: int) -> None:
        """vocab_size: width of the logits. If the tokenizer is unsupported, the model is served without grammars."""
        self._tokenizer, self.special_tokens = _open_tokenizer(model_dir, vocab_size)
        if self._tokenizer is not None:
            of_tokenizer = self._tokenizer.vocab_size
            self._tokens = bits_of(range(vocab_size), of_tokenizer) & ~bits_of(self._tokenizer.eos_tokens, of_tokenizer)

    def compile(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        """Compile a grammar, mostly within milliseconds and without the GIL. Raises RequestError that names `param`."""
        tokenizer = self._understood(param)
        grammar.check(param)
        begin = time.thread_time()
        matcher, rebuild, problem = _matched(tokenizer, grammar)
        if _OF_PATTERN.search(problem) and grammar.kind in _HAS_LENIENT:
            weaker = _matched(tokenizer, grammar, keeps_patterns=False)
            if not weaker[2]:
                matcher, rebuild, problem = weaker
        took_s = time.thread_time() - begin
        if not problem and took_s > _MAX_COMPILE_S:
            problem = f"takes longer than {_MAX_COMPILE_S} s to compile"
        if problem or matcher is None:
            raise RequestError(f"{param}: {_in_one_line(problem)}", param=param)
        return CompiledGrammar(matcher, self._tokens, tokenizer.vocab_size, rebuild if took_s < _QUICK_S else None)

    def bounded(
        self, budget: ThinkingBudget, grammar: GrammarMask | None = None, *, param: str = "thinking"
    ) -> ThinkingMask:
        """Return a mask that enforces the thinking budget and, if given, `grammar`. Raises RequestError that names
        `param`.
        """
        tokenizer = self._understood(param)
        markers = (budget.opening.encode(), budget.closing.encode())

        def bytes_of(token_id: int) -> bytes:
            text = tokenizer.decode_bytes([token_id])
            is_hidden = tokenizer.is_special_token(token_id) and not any(text in marker for marker in markers)
            return b"" if is_hidden else text

        return ThinkingMask(budget, bytes_of=bytes_of, vocab_size=tokenizer.vocab_size, grammar=grammar)

    def _understood(self, param: str) -> LLTokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{param}: this model's tokenizer does not support grammars", param=param)
        return self._tokenizer


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """Compiled grammar of one request. The masks of its choices share its cost limits."""

    matcher: LLMatcher
    tokens: NDArray[np.uint32]  # bitmask of the model's tokens, without the matcher's end token
    vocab_size: int  # of the matcher
    rebuild: Callable[[], LLMatcher] | None  # compiles the grammar again; None if that is slow

    @property
    def is_quick(self) -> bool:
        """True if it compiles so fast that it needs no rate limit."""
        return self.rebuild is not None

    def mask(self, stop_token_ids: Iterable[int]) -> GrammarMask:
        """Return the mask of a new choice. stop_token_ids: tokens that may end it where the grammar may end."""
        ends = bits_of(stop_token_ids, self.vocab_size)
        return GrammarMask(matcher=self.matcher.deep_copy(), tokens=self.tokens, ends=ends, rebuild=self.rebuild)


def _open_tokenizer(model_dir: Path, vocab_size: int) -> tuple[LLTokenizer | None, dict[str, int]]:
    """Open the tokenizer with an extra token that ends an answer; by default llguidance may use token 0 as the end.

    Also returns the special tokens by text; a grammar matches them only as `<[id]>`. llguidance treats every added
    token in angle brackets as special.
    """
    try:
        tokenizer = open_tokenizer(model_dir)
        known = set(tokenizer.get_vocab().values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in known:
            raise ValueError("it has no room for another token")
        opened = LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end + 1, 1 + max(known)), eos_token=[end])
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        return opened, {text: i for text, i in added.items() if i != end and opened.is_special_token(i)}
    except Exception as error:  # tokenizers raises plain Exception
        logger.warning("grammars are disabled: %s: %s", model_dir, _in_one_line(str(error)))
        return None, {}


def _matched(
    tokenizer: LLTokenizer, grammar: Grammar, *, keeps_patterns: bool = True
) -> tuple[LLMatcher | None, Callable[[], LLMatcher] | None, str]:
    """Return a matcher, a function that rebuilds it, and the grammar's problem, which is empty if there is none.

    keeps_patterns: as in `_source`.
    """
    try:
        source = _source(grammar, keeps_patterns=keeps_patterns)
        rebuild = partial(LLMatcher, tokenizer, source, log_level=0, limits=_LIMITS)
        matcher = rebuild()
        return matcher, rebuild, matcher.get_error() or _first_problem(matcher)
    except ValueError as error:  # an invalid schema, or a grammar that cannot be rewritten
        return None, None, str(error)


def _source(grammar: Grammar, *, keeps_patterns: bool) -> str:
    """Return the grammar in llguidance's form. keeps_patterns: False drops the regular expressions of lenient schemas,
    because one is invalid. Raises ValueError."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(
                SCHEMA_RULE.sub(partial(_exact_rule, keeps_patterns=keeps_patterns), _as_lark(grammar.text))
            )
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("structural tags must be converted to Lark before they are compiled")
    is_lenient = grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA
    text = _exact_text(grammar.text, {**WRITTEN, "lenient": is_lenient}, keeps_patterns=keeps_patterns)
    return LLMatcher.grammar_from_json_schema(text)


def _exact_rule(rule: re.Match[str], *, keeps_patterns: bool) -> str:
    """Rewrite a Lark rule that is a schema. Keeps any other rule; llguidance reports its errors."""
    try:
        options = json.loads(rule[2]).get("x-guidance", {})
    except (ValueError, AttributeError, RecursionError):
        return rule[0]
    return rule[1] + _exact_text(rule[2], options if isinstance(options, dict) else {}, keeps_patterns=keeps_patterns)


def _exact_text(text: str, options: dict[str, Any], *, keeps_patterns: bool) -> str:
    """Rewrite a schema. `options` replace the schema's own options, which could undo this rewrite.

    Instances are formatted as by json.dumps, because optional blanks could repeat without end. Raises ValueError.
    """
    is_lenient = options.get("lenient") is True
    try:
        schema = exact(json.loads(text), is_lenient=is_lenient, keeps_patterns=keeps_patterns or not is_lenient)
        if is_endless(schema):
            raise ValueError("no finite answer satisfies it: it refers only to itself")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    escapes = {} if is_lenient and has_unwritten(schema) else {"json_allowed_escapes": ESCAPES}
    return json.dumps({**schema, "x-guidance": {**options, **escapes}})


def _as_lark(text: str) -> str:
    """Return Lark text; converts llama.cpp's GBNF. Raises ValueError."""
    if any(_BEGINS_LARK.match(line) for line in text.splitlines()):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error


def _first_problem(matcher: LLMatcher) -> str:
    """Return why no answer can even begin; empty if one can."""
    probe = matcher.deep_copy()
    has_any = any(probe.compute_bitmask())
    if has_any and not probe.is_error():
        return ""
    detail = probe.get_error().partition("\n")[0].replace("NoExtensionBias", "").strip()  # its name for this error
    return f"no answer can satisfy it ({detail or 'nothing fits'})"


def _in_one_line(text: str) -> str:
    message = text.partition("<backtrace>")[0].replace("<non-verbose/>", "").replace(_OPTION, "Use anyOf")
    return " ".join(message.split())[:_MAX_ERROR]
