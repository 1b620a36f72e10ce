"""Output format of a model: its syntax of tool calls, whether it thinks before it answers, and how a client turns
thinking on or off and bounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.types.errors import UnsupportedField
from core.types.request import Grammar, GrammarKind, ThinkingBudget
from frontend.chat.chat import Chat
from frontend.chat.chat_template import EFFORT, EFFORTS, ChatTemplate
from frontend.parsers.formats import CALL_FORMATS, GENERIC, find_call_format
from frontend.parsers.harmony import Frame
from frontend.parsers.thinking import TAGS, THINK, Start, Tags
from frontend.structured_output.lark import SpecialTokens
from frontend.text.completion_request import CompletionRequest
from frontend.text.tokenizer import Tokenizer

SCHEMAS = (GrammarKind.JSON_SCHEMA, GrammarKind.LENIENT_JSON_SCHEMA)
_USUAL = "medium"  # effort


@dataclass(frozen=True)
class OutputFormat:
    """Format of tool calls and thinking in one model's output."""

    calls: str | None = None  # key of CALL_FORMATS; None: tool calls are not parsed
    tags: Tags | None = None  # around its thinking; None: it does not think
    begins_inside: bool = False  # answers begin with thinking, even without an opening tag
    frame: Frame | None = None  # whole answers are messages
    special: SpecialTokens = field(default_factory=SpecialTokens, compare=False)

    @classmethod
    def of(
        cls,
        template: str,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        knows_tools: bool = True,
        is_special: Callable[[str], bool] = lambda token: False,
    ) -> OutputFormat:
        """Return the format set by the operator; `auto` derives it from the chat template and the special tokens.

        knows_tools: whether the template renders tools. is_special: whether a text is a special token of the model.
        """
        found, calls = find_call_format(template), tool_parser
        if tool_parser == "auto":
            calls = found if knows_tools or CALL_FORMATS[found].frame else GENERIC
        frame = CALL_FORMATS[calls if calls in CALL_FORMATS else found].frame
        in_template = (tags for tags in TAGS if tags.closing in template)
        in_vocabulary = (tags for tags in TAGS if is_special(tags.opening) and is_special(tags.closing))
        tags = frame.tags if frame else next(in_template, None) or next(in_vocabulary, None)
        if reasoning_parser != "auto":
            tags = None if reasoning_parser == "none" else tags or THINK
        return cls(
            calls if calls in CALL_FORMATS else None,
            tags,
            begins_inside=reasoning_parser == "deepseek_r1" and not frame,
            frame=frame,
        )

    @property
    def markers(self) -> Iterator[str]:
        """Markers whose special tokens must be kept in the text for parsing."""
        if self.frame:
            yield from self.frame.markers
        if self.calls:
            yield from CALL_FORMATS[self.calls].markers
        if self.tags:
            yield from (self.tags.opening, self.tags.closing)

    @property
    def writes_tools(self) -> bool:
        """True if tools, calls and results are shown to the model as text instead of by its chat template."""
        return self.calls == GENERIC

    def start(self, chat: Chat | None, prompt: str) -> Start:
        """Return where the prompt ends, relative to thinking. chat: None for a text. prompt: its end suffices."""
        end, tags = prompt.rstrip(), self.tags
        if tags is None or end.endswith(tags.closing):
            return "after"
        if end.endswith(tags.opening):
            return "inside"
        if chat is not None and chat.is_continued:
            begun = str(chat.messages[-1].get("content"))
            return "inside" if begun.rfind(tags.opening) > begun.rfind(tags.closing) else "after"
        return "inside" if self.begins_inside and chat is not None else "before"


def may_think(grammar: Grammar | None, start: Start) -> bool:
    """Return whether the answer may begin with thinking. start: where its prompt ends."""
    return grammar is None or (grammar.kind in (*SCHEMAS, GrammarKind.STRUCTURAL_TAG) and start != "after")


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
    """Return the known effort nearest to the requested one; of two equally near, the greater."""
    place = EFFORTS.index(effort) if effort in EFFORTS else EFFORTS.index(_USUAL)
    return min(known, key=lambda one: (abs(EFFORTS.index(one) - place), -EFFORTS.index(one)))


def thinking_budget(
    request: CompletionRequest, output_format: OutputFormat, tokenizer: Tokenizer, prompt: str
) -> ThinkingBudget | None:
    """Return the budget; None if the request sets none or leaves no room for thinking. prompt: its last characters
    suffice. Raises UnsupportedField if the model does not think."""
    num_tokens, param, tags = request.thinking_token_budget, request.thinking_field, output_format.tags
    if num_tokens is None:
        return None
    chat, grammar = request.prompt, request.grammar
    if tags is None and isinstance(chat, Chat) and chat.thinks is not None:
        return None  # the field that turns thinking on has no effect with this model, so neither has its budget
    if tags is None:
        problem = "not supported; this model does not think (the operator can set model.reasoning_parser)"
        raise UnsupportedField.at(param, problem)
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
