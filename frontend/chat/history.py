"""Arrangement of a conversation for one chat template, which small probe conversations determine.

Many templates require user and assistant to alternate, or silently drop a late system message or the text beside a
call. Clients send all of these. History merges or splits messages, or changes their roles, where the template needs it,
and loses no text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message]], str | None]  # None: the template rejects the messages
_Messages: TypeAlias = list[dict[str, Any]]

PROBE = "PROBE-5e0c-"
_CALL = "probe_5e0c_"
INSTRUCTIONS = ("system", "developer")
_ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking", "tool_plan")
_BETWEEN = "\n\n"


@dataclass(frozen=True, kw_only=True)
class History:
    """Arrangement of messages for one template. `keeps_…` is true if the template renders such messages unchanged."""

    keeps_developer: bool = False  # OpenAI's newer name of system
    keeps_system: bool = True  # at the beginning
    keeps_system_alone: bool = True
    keeps_system_if_answered: bool = True  # also if the last message is not the user's
    keeps_late_system: bool = True
    keeps_users: bool = True  # two in a row
    keeps_assistants: bool = True
    keeps_assistant_first: bool = True
    keeps_user_after_tool: bool = True
    keeps_calls: bool = True
    keeps_orphans: bool = True  # results of tools that no message calls
    keeps_parallel_calls: bool = True
    keeps_repeated_ids: bool = True  # of calls and results
    splits_text: str | None = None  # messages that replace a call with text, as letters of _ROLES; None: not split
    reasoning: str = _REASONING[0]  # field of an assistant's thoughts
    keeps_reasoning_beside_text: bool = True  # in a message with calls

    @classmethod
    def of(cls, render: Render, *, with_tools: Render, knows_developer: bool) -> History:
        """Probe a template and return the arrangement that it needs. render: converts call arguments and renders.
        with_tools: the same with tools. knows_developer: the template contains the role name developer."""

        def keeps(letters: str) -> bool:
            return _is_kept(render, _conversation(letters))

        has_calls = keeps("uct")
        reasoning = next((name for name in _REASONING if _shows_reasoning(render, name)), _REASONING[0])
        return cls(
            keeps_developer=knows_developer and keeps("du"),
            keeps_system=keeps("su"),
            keeps_system_alone=keeps("s"),
            keeps_system_if_answered=keeps("sua") and (not has_calls or keeps("suct")),
            keeps_late_system=keeps("suasu"),
            keeps_users=keeps("uuau"),
            keeps_assistants=keeps("uaau"),
            keeps_assistant_first=keeps("au") and _is_kept(with_tools, _conversation("au")),
            keeps_user_after_tool=not has_calls or keeps("uctu"),
            keeps_calls=has_calls,
            keeps_orphans=keeps("utuct" if has_calls else "utu"),
            keeps_parallel_calls=not has_calls or keeps("uCttau"),
            keeps_repeated_ids=_is_kept(render, _conversation("uCttauCtt", id="probe0000")) or not keeps("uCttauCtt"),
            splits_text=None
            if not has_calls or keeps("uTtau")
            else next((letters for letters in ("ac", "auc") if keeps(f"u{letters}tau")), None),
            reasoning=reasoning,
            keeps_reasoning_beside_text=not has_calls or _takes_reasoning_beside_text(render, reasoning),
        )

    def arranged(self, messages: Iterable[Message]) -> _Messages:
        """Return copies of the messages, arranged."""
        arranged = self._with_instructions([dict(message) for message in messages])
        if not self.keeps_calls:
            arranged = _as_texts(arranged, keeps_results=self.keeps_orphans)
        else:
            arranged = _in_call_order(arranged)
            arranged = arranged if self.keeps_orphans else _without_orphans(arranged)
            arranged = [part for message in arranged for part in self._split_text(message)]
            arranged = arranged if self.keeps_parallel_calls else _one_call_each(arranged)
            arranged = arranged if self.keeps_repeated_ids else _with_own_ids(arranged)
        arranged = self._in_turns(arranged)
        for message in arranged:
            self._move_reasoning(message)
        return self._begun_by_user(arranged)

    def _move_reasoning(self, message: dict[str, Any]) -> None:
        """Put an assistant's thoughts into the field that the template reads."""
        if "reasoning_content" not in message:
            return
        thoughts = message.pop("reasoning_content")
        if message.get("tool_calls") and message["content"] and not self.keeps_reasoning_beside_text:
            thoughts, message["content"] = _BETWEEN.join((thoughts, message["content"])), None
        message[self.reasoning] = thoughts

    def _begun_by_user(self, messages: _Messages) -> _Messages:
        """Insert an empty user message before a first message that the template does not accept there."""
        at = len([*takewhile(lambda message: message["role"] in INSTRUCTIONS, messages)])
        if at == len(messages):
            return messages
        first = messages[at]
        is_called = first["role"] == "tool" or "tool_calls" in first  # no template accepts a call without a user
        if is_called or (first["role"] == "assistant" and not self.keeps_assistant_first):
            messages.insert(at, {"role": "user", "content": ""})
        return messages

    def _with_instructions(self, messages: _Messages) -> _Messages:
        """Merge consecutive system and developer messages, and give them a role that the template keeps."""
        first = len([*takewhile(lambda message: message["role"] in INSTRUCTIONS, messages)])
        # Folded: the instructions at the beginning become a user message, or part of the first one.
        is_folded = not self.keeps_system or not (self.keeps_system_alone or messages[first:])
        is_folded |= not self.keeps_system_if_answered and messages[-1]["role"] in ("assistant", "tool")
        merged: _Messages = []
        for number, message in enumerate(messages):
            if message["role"] in INSTRUCTIONS:
                if number and messages[number - 1]["role"] in INSTRUCTIONS:
                    merged[-1] = {**_joined(merged[-1], message), "role": merged[-1]["role"]}
                    continue
                is_late = number >= first
                if not (message["role"] == "developer" and self.keeps_developer and not is_late):
                    message = {**message, "role": "system"}
                if is_folded if not is_late else not self.keeps_late_system:
                    message["role"] = "user"
            merged.append(message)
        if is_folded and first and len(merged) > 1 and merged[1]["role"] == "user":
            merged[:2] = [_joined(merged[0], merged[1])]
        return merged

    def _split_text(self, message: dict[str, Any]) -> _Messages:
        if self.splits_text is None or not message.get("tool_calls") or not (message["content"] or "").strip():
            return [message]
        text = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning_content")}
        between: _Messages = [{"role": "user", "content": ""}] if "u" in self.splits_text else []
        return [text, *between, {**message, "content": None}]

    def _in_turns(self, messages: _Messages) -> _Messages:
        """Merge neighbours of one role, and put an assistant between a tool's result and a user, where needed."""
        turns: _Messages = []
        for message in messages:
            before, role = turns[-1] if turns else {"role": ""}, message["role"]
            are_calls = bool(before.get("tool_calls") or message.get("tool_calls"))
            is_merged = (role == "user" and not self.keeps_users) or (
                role == "assistant" and not self.keeps_assistants and not (are_calls and self.splits_text)
            )
            if is_merged and before["role"] == role:
                turns[-1] = _joined(before, message)
                continue
            if role == "user" and before["role"] == "tool" and not self.keeps_user_after_tool:
                turns.append({"role": "assistant", "content": ""})
            turns.append(message)
        return turns


# The arrangement that most templates accept: user and assistant in turns, and nothing else.
ALTERNATING = History(
    keeps_system=False, keeps_late_system=False, keeps_users=False, keeps_assistants=False,
    keeps_assistant_first=False, keeps_calls=False, keeps_orphans=False,
)  # fmt: skip


def _joined(one: Message, other: Message) -> dict[str, Any]:
    """Merge two messages. Join texts and calls; of other keys, such as the role, the second message's value wins."""
    joined = {**one, **other}
    for name in ("content", "reasoning_content"):
        texts = [text for text in (one.get(name), other.get(name)) if text]
        if texts or name == "content":
            joined[name] = _BETWEEN.join(texts)
    if calls := [*one.get("tool_calls", ()), *other.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


_TOOLS = """\
You can call tools. Each line is a tool, with the JSON schema of its arguments:
{tools}

To call tools, answer with nothing but a JSON list of calls:
[{{"name": "<name of the tool>", "arguments": {{<arguments by name>}}}}]
The next message then has the results. If you need no tool, answer in plain text."""


def tools_as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return instructions that describe the tools, given in OpenAI's form, for a template that has no form for them.
    They ask for calls in the format that frontend.parsers.formats.generic reads."""
    return _TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _as_texts(messages: _Messages, *, keeps_results: bool) -> _Messages:
    """Write calls as text, and results as user messages, unless keeps_results."""
    written: _Messages = []
    for message, own, others in _with_results(messages):
        calls = message.pop("tool_calls", ())
        if calls:
            message["content"] = _BETWEEN.join(filter(None, (message["content"], _calls_as_text(calls))))
        names = [None, *(call["function"]["name"] for call in calls), *[None] * len(others)]
        for name, one in zip(names, (message, *own, *others), strict=True):
            if one is not None:
                is_kept = keeps_results or one["role"] != "tool"
                written.append(one if is_kept else _result_as_user(one, name))
    return written


def _calls_as_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls as the model would write them. Arguments that are not JSON stay as they are."""
    written = []
    for call in calls:
        name, arguments = json.dumps(call["function"]["name"], ensure_ascii=False), call["function"]["arguments"]
        written.append(f'{{"name": {name}, "arguments": {arguments.strip() or "{}"}}}')
    return f"[{', '.join(written)}]"


def _result_as_user(result: Message, name: str | None) -> dict[str, Any]:
    """Write a tool's result as a user's message. name: the tool's; None: unknown."""
    return {"role": "user", "content": f"Result of {name or 'the call'}:\n{result['content'] or ''}"}


def _in_call_order(messages: _Messages) -> _Messages:
    """Sort results by their calls, because many templates print no ids."""
    return [one for message, own, others in _with_results(messages) for one in (message, *own, *others) if one]


def _with_own_ids(messages: _Messages) -> _Messages:
    """Number the calls and the results, for a template that drops a result with the id of an earlier one."""
    numbers = map("call{:05d}".format, count())
    for message, own, others in _with_results(messages):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": next(numbers)} for call in calls]
        for call, result in zip(message.get("tool_calls", ()), own, strict=True):
            if result is not None:
                result["tool_call_id"] = call["id"]
        for result in others if message["role"] != "tool" else (message, *others):
            result["tool_call_id"] = next(numbers)
    return messages


def _without_orphans(messages: _Messages) -> _Messages:
    """Write results without a preceding call as text."""
    kept: _Messages = []
    num_open = 0
    for message in messages:
        is_result = message["role"] == "tool"
        num_open = num_open - 1 if is_result else len(message.get("tool_calls", ()))
        kept.append(_result_as_user(message, None) if is_result and num_open < 0 else message)
    return kept


def _one_call_each(messages: _Messages) -> _Messages:
    """Give each of several parallel calls its own message, followed by its result."""
    split: _Messages = []
    for message, own, others in _with_results(messages):
        calls = message.get("tool_calls", ())
        if not calls:
            split.append(message)
        for number, (call, result) in enumerate(zip(calls, own, strict=True)):
            more = {} if not number else {"content": None, "reasoning_content": None}
            one = {name: value for name, value in {**message, **more}.items() if value is not None or name == "content"}
            split.append({**one, "tool_calls": [call]})
            split += [result] if result is not None else []
        split += others
    return split


def _with_results(messages: _Messages) -> Iterator[tuple[dict[str, Any], Sequence[dict[str, Any] | None], _Messages]]:
    """Yield each message with the results that follow it: one (or None) per call, then those that answer none."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        results = [*takewhile(lambda one: one["role"] == "tool", messages[at:])]
        at += len(results)
        own = [next((r for r in results if r.get("tool_call_id") == call.get("id")), None) for call in calls]
        found = [id(result) for result in own if result is not None]
        if len({*found}) < len(found) or len(found) < min(len(calls), len(results)):  # unclear ids: pair in order
            own = [*results[: len(calls)], *[None] * (len(calls) - len(results))]
        yield message, own, [result for result in results if not any(result is one for one in own)]


def _conversation(letters: str, *, id: str | None = None) -> _Messages:
    """Build probe messages, one per letter: a key of _ROLES, C (two parallel calls), or T (a text and one call).

    id: used for every call; None: unique ids.
    """
    messages: _Messages = []
    pending = list[str]()
    for number, letter in enumerate(letters):
        message: dict[str, Any] = {"role": _ROLES[letter.lower() if letter != "T" else "c"]}
        message["content"] = None if letter in "cC" else f"{PROBE}{number}-"
        if letter in "cCT":
            ids = [id or f"probe{number}{i:03d}" for i in range(2 if letter == "C" else 1)]
            pending += ids
            message["tool_calls"] = [_call(own, f"{_CALL}{number}_{i}") for i, own in enumerate(ids)]
        if letter == "t":
            message["tool_call_id"] = pending.pop(0) if pending else "orphan000"
        messages.append(message)
    return messages


def _call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": '{"probe": 1}'}}


def _is_kept(render: Render, messages: _Messages) -> bool:
    """Return whether the template renders every text and call."""
    texts = [message["content"] for message in messages if message["content"]]
    texts += [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    rendered = render(messages)
    return rendered is not None and all(text in rendered for text in texts)


def _shows_reasoning(render: Render, name: str) -> bool:
    messages = _conversation("uct")
    messages[1][name] = PROBE
    return PROBE in (render(messages[:2]) or "").replace(f"{PROBE}0-", "")


def _takes_reasoning_beside_text(render: Render, name: str) -> bool:
    messages = _conversation("uTt")
    return render(messages) is None or render([messages[0], {**messages[1], name: PROBE}, messages[2]]) is not None
