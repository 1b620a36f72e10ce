"""What rank 0 tells the other ranks of its replica before each step: the batch, and the orders of its role."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from engine.batch.batch import Batch

Orders = dict[str, Any]  # plain JSON values; what they mean is the worker's business

_HEADER = struct.Struct("<I")  # length of the orders; they are padded so that the batch is aligned


def encode_step(batch: Batch | None, orders: Orders) -> bytes:
    text = json.dumps(orders, separators=(",", ":")).encode()
    text += b" " * (-(_HEADER.size + len(text)) % 8)
    return _HEADER.pack(len(text)) + text + (batch.encode().tobytes() if batch else b"")


def decode_step(data: bytes) -> tuple[Batch | None, Orders]:
    (length,) = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    batch = Batch.decode(np.frombuffer(data, dtype=np.int64, offset=end).copy()) if len(data) > end else None
    return batch, json.loads(data[_HEADER.size : end])
