"""Output format of a model: its syntax of tool calls, and whether it thinks before it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from frontend.chat.chat import Chat
from frontend.parsers.formats import CALL_FORMATS, GENERIC, find_call_format
from frontend.parsers.harmony import Frame
from frontend.parsers.thinking import TAGS, THINK, Start, Tags
from frontend.structured_output.lark import SpecialTokens


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

    @property
    def thinks(self) -> bool:
        return self.tags is not None

    def start(self, chat: Chat | None, prompt: str) -> Start:
        """Return where the prompt ends. chat: the prompt's, if it is one. prompt: its last characters suffice."""
        end, tags = prompt.rstrip(), self.tags
        if tags is None or end.endswith(tags.closing):
            return "after"
        if end.endswith(tags.opening):
            return "inside"
        if chat is not None and chat.is_continued:
            begun = str(chat.messages[-1].get("content"))
            return "inside" if begun.rfind(tags.opening) > begun.rfind(tags.closing) else "after"
        return "inside" if self.begins_inside and chat is not None else "before"
