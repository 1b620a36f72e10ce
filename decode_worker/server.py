"""The gRPC face of a decode replica towards routers: all that it answers is its worker's."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from worker.answer_server import AnswerServicer


def decode_servicer() -> AnswerServicer[DecodeWorker]:
    """Its worker has the answers itself."""
    return AnswerServicer(lambda worker: worker)
