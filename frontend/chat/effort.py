"""Template variables that turn thinking on or off and set its effort, from a client's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frontend.chat.chat import Chat
from frontend.chat.chat_template import EFFORT, EFFORTS, ChatTemplate
from frontend.chat.output_format import OutputFormat

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
