"""From a client's grammar to masks over one model's vocabulary. llguidance does both, and is known here alone.

Its own limits bound what a hostile grammar can cost; where they are passed, it is that grammar that fails. Nothing that
is compiled serves two requests: matchers of one origin share what they have found out, and with it those limits.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer

from cluster.grammar.mask import GrammarMask, bits_of
from cluster.grammar.thinking_mask import ThinkingMask
from cluster.words.errors import RequestError
from cluster.words.grammar import Grammar, GrammarKind
from cluster.words.thinking_budget import ThinkingBudget

logger = logging.getLogger(__name__)

_END = "<the grammar may end here>"
_MAX_ERROR = 300  # characters
_MAX_COMPILE_S = 0.5  # of a thread's time. A large `multipleOf` takes longer, which no limit of llguidance's bounds
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
        self._tokens = range(vocab_size)

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

        return CompiledGrammar(matcher, tokenizer, self._tokens, anew=anew if took_s < _QUICK_S else None)

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
        self, matcher: LLMatcher, tokenizer: LLTokenizer, tokens: range, *, anew: Callable[[], LLMatcher] | None
    ) -> None:
        """tokens: that the model has. anew: compiles it again, soon; None: it takes long."""
        self._matcher = matcher
        self._vocab_size = tokenizer.vocab_size
        known = bits_of(tokens, tokenizer.vocab_size)
        self._tokens = known & ~bits_of(tokenizer.eos_tokens, tokenizer.vocab_size)
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
    """As llguidance reads it. JSON is written as json.dumps does: whoever may add blanks may go on for ever."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(_as_lark(grammar.text))
        case GrammarKind.STRUCTURAL_TAG:
            raise ValueError("structural tags are Lark before they are compiled")
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
    return "" if has_any and not probe.is_error() else f"no answer keeps to it ({probe.get_error() or 'nothing fits'})"


def _in_one_line(text: str) -> str:
    said = text.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    return " ".join(said.split())[:_MAX_ERROR]
