"""The text of one choice: detokenised, and cut where a stop string says so."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable
from dataclasses import replace

from core.types.request import FinishReason, SampledToken
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta, Finished
from frontend.text.stop_matcher import StopMatcher
from frontend.text.tokenizer import Tokenizer


class ChoiceText:
    """Takes the tokens of choice `choice` in order, until `finished` is set."""

    def __init__(
        self,
        request: CompletionRequest,
        choice: int,
        tokenizer: Tokenizer,
        *,
        reader: AnswerReader | None = None,
        shown: Container[int] = (),
    ) -> None:
        """reader: of what is more than text in it; shown: special tokens that are for him."""
        self.choice = choice
        self._reader = reader
        self._thinking = reader.thinking_anew() if reader else None  # of all that comes, as it comes
        self.finished: Finished | None = None
        self.num_tokens = 0
        self.num_thinking = 0  # tokens of them: behind the marker that begins it, up to the one that ends it
        self._num_chars = 0
        self._min_tokens = request.min_tokens
        self._include_stop = request.include_stop
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=shown if reader else ()
        )
        self._stops = StopMatcher(request.stop, include_stop=request.include_stop) if request.stop else None

    def add(self, tokens: Iterable[SampledToken]) -> Delta:
        """Those up to the one that ends the choice, by itself or by a stop string, which sets `finished`."""
        assert self.finished is None
        delta = Delta(self.choice, "", [], [])
        for token in tokens:
            delta.tokens.append(token)
            delta.text_offsets.append(self._num_chars)
            text = self._add(token)
            if self._reader is None:
                delta.text += text
            else:
                self._read(self._reader, text, delta)
            if self.finished is not None:
                break
        return delta

    def _read(self, reader: AnswerReader, text: str, delta: Delta) -> None:
        delta.add(reader.add(text))
        if self.finished is not None and not reader.is_over:
            delta.add(reader.finish())
        if self.finished is None and reader.is_over:
            self.finished = Finished(self.choice, FinishReason.STOP)
        if self.finished is not None:
            self.finished = replace(self.finished, num_calls=reader.num_calls)

    def _add(self, token: SampledToken) -> str:
        """The text that may go out now."""
        self.num_tokens += 1
        is_hidden = token.finish_reason is FinishReason.STOP and not self._include_stop
        text = "" if is_hidden else self._detokenizer.add(token.token_id)
        if token.finish_reason is not None:
            text += self._detokenizer.finish()
        self._num_chars += len(text)
        if self._thinking is not None:
            self.num_thinking += self._thinking.is_inside
            self._thinking.add(text)  # and not what a stop string lets through: that may come later
        # A stop string may begin after min_tokens only, by the rule for stop tokens in request.finish_reason.
        sent, stop = text, None
        if self._stops and self.num_tokens > self._min_tokens:
            sent, stop = self._stops.add(text)
        if stop is not None:
            self.finished = Finished(self.choice, FinishReason.STOP, stop)
        elif token.finish_reason is not None:
            sent += self._stops.finish() if self._stops else ""
            self.finished = Finished(self.choice, token.finish_reason)
        return sent


class Detokenizer:
    """The text of one choice.

    What `add` and `finish` return, joined, is exactly `tokenizer.decode` of all the ids. Each call costs what its own
    token costs, however long the text has become.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Container[int] = ()) -> None:
        """shown: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        self._shown = shown
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_in_pieces = False  # the character that comes next

    def add(self, token_id: int) -> str:
        """The characters that this token completes; empty while one is still in pieces."""
        if not self._is_in_pieces and (text := self._whole_text(token_id)) is not None:
            return text
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._shown:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._is_in_pieces = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for a character that was never completed, else nothing."""
        self._is_in_pieces = False
        return self._decoder.decode(b"", final=True)
