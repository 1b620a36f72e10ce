"""Server-sent events of a streamed response, numbered in sequence."""

from __future__ import annotations

from typing import Any

from frontend.http.event_stream import JSON, data, to_json

_CALL = "response.function_call_arguments"
# By item type: prefix of its events, and type of its one part.
_EVENTS = {
    "message": ("response.output_text", "output_text"),
    "reasoning": ("response.reasoning_text", "reasoning_text"),
    "function_call": (_CALL, ""),
}


def part_of(kind: str, text: str, logprobs: list[JSON] | None = None) -> JSON:
    """Return the one part of an item of this type. logprobs: of a message; None: it has none."""
    _, type = _EVENTS[kind]
    part: JSON = {"type": type, "text": text}
    if kind == "message":
        part |= {"annotations": [], "logprobs": logprobs or []}
    return part


class ResponseEvents:
    """Writer of one response's events; buffers them until `taken`."""

    def __init__(self) -> None:
        self._number = 0
        self._written: list[bytes] = []
        self._kind = ""  # of the open item
        self._place: JSON = {}
        self._before = self._behind = b""  # template around the text of a delta event

    def taken(self) -> bytes:
        """Return the events written since the last call, possibly none."""
        written, self._written = b"".join(self._written), []
        return written

    def emit(self, event: str, /, **fields: Any) -> None:
        self._written.append(data({"type": event, **fields, "sequence_number": self._number}, name=event))
        self._number += 1

    def begin(self, item: JSON, *, index: int) -> None:
        """Open an item. item: its initial state, without content."""
        self.emit("response.output_item.added", output_index=index, item=item)
        self._kind = item["type"]
        name, type = _EVENTS[self._kind]
        self._place = {"item_id": item["id"], "output_index": index} | ({"content_index": 0} if type else {})
        if type:
            self.emit("response.content_part.added", **self._place, part=part_of(self._kind, ""))
        name += ".delta"
        head = to_json({"type": name, **self._place})[:-1]
        self._before = b'event: %b\ndata: %b,"delta":' % (name.encode(), head)
        self._behind = b'%b,"sequence_number":' % (b',"logprobs":[]' if self._kind == "message" else b"")

    def piece(self, text: str) -> None:
        """Write a delta of the open item."""
        self._written.append(b"%b%b%b%d}\n\n" % (self._before, to_json(text), self._behind, self._number))
        self._number += 1

    def piece_with(self, text: str, logprobs: list[JSON]) -> None:
        self.emit(f"{_EVENTS[self._kind][0]}.delta", **self._place, delta=text, logprobs=logprobs)

    def end(self, item: JSON, *, index: int, text: str, logprobs: list[JSON] | None) -> None:
        """Close the open item. item: its final state. text: the concatenation of its deltas."""
        name, type = _EVENTS[self._kind]
        if type:
            more = {"logprobs": logprobs or []} if self._kind == "message" else {}
            self.emit(f"{name}.done", **self._place, text=text, **more)
            self.emit("response.content_part.done", **self._place, part=part_of(self._kind, text, logprobs))
        else:
            self.emit(f"{name}.done", **self._place, name=item["name"], arguments=text)
        self.emit("response.output_item.done", output_index=index, item=item)
