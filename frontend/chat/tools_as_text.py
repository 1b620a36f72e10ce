"""Tools, their calls and results as plain text, for models whose chat template has no form for them.

The model is asked to write calls in the format that frontend.parsers.formats.generic reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOOLS = """\
You can call tools. Each line is a tool, with the JSON schema of its arguments:
{tools}

To call tools, answer with nothing but a JSON list of calls:
[{{"name": "<name of the tool>", "arguments": {{<arguments by name>}}}}]
The next message then has the results. If you need no tool, answer in plain text."""


def tools_as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return instructions that describe the tools, given in OpenAI's form."""
    return _TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def calls_as_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as the model would write them. Arguments that are no JSON stay as they are."""
    written = []
    for call in calls:
        name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
        written.append(f'{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}')
    return f"[{', '.join(written)}]"


def result_as_text(content: str | None, name: str | None) -> str:
    """Return a tool's result for a user's message. name: of the tool; None: unknown."""
    return f"Result of {name or 'the call'}:\n{content or ''}"
