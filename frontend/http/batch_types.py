"""The body of POST /v1/batches."""

from __future__ import annotations

from core.types.errors import RequestError
from frontend.openai.fields import OpenAIObject
from router.batches.records import WINDOW

_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512


class BatchBody(OpenAIObject):
    """POST /v1/batches"""

    input_file_id: str
    """A file that was sent with `purpose=batch`."""
    endpoint: str
    """`/v1/chat/completions`, `/v1/completions` or `/v1/responses`: that of every line."""
    completion_window: str
    """`24h`."""
    metadata: dict[str, str] | None = None
    """Is told again. At most 16 pairs, of 64 and 512 characters."""

    def check(self) -> BatchBody:
        """Raises RequestError."""
        if self.completion_window != WINDOW:
            raise RequestError(f"completion_window: must be {WINDOW}", param="completion_window")
        pairs = self.metadata or {}
        if len(pairs) > _MAX_PAIRS or any(
            len(name) > _MAX_NAME or len(value) > _MAX_VALUE for name, value in pairs.items()
        ):
            text = f"metadata: at most {_MAX_PAIRS} pairs are taken, of {_MAX_NAME} and {_MAX_VALUE} characters"
            raise RequestError(text, param="metadata")
        return self
