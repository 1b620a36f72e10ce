"""Tokens to text, as they come: every character is sent once it is whole, and never a part of one."""

from __future__ import annotations

import codecs

from router.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice.

    What `add` and `finish` return, joined, is exactly `tokenizer.decode` of all the ids. Each call costs what its own
    token costs, however long the text has become.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is still in pieces."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
