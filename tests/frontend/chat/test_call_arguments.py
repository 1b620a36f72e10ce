"""Tool call arguments from clients, which may be any text."""

from __future__ import annotations

import json

import pytest

from core.types.errors import RequestError
from frontend.chat.call_shape import object_of
from tests.support.growth import growth


def test_object_is_accepted() -> None:
    given = {"a": 'x"\\', "b": ["🎉", "\n", 1.5], "{[,": {}}
    for text in (json.dumps(given), json.dumps(given, ensure_ascii=False)):
        assert object_of(text, "p") == given
    assert object_of(" ", "p") == {}


@pytest.mark.parametrize(
    "text",
    [
        '"',
        '{"a',
        '{"a\\',
        '{"a": "\\',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        "[]",
        '{"a": 1e400}',
        '{"a": "' + "x" * 2**18 + '"}',
    ],
    ids=lambda text: text[:20],
)
def test_other_text_is_rejected_with_its_path(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        object_of(text, "messages[3].tool_calls[0].function.arguments")
    assert caught.value.param == "messages[3].tool_calls[0].function.arguments"


@pytest.mark.parametrize(("text", "end"), [('\\"', ""), ('\\"', "\\"), ('a"', ""), ('"a\\', "")])
def test_unterminated_string_is_scanned_once(text: str, end: str) -> None:
    def reject(size: int) -> None:
        with pytest.raises(RequestError):
            object_of('"' + text * size + end, "p")

    assert growth(reject, 4_000) < 9
