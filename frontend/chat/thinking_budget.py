"""Thinking budget of an answer, in the model's own markers."""

from __future__ import annotations

from core.types.errors import UnsupportedField
from core.types.thinking_budget import ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.output_format import OutputFormat
from frontend.structured_output.constrained_answer import may_think
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer


def thinking_budget(
    request: CompletionRequest, output_format: OutputFormat, tokenizer: Tokenizer, prompt: str
) -> ThinkingBudget | None:
    """Return the budget; None if the request sets none or leaves no room for thinking. prompt: its last characters
    suffice. Raises UnsupportedField if the model does not think."""
    num_tokens, field, tags = request.thinking_token_budget, request.thinking_field, output_format.tags
    if num_tokens is None:
        return None
    chat, grammar = request.prompt, request.grammar
    if tags is None and isinstance(chat, Chat) and chat.thinks is not None:
        return None  # the field that turns thinking on has no effect with this model, so neither has its budget
    if tags is None:
        text = f"{field}: not supported; this model does not think (the operator can set model.reasoning_parser)"
        raise UnsupportedField(text, param=field)
    start = output_format.start(chat if isinstance(chat, Chat) else None, prompt)
    if not (may_think(grammar, start) if isinstance(chat, Chat) else grammar is None):
        return None
    return ThinkingBudget(
        num_tokens=num_tokens,
        is_open=start == "inside",
        opening=tags.opening,
        closing=tags.closing,
        closing_ids=tuple(tokenizer.encode(tags.closing, add_special_tokens=False)),
    )
