"""How a model writes what is more than text: calls of tools, and what it thinks before it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from frontend.parsers.formats import CALL_FORMATS, find_call_format
from frontend.parsers.thinking import END_THINK, THINK
from frontend.structured_output.special_tokens import SpecialTokens


@dataclass(frozen=True)
class OutputFormat:
    """What one model writes beside text: the format of its calls, and whether it thinks."""

    calls: str | None = None  # one of CALL_FORMATS; None: we read none
    thinks: bool = False
    special: SpecialTokens = field(default_factory=SpecialTokens, compare=False)

    @classmethod
    def of(cls, template: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> OutputFormat:
        """As the operator says, or as its chat template does."""
        calls = find_call_format(template) if tool_parser == "auto" else tool_parser
        thinks = END_THINK in template if reasoning_parser == "auto" else reasoning_parser == "think"
        return cls(calls if calls in CALL_FORMATS else None, thinks)

    @property
    def markers(self) -> Iterator[str]:
        """What may be a special token, and is part of the text all the same."""
        if self.calls:
            yield from CALL_FORMATS[self.calls].markers
        if self.thinks:
            yield from (THINK, END_THINK)
