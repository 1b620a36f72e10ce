"""Words that no answer contains: their bounds, and the tokens with which an answer would write them."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.errors import RequestError
from core.types.token_rules import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from frontend.text.tokenizer import Tokenizer

MAX_BAD_WORD_CHARS = 128


def check_bad_words(words: Sequence[str]) -> None:
    """Raises RequestError."""
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words: at most {MAX_BAD_WORDS} are taken, not {len(words)}", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            text = f"bad_words: a word has 1 to {MAX_BAD_WORD_CHARS} characters, and not spaces alone"
            raise RequestError(text, param="bad_words")


def bad_words_as_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Of each, as it is written at the beginning of a text, and as it is behind a space. Raises RequestError where they
    are too many tokens."""
    found, num_tokens = dict[tuple[int, ...], None](), 0
    for word in words:
        short, long = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        found[short] = None
        if long[-len(short) :] != short:  # else it ends with the other, and so it is never whole
            found[long] = None
        num_tokens += len(short) + len(long)
        if num_tokens > 2 * MAX_BAD_WORD_TOKENS:
            raise RequestError(f"bad_words: at most {MAX_BAD_WORD_TOKENS} tokens are taken", param="bad_words")
    return tuple(found)
