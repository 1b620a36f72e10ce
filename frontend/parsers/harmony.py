"""Answers of gpt-oss: messages in channels, whose headers name a channel and, for a call, a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The recipient may also stand before the channel. Format: github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from frontend.parsers.json_call import json_arguments
from frontend.parsers.scanner import Reading, Scanner
from frontend.parsers.thinking import Tags

_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_ENDS = (_END, "<|return|>", "<|call|>", _START)
_MAX_HEADER = 256  # characters
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_ROLES = ("", "assistant")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


@dataclass(frozen=True)
class Frame:
    """Markup of a model whose whole answers are messages."""

    read: Callable[[Scanner], Reading[None]]
    tags: Tags  # around the first message, if that is thinking
    resumes: str  # text between the thinking and the next message
    text: str  # begins a message to the user
    call: str  # begins a call; NAME stands for the tool's name
    markers: tuple[str, ...]  # special tokens that belong to the text
    ends: tuple[str, ...]  # tokens that end an answer


def harmony(scan: Scanner) -> Reading[None]:
    """Read messages. Text without a header continues a message to the user."""
    channel, name = "final", ""
    for beginning in (_CHANNEL, "to=", _START):  # of the first header, whose beginning is in the prompt
        if (yield from scan.next_is(beginning)):
            channel, name = yield from _named(scan)
            break
    has_begun = {True: False, False: False}  # by whether a message is thinking
    is_more = True
    while is_more:
        if not name or not (yield from json_arguments(scan, name)):
            scan.is_thought = channel == "analysis" and not name
            while has_begun[scan.is_thought] and not scan.rest and not scan.is_ended:
                yield
            if has_begun[scan.is_thought] and scan.rest:
                scan.emit("\n\n")  # between messages
            has_begun[scan.is_thought] = True
        marker = yield from scan.text_until(*_ENDS)
        is_more, scan.is_thought = bool(marker), False
        if marker == _START or (is_more and (yield from scan.optional(_START))):
            channel, name = yield from _named(scan)
        else:
            channel, name = "final", ""


HARMONY = Frame(
    read=harmony,
    tags=Tags(f"{_CHANNEL}analysis{_MESSAGE}", _END),
    resumes=f"{_START}assistant",
    text=f"{_CHANNEL}final{_MESSAGE}",
    call=f"{_CHANNEL}commentary to=functions.NAME <|constrain|>json{_MESSAGE}",
    markers=(*_ENDS, _CHANNEL, _MESSAGE, "<|constrain|>"),
    ends=("<|return|>", "<|call|>"),
)


def _named(scan: Scanner) -> Reading[tuple[str, str]]:
    """Read a header. Return the channel, and the name of the called tool, if any."""
    header = yield from scan.before(_MESSAGE, most=_MAX_HEADER)
    if not header:
        scan.give_up(is_text=True)
        return "final", ""
    yield from scan.optional(_MESSAGE)
    channel, recipient = _NAMED_CHANNEL.search(header), _RECIPIENT.search(header)
    name = recipient[1].removeprefix("functions.") if recipient else ""
    named = channel[1] if channel else "final"
    if name in scan.tools:
        return named, name
    if (name and named != "analysis") or not (channel or name or header.strip() in _ROLES):
        scan.give_up(is_text=True)
    return named, ""
