"""Chunks of the OpenAI API: server-sent events of one choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frontend.http.event_stream import data
from frontend.http.json_response import JSON, to_json
from frontend.openai.forms import Form, ending
from frontend.text.events import Delta, Finished

_TEXT, _IDS = "\x00", "\x01"  # placeholders in the chunk template; request ids contain visible characters only


class ChoiceChunks:
    """Writer of the chunks of one choice. Chunks with text alone are filled into a template that is encoded once."""

    def __init__(
        self,
        index: int,
        form: Form,
        *,
        head: Mapping[str, Any],
        is_usage_null: bool,
        prompt_ids: Sequence[int] | None,
        num_prompt_tokens: int | None = None,
        echoed: JSON | None = None,
    ) -> None:
        """head: fields common to all chunks. is_usage_null: include `"usage": null` in each. prompt_ids: returned with
        the first chunk, if the client requested token ids. num_prompt_tokens: include the choice's usage so far in each
        chunk; None: do not. echoed: logprobs of a repeated prompt."""
        self._index = index
        self._form = form
        self._head = head
        self._more: JSON = {"usage": None} if is_usage_null else {}
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._prompt_ids = prompt_ids
        self._has_ids = prompt_ids is not None
        self._echoed = echoed
        self._before, behind = self._chunk(form.piece(_TEXT), **self._ids(_IDS)).split(to_json(_TEXT))
        self._between, _, self._behind = behind.partition(to_json(_IDS)) if self._has_ids else (b"", b"", behind)

    def opening(self) -> bytes:
        """Return the chunk before any generated text; empty if there is none."""
        opening, form = self._form.opening(), self._form
        if self._prompt_ids is None:
            return self._chunk(opening, logprobs=self._echoed) if opening else b""
        ids: JSON = {"prompt_token_ids": list(self._prompt_ids)}
        if form.is_prompt_shared:
            return self._chunk(opening or form.piece(""), of_chunk=ids)
        return self._chunk(opening or form.piece(""), logprobs=self._echoed, **ids)

    def chunk(self, event: Delta | Finished) -> bytes:
        """Return the chunk of an event; empty if it has nothing to send."""
        if isinstance(event, Finished):
            return self._chunk(self._form.piece(""), **ending(event))
        if self._num_prompt_tokens is not None:
            self._num_tokens += len(event.tokens)
        elif event.text and not event.has_logprobs and not event.has_more_than_text:
            if not self._has_ids:
                return b"%b%b%b" % (self._before, to_json(event.text), self._behind)
            listed = to_json([token.token_id for token in event.tokens])
            return b"%b%b%b%b%b" % (self._before, to_json(event.text), self._between, listed, self._behind)
        if not event.text and not event.has_logprobs and not self._has_ids and not event.has_more_than_text:
            return b""
        logprobs = self._form.logprobs([event]) if event.has_logprobs else None
        ids = self._ids([token.token_id for token in event.tokens])
        first, *others = self._form.said(event)
        return self._chunk(first, logprobs=logprobs, **ids) + b"".join(map(self._chunk, others))

    def _ids(self, token_ids: object) -> JSON:
        return {"token_ids": token_ids} if self._has_ids else {}

    def _chunk(self, piece: JSON, *, of_chunk: JSON | None = None, **more: Any) -> bytes:
        choice = {"index": self._index, **piece, "logprobs": None, "finish_reason": None, **more}
        return data({**self._head, "choices": [choice], **self._usage(), **(of_chunk or {})})

    def _usage(self) -> JSON:
        if (num_prompt := self._num_prompt_tokens) is None:
            return self._more
        total = num_prompt + self._num_tokens
        usage = {"prompt_tokens": num_prompt, "completion_tokens": self._num_tokens, "total_tokens": total}
        return {"usage": usage}
