"""Output format of a model: its syntax of tool calls, and whether it thinks before it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from frontend.parsers.formats import CALL_FORMATS, find_call_format
from frontend.parsers.thinking import END_THINK, THINK
from frontend.structured_output.special_tokens import SpecialTokens


@dataclass(frozen=True)
class OutputFormat:
    """Format of tool calls and thinking in one model's output."""

    calls: str | None = None  # key of CALL_FORMATS; None: tool calls are not parsed
    thinks: bool = False
    special: SpecialTokens = field(default_factory=SpecialTokens, compare=False)

    @classmethod
    def of(cls, template: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> OutputFormat:
        """Return the format set by the operator; `auto` derives it from the chat template."""
        calls = find_call_format(template) if tool_parser == "auto" else tool_parser
        thinks = END_THINK in template if reasoning_parser == "auto" else reasoning_parser == "think"
        return cls(calls if calls in CALL_FORMATS else None, thinks)

    @property
    def markers(self) -> Iterator[str]:
        """Markers that may be special tokens and must be kept in the text for parsing."""
        if self.calls:
            yield from CALL_FORMATS[self.calls].markers
        if self.thinks:
            yield from (THINK, END_THINK)
