"""Compressed request bodies: decoded within the limit of a body, or rejected by name."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from frontend.http.body import decoded
from frontend.text.completion_request import MAX_REQUEST_BYTES
from tests.support.serving import USER, Served

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": USER, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/completions/render": {"prompt": "abc"},
    "/v1/chat/completions/render": {"messages": USER},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1]},
}
_BODY = json.dumps(_BODIES["/v1/completions"]).encode()
_LARGE = json.dumps({**_BODIES["/v1/completions"], "metadata": os.urandom(60_000).hex()}).encode()


def _raw_deflate(body: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(body) + encoder.flush()


def _members(encode: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda body: encode(body[:7]) + encode(body[7:])


_ENCODED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-Gzip", gzip.compress),
    "gzip members": ("gzip", _members(gzip.compress)),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", _raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "zstd frames": ("zstd", _members(zstd.compress)),
    "two": ("gzip , zstd", lambda body: zstd.compress(gzip.compress(body))),
    "four": ("deflate,gzip,zstd,gzip", lambda body: gzip.compress(zstd.compress(gzip.compress(zlib.compress(body))))),
    "identity": ("identity", bytes),
    "empty": ("", bytes),
    "identity and gzip": ("identity, gzip, identity", gzip.compress),
}
_BOMB = b" " * (MAX_REQUEST_BYTES + 1)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("case", _ENCODED)
async def test_encoded_bodies_are_read(endpoint: Served, case: str) -> None:
    name, encode = _ENCODED[case]
    for body in (_BODY, _LARGE):
        answer = await endpoint.http.post("/v1/completions", content=encode(body), headers={"content-encoding": name})
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "a", answer.text


@pytest.mark.parametrize("path", _BODIES)
async def test_every_post_reads_them(endpoint: Served, path: str) -> None:
    content = gzip.compress(json.dumps(_BODIES[path]).encode())
    assert (await endpoint.http.post(path, content=content, headers={"content-encoding": "gzip"})).status_code == 200
    refused = await endpoint.http.post(path, content=content, headers={"content-encoding": "br"})
    assert refused.status_code == 415 and "use gzip, deflate, zstd" in refused.json()["error"]["message"]
    assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"


_REJECTED: dict[str, tuple[str, bytes, int]] = {
    "another encoding": ("gzip, br", gzip.compress(_BODY), 415),
    "too many": ("gzip, gzip, gzip, gzip, gzip", _BODY, 415),
    "not gzip": ("gzip", _BODY, 400),
    "short gzip": ("gzip", gzip.compress(_BODY)[:-3], 400),
    "wrong checksum": ("gzip", gzip.compress(_BODY)[:-8] + b"\0" * 8, 400),
    "more than gzip": ("gzip", gzip.compress(_BODY) + b"more", 400),
    "nothing": ("gzip", b"", 400),
    "not deflate": ("deflate", _BODY, 400),
    "short deflate": ("deflate", zlib.compress(_BODY)[:-3], 400),
    "more than deflate": ("deflate", zlib.compress(_BODY) + b"more", 400),
    "not zstd": ("zstd", _BODY, 400),
    "short zstd": ("zstd", zstd.compress(_BODY)[:-3], 400),
    "wrong order": ("zstd, gzip", zstd.compress(gzip.compress(_BODY)), 400),
    "gzip bomb": ("gzip", gzip.compress(_BOMB), 413),
    "deflate bomb": ("deflate", _raw_deflate(_BOMB), 413),
    "zstd bomb": ("zstd", zstd.compress(_BOMB), 413),
    "bomb in a bomb": ("gzip, gzip", gzip.compress(gzip.compress(_BOMB)), 413),
}


@pytest.mark.parametrize("case", _REJECTED)
async def test_other_bodies_are_rejected(endpoint: Served, case: str) -> None:
    name, content, status = _REJECTED[case]
    answer = await endpoint.http.post("/v1/completions", content=content, headers={"content-encoding": name})
    assert answer.status_code == status, answer.text
    good = await endpoint.http.post("/v1/completions", content=_BODY)
    assert good.status_code == 200


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress, zstd.compress])
async def test_bombs_are_refused_before_memory_grows(encode: Callable[[bytes], bytes]) -> None:
    bomb = encode(encode(bytes(100 << 20)))
    name = {gzip.compress: "gzip", zlib.compress: "deflate", zstd.compress: "zstd"}[encode]
    tracemalloc.start()
    try:
        with pytest.raises(Exception, match="larger than"):
            decoded(bomb, [name, name], max_bytes=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


async def test_zstd_windows_beyond_8_mb_are_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 24, zstd.CompressionParameter.enable_long_distance_matching: 1}
    wide = zstd.compress(os.urandom(1 << 10) * (20 << 10), options=options)
    with pytest.raises(Exception, match="not valid zstd"):
        decoded(wide, ["zstd"], max_bytes=100 << 20)


async def test_many_small_encoded_bodies_need_no_thread(endpoint: Served) -> None:
    content, headers = gzip.compress(_BODY), {"content-encoding": "gzip"}
    async with asyncio.TaskGroup() as tasks:
        posts = [
            tasks.create_task(endpoint.http.post("/v1/completions", content=content, headers=headers))
            for _ in range(99)
        ]
    assert {post.result().status_code for post in posts} == {200}
