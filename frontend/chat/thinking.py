"""Thinking of an answer: template variables that turn it on or off and set its effort, and its budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.types.errors import UnsupportedField
from core.types.request import ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.chat_template import EFFORT, EFFORTS, ChatTemplate
from frontend.chat.output_format import OutputFormat
from frontend.structured_output.constrained_answer import may_think
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer

_USUAL = "medium"


def thinking_variables(chat: Chat, template: ChatTemplate) -> Mapping[str, Any]:
    """Return the template's variables. Those that the client sets by name take precedence."""
    wants, effort = chat.wants_thinking, chat.reasoning_effort
    variables: dict[str, Any] = {} if wants is None else dict.fromkeys(template.switches, wants)
    if wants is False:
        effort = "none"
    elif wants and effort is None and template.efforts.get("none") == template.unasked:
        effort = _USUAL  # this template renders an omitted effort like `none`, so thinking needs a value
    is_off_by_switch = effort == "none" and "none" not in template.efforts and bool(variables)
    if effort is not None and template.efforts and not is_off_by_switch:
        variables[EFFORT] = _nearest(effort, template.efforts)
    return {**variables, **chat.variables}


def unheeded_fields(chat: Chat, template: ChatTemplate, output_format: OutputFormat, prompt: str) -> list[str]:
    """Return the client's fields that have no effect with this template. prompt: its last characters suffice."""
    wants, variables = chat.wants_thinking, thinking_variables(chat, template)
    if wants is None or not chat.opens_answer:
        return []
    thinks = output_format.tags is not None and output_format.start(chat, prompt) != "after"
    if not wants:
        stops = bool(template.switches) or variables.get(EFFORT) == "none" or not thinks
        return [] if stops else [chat.effort_field if chat.thinks is None else chat.thinks_field]
    has_variable = any(name in variables for name in (*template.switches, EFFORT))
    if has_variable and (thinks or output_format.tags is None):  # without tags the answer's thinking is not visible
        return []
    fields = [chat.effort_field] if chat.reasoning_effort else []
    return fields if thinks or not chat.thinks else [*fields, chat.thinks_field]


def _nearest(effort: str, known: Mapping[str, str]) -> str:
    """Return the known effort that is nearest to the one asked for; the greater of two."""
    place = EFFORTS.index(effort) if effort in EFFORTS else EFFORTS.index(_USUAL)
    return min(known, key=lambda one: (abs(EFFORTS.index(one) - place), -EFFORTS.index(one)))


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
