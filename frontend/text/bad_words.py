"""Words banned from answers: limits, and their token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from core.types.errors import RequestError
from core.types.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from frontend.text.tokenizer import Tokenizer

MAX_BAD_WORD_CHARS = 128


def check_bad_words(words: Sequence[str]) -> None:
    """Check the number and length of the words. Raises RequestError."""
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words: has {len(words)} words; at most {MAX_BAD_WORDS} are accepted", param="bad_words"
        )
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            text = f"bad_words: each word must have 1 to {MAX_BAD_WORD_CHARS} characters, not all of them spaces"
            raise RequestError(text, param="bad_words")


def bad_words_as_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the beginning of a text and after a space. Raises RequestError if they are too
    many."""
    found, num_tokens = dict[tuple[int, ...], None](), 0
    for word in words:
        short, long = (tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " "))
        found[short] = None
        if long[-len(short) :] != short:  # otherwise banning `short` covers both
            found[long] = None
        num_tokens += len(short) + len(long)
        if num_tokens > 2 * MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words: has too many tokens; at most {MAX_BAD_WORD_TOKENS} are accepted", param="bad_words"
            )
    return tuple(found)
