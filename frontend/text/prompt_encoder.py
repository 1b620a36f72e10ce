"""Conversion of prompts to tokens and back; large inputs are converted on other threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from core.types.errors import ContextLengthExceeded, RequestError
from core.types.request import MAX_BAD_WORD_TOKENS
from frontend.chat.chat import Chat
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.output_format import OutputFormat, thinking_variables, unheeded_fields
from frontend.text.completion_request import CompletionRequest, ModelCard, check, check_token_ids
from frontend.text.text_threads import TextThreads
from frontend.text.tokenizer import Tokenizer

_LONG_TEXT = 2 * 1024  # characters, some 3 ms of tokenizing; longer texts go to another thread
_MANY_TOKENS = 4096  # some 2 ms of decoding
_MESSAGE = 64  # template cost of one message or call, in characters
_MAX_KNOWN = 64  # cached bad_words lists; the prompts of one body, up to a thousand, share one
_MARK = 16  # tokens at the end of a prompt, enough for any thinking tag


@dataclass(eq=False)
class PromptEncoder:
    """Encodes prompts for one model. Bound to one event loop."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model: ModelCard
    output_format: OutputFormat
    threads: TextThreads

    def __post_init__(self) -> None:
        tokenizer, frame = self.tokenizer, self.output_format.frame
        # Special tokens that answer readers need.
        self.shown_ids = tokenizer.special_ids_in(self.output_format.markers)
        # Tokens that end an answer.
        self.end_ids = tokenizer.eos_token_ids | tokenizer.ids_of(frame.ends if frame else ())
        self._bad_words_as_tokens = lru_cache(_MAX_KNOWN)(partial(bad_words_as_tokens, tokenizer))

    def least_tokens(self, request: CompletionRequest) -> int:
        """Return a lower bound of the request's tokens: its size, as if every token were the longest one."""
        least, num_kept = self._least_in(request.prompt), request.truncate_prompt_tokens
        if num_kept is not None:
            least = min(least, num_kept if num_kept > 0 else self.model.max_model_len)
        return least + request.num_choices

    def _least_in(self, prompt: str | Chat | tuple[int, ...]) -> int:
        """Return a lower bound of the tokens of the untruncated prompt."""
        return (
            len(prompt) if isinstance(prompt, tuple) else max(1, -(-num_chars(prompt) // self.tokenizer.longest_token))
        )

    async def tokenize(self, request: CompletionRequest) -> tuple[int, ...]:
        """Return the prompt's tokens, within the usual limits. Raises RequestError and other ClusterErrors."""
        check(request, self.model)
        return await self.encode(request)

    async def detokenize(self, request: CompletionRequest) -> str:
        """Return the text of a prompt of token ids, including special tokens. Raises RequestError."""
        assert isinstance(request.prompt, tuple)
        if (number := len(request.prompt)) > self.model.max_model_len:
            text = f"tokens: has {number} tokens; this model's context holds {self.model.max_model_len}"
            raise ContextLengthExceeded(text, param="tokens")
        check_token_ids(request.prompt, self.model, param="tokens")
        check(request, self.model)
        return await self.text_of(request, request.prompt)

    async def text_of(self, request: CompletionRequest, prompt_ids: tuple[int, ...], *, is_cut: bool = False) -> str:
        """Return the prompt as text: verbatim if given as text and not truncated, else decoded with special tokens."""
        if isinstance(request.prompt, str) and not is_cut:
            return request.prompt
        decode = partial(self.tokenizer.decode, prompt_ids, skip_special_tokens=False)
        return await self.threads.run(request.key_id, decode) if len(prompt_ids) > _MANY_TOKENS else decode()

    async def encode(self, request: CompletionRequest, *, num_other_chars: int = 0) -> tuple[int, ...]:
        """Return the tokens of a checked request. num_other_chars: characters of other prompts in the same call."""
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, Chat) and prompt.tools and prompt.forced is None:
            if self.chat_template.knows_tools and not self.output_format.calls:
                text = "tools: turned off for this model; the operator can set model.tool_parser to auto"
                raise RequestError(text, param="tools")
        # A prompt that would not fit even if every token were the longest one is rejected without tokenizing.
        if self._least_in(prompt) > self.model.max_model_len:
            raise ContextLengthExceeded(
                f"this model's context holds {self.model.max_model_len} tokens; the prompt of {num_chars(prompt)} "
                "characters exceeds it",
                param="messages" if isinstance(prompt, Chat) else "prompt",
            )
        total_chars = num_chars(prompt) + num_other_chars
        if isinstance(prompt, Chat):
            total_chars += _MESSAGE * (len(prompt.messages) + prompt.num_calls)
        if total_chars > _LONG_TEXT:
            return await self.threads.run(request.key_id, self._encode, prompt, request.add_special_tokens)
        return self._encode(prompt, request.add_special_tokens)

    async def bad_words_of(self, request: CompletionRequest) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of a checked request's bad_words, each at the beginning of a text and after a
        space. Raises RequestError if they are too many."""
        words = request.bad_words
        if sum(map(len, words)) > _LONG_TEXT:
            return await self.threads.run(request.key_id, self._bad_words_as_tokens, words)
        return self._bad_words_as_tokens(words)

    def unheeded(self, chat: Chat, prompt_ids: tuple[int, ...]) -> list[str]:
        """Return the client's fields about thinking that have no effect with this model."""
        return unheeded_fields(chat, self.chat_template, self.output_format, self.end_of(prompt_ids))

    def end_of(self, prompt_ids: tuple[int, ...]) -> str:
        """Return the last few characters of a prompt, including special tokens."""
        return self.tokenizer.decode(prompt_ids[-_MARK:], skip_special_tokens=False)

    def _encode(self, prompt: str | Chat, add_special_tokens: bool | None) -> tuple[int, ...]:
        if isinstance(prompt, Chat):
            text = self.chat_template.render(
                prompt.messages,
                variables=thinking_variables(prompt, self.chat_template),
                tools=prompt.tools,
                opens_answer=prompt.opens_answer,
                is_continued=prompt.is_continued,
                paths=prompt.paths,
                writes_tools=self.output_format.writes_tools,
            )
            # The template has written the special tokens.
            return tuple(self.tokenizer.encode(text, add_special_tokens=bool(add_special_tokens)))
        return tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens is not False))


def num_chars(prompt: str | Chat | tuple[int, ...]) -> int:
    """Return the number of characters to tokenize; 0 for token ids."""
    if isinstance(prompt, tuple):
        return 0
    return prompt.num_chars if isinstance(prompt, Chat) else len(prompt)


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
