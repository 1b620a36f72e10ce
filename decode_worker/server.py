"""gRPC service of a decode replica for routers."""

from __future__ import annotations

from decode_worker.worker import DecodeWorker
from worker.answer_server import AnswerServicer


def decode_servicer() -> AnswerServicer[DecodeWorker]:
    """Create the servicer of a decode replica."""
    return AnswerServicer(lambda worker: worker)
