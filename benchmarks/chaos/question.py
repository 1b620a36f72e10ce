"""What chaos asks, and how an answer is compared with the one that an undisturbed deployment gave."""

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
_STOP = " the"  # frequent, so that many answers of the question that has it end by it


@dataclass(frozen=True)
class Question:
    """One request that has one right answer: greedy, or sampled with a seed."""

    number: int
    message: pb.GenerateRequest

    @property
    def is_greedy(self) -> bool:
        return self.message.sampling.temperature == 0.0


@dataclass
class Reply:
    """What came of one question: tokens, text and end, and the runner-up's distance at each position."""

    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # natural-log probability of the likeliest less the next one's
    text: str = ""
    finish_reason: str = ""

    def add(self, delta: pb.Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        for logprob in delta.logprobs:
            likeliest = [top.logprob for top in logprob.top]
            self.gaps.append(likeliest[0] - likeliest[1] if len(likeliest) > 1 else 0.0)


def questions(count: int, *, max_tokens: int) -> list[Question]:
    """`count` different ones of growing length: every second greedy, every fourth with a stop string."""
    return [_question(number, max_tokens=max_tokens) for number in range(count)]


def compare(question: Question, answer: Reply, undisturbed: Reply) -> Mismatch | None:
    """None when they are the same, text and end included."""
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
    # A draw from the whole vocabulary has a neighbour so near that rounding alone turns it, about once in 10^4 tokens.
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
