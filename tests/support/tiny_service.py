"""Completion service over a fake token service and a tiny model, for tests of the endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from core.grammar.compiler import GrammarCompiler
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.completion import Completions
from frontend.text.completion_request import MAX_CHOICES, NEUTRAL, ModelCard
from frontend.text.tokenizer import Tokenizer
from frontend.text.usage import RequestAuditLog
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing
from tests.support.fake_token_service import FakeTokenService


class MakeCompletions:
    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._model_dir = model_dir
        self._template = find_chat_template(model_dir)

    def __call__(
        self,
        token_service: FakeTokenService | None = None,
        *,
        name: str = "tiny",
        max_context: int = 256,
        max_request_s: float = 60,
        max_unread_s: float = 60,
        max_choices: int = MAX_CHOICES,
        aliases: tuple[str, ...] = (),
        max_held: Callable[[], int | None] = lambda: None,
        audit_log: Path | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        has_grammars: bool = False,
        tracing: Tracing | None = None,
        sampling_defaults: Mapping[str, float] = NEUTRAL,
    ) -> Completions:
        """token_service: None: one that echoes the prompt. chat_template: None: that of the model directory.
        has_grammars: whether requests may have grammars."""
        tokenizer = self._tokenizer
        template = ChatTemplate(chat_template or self._template, special_tokens=tokenizer.special_tokens)
        return Completions(
            token_service=token_service or FakeTokenService(max_context=max_context),
            tokenizer=tokenizer,
            chat_template=template,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            model=ModelCard(
                id=name,
                max_context=max_context,
                vocab_size=tokenizer.vocab_size,
                dtype="float32",
                max_choices=max_choices,
                aliases=aliases,
                root="org/tiny",
                max_held=max_held,
                sampling_defaults=sampling_defaults,
            ),
            metrics=Metrics(),
            max_request_s=max_request_s,
            max_unread_s=max_unread_s,
            audit_log=RequestAuditLog(audit_log),
            grammars=GrammarCompiler(self._model_dir, vocab_size=tokenizer.vocab_size) if has_grammars else None,
            tracing=tracing,
        )


def outcomes(completions: Completions) -> dict[str, float]:
    """Return the number of requests by outcome, from the metrics."""
    samples = [s for family in completions.metrics.requests.collect() for s in family.samples]
    return {s.labels["outcome"]: s.value for s in samples if s.name == "xpyd_requests_total" and s.value}
