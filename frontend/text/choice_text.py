"""Text of one choice: detokenized, and cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from core.types.request import FinishReason, SampledToken
from frontend.text.answer_reader import AnswerReader
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer


class ChoiceText:
    """Converts the tokens of one choice to text, in order, until `finished` is set."""

    def __init__(
        self,
        request: CompletionRequest,
        choice: int,
        tokenizer: Tokenizer,
        *,
        reader: AnswerReader | None = None,
        shown: Container[int] = (),
    ) -> None:
        """reader: parser of thinking and calls, if any. shown: special tokens that the reader needs to see."""
        self.choice = choice
        self._reader = reader
        # Stop matching delays the text. This reader gets it undelayed, to count thinking tokens.
        self._undelayed = reader.fresh() if reader and request.stop else None
        self.finished: Finished | None = None
        self.num_tokens = 0
        self.num_thinking = 0  # thinking tokens, from after each opening marker up to the closing one
        self._num_chars = 0
        self._min_tokens = request.min_tokens
        self._include_stop = request.include_stop
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=request.skip_special_tokens, shown=shown if reader else ()
        )
        self._stops = StopMatcher(request.stop, include_stop=request.include_stop) if request.stop else None

    def add(self, tokens: Iterable[SampledToken]) -> Delta:
        """Consume tokens up to the one that ends the choice, by itself or by a stop string; then set `finished`."""
        assert self.finished is None
        delta = Delta(self.choice, "", [], [])
        for token in tokens:
            delta.tokens.append(token)
            delta.text_offsets.append(self._num_chars)
            if self._reader is None:
                delta.text += self._add(token)
            else:
                self._read(self._reader, token, delta)
            if self.finished is not None:
                break
        return delta

    def _read(self, reader: AnswerReader, token: SampledToken, delta: Delta) -> None:
        counted = self._undelayed or reader
        self.num_thinking += counted.is_thinking
        was_unopened = counted.is_unopened
        delta.add(reader.add(self._add(token)))
        if counted.is_unopened != was_unopened:
            self.num_thinking = self.num_tokens
        if self.finished is not None and not reader.is_over:
            delta.add(reader.finish(is_cut=self.finished.reason is FinishReason.LENGTH))
        if self.finished is None and reader.is_over:
            self.finished = Finished(self.choice, FinishReason.STOP)
        if self.finished is not None:
            self.finished = replace(self.finished, num_calls=reader.num_calls)

    def _add(self, token: SampledToken) -> str:
        """Return the text that can be sent now."""
        self.num_tokens += 1
        is_hidden = token.finish_reason is FinishReason.STOP and not self._include_stop
        text = "" if is_hidden else self._detokenizer.add(token.token_id)
        if token.finish_reason is not None:
            text += self._detokenizer.finish()
        self._num_chars += len(text)
        if self._undelayed is not None:
            self._undelayed.add(text)
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
    """Incremental detokenizer of one choice.

    The concatenation of all results of `add` and `finish` equals `tokenizer.decode` of all ids. The cost of a call
    does not depend on the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Container[int] = ()) -> None:
        """shown: special tokens that are kept although skip_special_tokens is set."""
        self._tokenizer = tokenizer
        self._whole_text = tokenizer.whole_text
        self._shown = shown
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_in_pieces = False  # some bytes of the next character are buffered

    def add(self, token_id: int) -> str:
        """Return the characters that this token completes; empty while a character is incomplete."""
        if not self._is_in_pieces and (text := self._whole_text(token_id)) is not None:
            return text
        if self._skip_special_tokens and self._tokenizer.is_special(token_id) and token_id not in self._shown:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._is_in_pieces = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the remaining text: U+FFFD for an incomplete character, otherwise nothing."""
        self._is_in_pieces = False
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts the text at the first stop string, and holds back a suffix that may still become one.

    First means complete at the earliest character. If several end there, the longest wins, so that the result depends
    neither on how the text was split nor on the order of the stop strings.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent, and the stop string if one matched. Add nothing after a match."""
        if not self._patterns:
            return text, None
        for i, character in enumerate(text):
            # A list, not a generator: every pattern must see every character.
            complete = [pattern for pattern in self._patterns if pattern.advance(character)]
            if complete:
                stop = complete[0].text
                whole = self._held + text[: i + 1]
                self._held = ""
                return (whole if self._include_stop else whole[: -len(stop)]), stop
        whole = self._held + text
        num_held = max(pattern.num_matched for pattern in self._patterns)
        cut = len(whole) - num_held
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Prefix of one stop string that the text ends with (Knuth, Morris and Pratt 1977): amortized O(1) per character.

    The failure table grows only as far as the text has matched, so a stop string that never begins to match costs
    nothing, whatever its length.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = [0]  # for each prefix so far: length of its longest proper prefix that is also its suffix

    def advance(self, character: str) -> bool:
        """Advance by one character. Return whether the text now ends with the whole stop string."""
        self.num_matched = self._extend(self.num_matched, character)
        if self.num_matched > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], character))
        return self.num_matched == len(self.text)

    def _extend(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
