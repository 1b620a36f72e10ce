"""The vendors' clients over plain HTTP, without retries. They load no certificate authorities (plain_http.py)."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from tests.support import quick_uvicorn  # noqa: F401


def openai_client(**options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(http_client=openai.DefaultAsyncHttpxClient(verify=False), max_retries=0, **options)


def anthropic_client(**options: Any) -> anthropic.AsyncAnthropic:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(http_client=http, max_retries=0, **options)
