"""Requests of the chaos test, and the comparison of an answer with the undisturbed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.tally import Mismatch
from core.rpc import inference_pb2 as pb

_SENTENCES = (
    "The old lighthouse keeper wrote down the weather every evening, whatever came.",
    "A river does not ask the mountain for permission; it goes around.",
    "In the second year of the survey the instruments were moved to the northern shore.",
    "Bread, salt and a little oil were all that the travellers carried over the pass.",
    "She counted the ships as they came in, and those that did not.",
    "Every machine in the hall had a name, and most of them answered to it.",
)
# A frequent word, so that many answers end with it.
_STOP = " the"


@dataclass(frozen=True)
class Question:
    """Request with exactly one correct answer: greedy, or sampled with a seed."""

    number: int
    message: pb.GenerateRequest

    @property
    def is_greedy(self) -> bool:
        return self.message.sampling.temperature == 0.0


@dataclass
class Reply:
    """Answer to a question: tokens, text, finish reason, and the probability gap at each position."""

    token_ids: list[int] = field(default_factory=list)
    # Log-probability of the likeliest token minus that of the second.
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""

    def add(self, delta: pb.Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        for logprob in delta.logprobs:
            likeliest = [top.logprob for top in logprob.top]
            self.gaps.append(likeliest[0] - likeliest[1] if len(likeliest) > 1 else 0.0)


def questions(count: int, *, max_tokens: int) -> list[Question]:
    """Return `count` different questions of growing length: every second greedy, every fourth with a stop string."""
    return [_question(number, max_tokens=max_tokens) for number in range(count)]


def compare(question: Question, answer: Reply, undisturbed: Reply) -> Mismatch | None:
    """Return the difference, or None if tokens, text and finish reason are equal."""
    ours, theirs = answer.token_ids, undisturbed.token_ids
    if (ours, answer.text, answer.finish_reason) == (theirs, undisturbed.text, undisturbed.finish_reason):
        return None
    position = _first_difference(ours, theirs)
    gap = undisturbed.gaps[position] if position < len(undisturbed.gaps) else 0.0
    return Mismatch(question.number, position, gap, question.is_greedy)


def _question(number: int, *, max_tokens: int) -> Question:
    length = 1 + number % len(_SENTENCES)
    text = " ".join([f"{number}.", *(_SENTENCES[(number + i) % len(_SENTENCES)] for i in range(length))])
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=2, seed=number)
    sampling.temperature = 0.0 if number % 2 == 0 else 1.0
    # Draws from the whole vocabulary are often so close that rounding changes them, about once in 10^4 tokens.
    sampling.top_k = 20
    if number % 4 == 3:
        sampling.stop.append(_STOP)
        sampling.min_tokens = max_tokens // 2
    return Question(number, pb.GenerateRequest(prompt=text, sampling=sampling))


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return min(len(ours), len(theirs))
