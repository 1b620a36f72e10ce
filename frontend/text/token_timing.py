"""Token latencies of one request: time to first token and inter-token latency."""

from __future__ import annotations

from time import monotonic

from router.telemetry.metrics import Metrics


class TokenClock:
    """Clock started at a request's arrival. Observes the latency of each token and keeps the means."""

    def __init__(self, metrics: Metrics, *, num_choices: int) -> None:
        self._metrics = metrics
        self._observe, self._count = metrics.inter_token_latency.observe, metrics.generated_tokens.inc
        self.began = monotonic()
        self._last: list[float | None] = [None] * num_choices  # arrival of each choice's last token
        self._gaps_s = 0.0  # the sum over all choices
        self._num_gaps = 0
        self.ttft_s = 0.0  # 0 before the first token

    @property
    def elapsed_s(self) -> float:
        return monotonic() - self.began

    @property
    def itl_s(self) -> float:
        """Mean inter-token latency in seconds; 0 if no choice has two tokens."""
        return self._gaps_s / self._num_gaps if self._num_gaps else 0.0

    def tick(self, choice: int, num_tokens: int = 1) -> None:
        """Record tokens of a choice that arrived together, now."""
        now = monotonic()
        self._count(num_tokens)
        last, self._last[choice] = self._last[choice], now
        if self.ttft_s == 0.0:
            self.ttft_s = now - self.began
            self._metrics.time_to_first_token.observe(self.ttft_s)
        if last is not None:
            gap_s = now - last
            self._gaps_s += gap_s
            self._num_gaps += 1
            self._observe(gap_s)
        if num_tokens > 1:
            self._num_gaps += num_tokens - 1
            self._observe(0.0, num_tokens - 1)
