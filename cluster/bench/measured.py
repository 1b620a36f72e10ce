"""Summary of a measured load, with the fields of the simulator's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster.bench.replay import Answered
from core.trace.statistics import spread


def summary(answers: Sequence[Answered], *, slo_ttft_s: float | None, slo_itl_s: float | None) -> dict[str, Any]:
    """Return plain values: times in milliseconds, rates per second from the first arrival to the last token.

    Goodput counts the requests within both limits, using each request's own mean ITL.
    """
    done = [answer for answer in answers if answer.usage]
    gaps = [gap for answer in done for gap in answer.gaps]
    duration_s = max((answer.last_token_at for answer in done), default=0.0)
    per_s = 1 / duration_s if duration_s else 0.0
    prompt_tokens = sum(answer.usage.prompt_tokens for answer in done if answer.usage)
    cached_tokens = sum(answer.usage.cached_tokens for answer in done if answer.usage)
    output_tokens = sum(answer.num_output for answer in done)
    good = sum(
        (slo_ttft_s is None or answer.ttft_s <= slo_ttft_s) and (slo_itl_s is None or answer.mean_itl_s <= slo_itl_s)
        for answer in done
    )
    return {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common(5)),
        "duration_s": duration_s,
        "reuse_share": cached_tokens / max(1, prompt_tokens),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens * per_s,
        "ttft_ms": spread([answer.ttft_s * 1e3 for answer in done]),
        "itl_ms": spread([seconds * 1e3 for seconds, _ in gaps], [count for _, count in gaps]),
        "e2e_ms": spread([answer.e2e_s * 1e3 for answer in done]),
        "goodput_rps": good * per_s,
        "good_share": good / max(1, len(answers)),
    }
