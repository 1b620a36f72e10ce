"""Content of a chat's answer, read from a whole response or from its chunks."""

from __future__ import annotations

from collections.abc import Iterable

from frontend.openai.forms import ChatForm, WholeChoice
from frontend.text.events import Delta, Finished
from frontend.text.tokenizer import Tokenizer

Said = tuple[str, str, list[tuple[str, str]]]  # thinking, text, and calls


def whole_choice(events: Iterable[Delta | Finished]) -> WholeChoice:
    whole = WholeChoice()
    for event in events:
        if isinstance(event, Delta):
            event.write(whole)
    return whole


def said_whole(events: Iterable[Delta | Finished]) -> Said:
    whole = whole_choice(events)
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in whole.calls]
    return whole.all_of("thinking"), whole.all_of("text"), calls


def said_streamed(events: Iterable[Delta | Finished], tokenizer: Tokenizer) -> Said:
    form, thinking, text, calls = ChatForm(tokenizer), "", "", list[tuple[str, str]]()
    for delta in (piece["delta"] for event in events if isinstance(event, Delta) for piece in form.said(event)):
        thinking += delta.get("reasoning_content", "")
        text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls), "calls are numbered without gaps"
                calls.append((call["function"]["name"], ""))
            name, said = calls[call["index"]]
            calls[call["index"]] = name, said + call["function"]["arguments"]
    return thinking, text, calls
