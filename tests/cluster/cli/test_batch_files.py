"""Input and output files of `cluster batch`: malformed lines are reported, partial answers removed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.batch_files import open_output, parse_line, record
from core.types.errors import SpecError

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"hello", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (LINE | {"custom_id": ""}, "custom_id: must be a string"),
        (LINE | {"custom_id": 7}, "custom_id: must be a string"),
        (LINE | {"method": "GET"}, "method: must be POST, not 'GET'"),
        (LINE | {"url": "/v1/embeddings"}, "url: must be one of /v1/chat/completions, .*, not '/v1/embeddings'"),
        (LINE | {"url": ["x"]}, "url: must be one of"),
        (LINE | {"body": "x"}, "body: must be a JSON object"),
        (LINE | {"body": {"stream": True}}, "body.stream: must be false"),
    ],
)
def test_malformed_line_is_rejected(line: bytes | dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_line(line if isinstance(line, bytes) else json.dumps(line).encode())


def test_truncated_output_keeps_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = b"".join(record(id, request_id=id, response={"body": "\u2028é"}, error=None) for id in "abc")
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        output, answered = open_output(path)
        with output:
            num_lines = whole[:end].count(b"\n")
            assert sorted(answered) == list("abc")[:num_lines]
            output.write(b"next")
        assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:num_lines]) + b"next"


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b'{"id": "batch_req_1"}\n', b'{"id": "batch_req_\n{}\n'])
def test_other_file_is_not_modified(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"out\.jsonl:1: not an answer of `cluster batch`"):
        open_output(path)
    assert path.read_bytes() == content


def test_output_is_locked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_output(path)[0], pytest.raises(SpecError, match="another `cluster batch` is writing to it"):
        open_output(path)
    open_output(path)[0].close()
