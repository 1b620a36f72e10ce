"""From a client's grammar to masks over one model's vocabulary. llguidance does both, and is known here alone.

Its own limits bound what a hostile grammar can cost; where they are passed, it is that grammar that fails.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from cluster.grammar.mask import GrammarMask, bits_of
from cluster.words.errors import RequestError
from cluster.words.grammar import Grammar, GrammarKind

logger = logging.getLogger(__name__)

_MAX_KEPT = 256  # grammars; most are some 10 kB
_END = "<the grammar may end here>"
_MAX_ERROR = 300  # characters
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=50_000,  # some 4 ms
    step_max_items=20_000,
    max_lexer_states=10_000,  # some 20 MB
    max_grammar_size=20_000,  # symbols; a schema of 1,000 optional properties takes 0.2 s
    verbose_errors=False,
)


class GrammarCompiler:
    """Any thread may use it. Making one holds the interpreter for as long as the vocabulary takes, 0.3 s of 49,152."""

    def __init__(self, model_dir: Path, *, vocab_size: int) -> None:
        """vocab_size: of the logits. A model whose tokenizer is not understood has no grammars, and serves the rest."""
        self._tokenizer = _open_tokenizer(model_dir / "tokenizer.json", vocab_size)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the latest last

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """At once, if it has been compiled lately."""
        with self._lock:
            found = self._kept.get(grammar)
            if found:
                self._kept.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar, *, param: str = "grammar") -> CompiledGrammar:
        """Mostly some ms, without the interpreter. Raises RequestError that names `param`."""
        if found := self.kept(grammar):
            return found
        if self._tokenizer is None:
            raise RequestError(f"{param}: this model's tokenizer allows no grammars", param=param)
        grammar.check(param)
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
            problem = matcher.get_error() or _first_problem(matcher)
        except ValueError as error:  # of a schema that is none, and of a grammar that cannot be rewritten
            problem = str(error)
        if problem:
            raise RequestError(f"{param}: {_in_one_line(problem)}", param=param)
        compiled = CompiledGrammar(matcher, self._tokenizer)
        with self._lock:
            self._kept[grammar] = compiled
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled


class CompiledGrammar:
    """Only read, by any thread."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._vocab_size = tokenizer.vocab_size
        self._tokens = ~bits_of(tokenizer.eos_tokens, tokenizer.vocab_size)

    def mask(self, stop_token_ids: Iterable[int]) -> GrammarMask:
        """Of one choice, at its beginning. stop_token_ids: what may end it where the grammar lets it end."""
        ends = bits_of(stop_token_ids, self._vocab_size)
        return GrammarMask(self._matcher.deep_copy(), tokens=self._tokens, ends=ends)


def _open_tokenizer(path: Path, vocab_size: int) -> LLTokenizer | None:
    """With one token more, which no model has: the end of an answer. Left to itself, llguidance may take token 0."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        known = set(tokenizer.get_vocab().values())
        tokenizer.add_special_tokens([_END])
        end = tokenizer.token_to_id(_END)
        if end is None or end in known:
            raise ValueError("it has no room for a token more")
        return LLTokenizer(tokenizer.to_str(), n_vocab=max(vocab_size, end + 1, 1 + max(known)), eos_token=[end])
    except Exception as error:  # of tokenizers, plain Exception
        logger.warning("no grammars: %s: %s", path, _in_one_line(str(error)))
        return None


def _source(grammar: Grammar) -> str:
    """As llguidance reads it. JSON is written as json.dumps does: whoever may add blanks may go on for ever."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(_as_lark(grammar.text))
    return LLMatcher.grammar_from_json_schema(
        grammar.text,
        overrides={
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
            "lenient": grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA,
        },
    )


def _as_lark(text: str) -> str:
    """Also from llama.cpp's notation. Raises ValueError."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error


def _first_problem(matcher: LLMatcher) -> str:
    """Why no answer can even begin."""
    probe = matcher.deep_copy()
    has_any = any(probe.compute_bitmask())
    return "" if has_any and not probe.is_error() else f"no answer keeps to it ({probe.get_error() or 'nothing fits'})"


def _in_one_line(text: str) -> str:
    said = text.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    return " ".join(said.split())[:_MAX_ERROR]
