"""What replicas of a deployment tell each other of finished answers, so that each drafts from those of all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.redis_client import RedisReach
from core.index.shared_answers import MAX_MESSAGE_BYTES, AnswerStream
from core.rpc import worker_pb2 as pb
from engine.spec_decode.corpus import Answer, Scope
from engine.spec_decode.token_index import MOST_MATCH

_LOOK_S = 0.5
_SLICES = 4  # of a look: what was read is taken up in so many parts
_MAX_SLICE = 1024  # tokens: to take up so many holds a step up by 0.2 ms
_MAX_PART = 1024  # tokens of one answer
_MAX_TOLD = 8192  # tokens in one look: the newest
_MAX_WAITING = 1 << 16  # tokens that were read, and wait to be taken up: the newest
_MAX_WORD = 1024  # characters of a word of a scope
_FRAMING_BYTES = 16  # of a part within a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Of one replica, since it began."""

    heard_tokens: int = 0
    told_tokens: int = 0
    missed: int = 0  # messages
    rejected: int = 0


Exchange = Callable[[Seq[Answer], Shared], Awaitable[Seq[Answer]]]


class SharedAnswers:
    """Belongs to the event loop. No step waits for Redis, and without it a replica drafts from what it has.

    What a replica reads in a second is bounded, however many others there are: of much, the newest.
    """

    def __init__(
        self, redis: Redis, *, name: str, key: bytes, model: str, vocab_size: int, look_s: float = _LOOK_S
    ) -> None:
        """redis: a client of its own. name, key: of the deployment. model: fingerprint of the weights, which the others
        must have, too."""
        self._redis = redis
        self._stream = AnswerStream(redis, name=name, key=key)
        self._model = model
        self._vocab_size = vocab_size
        self._look_s = look_s
        self._waiting: deque[Answer] = deque()  # heard, and not taken up yet
        self._num_waiting = 0  # tokens
        self._heard_tokens = self._told_tokens = 0
        self._is_leaving = False
        self._reach = RedisReach("each replica drafts from its own answers")

    async def run(self, exchange: Exchange) -> None:
        """Until cancelled. exchange: takes up what others have told, and gives what is to be told."""
        while not self._is_leaving:  # redis-py may swallow a cancellation
            told: list[Answer] = []
            for i in range(_SLICES):
                taken = self._next_slice()
                if taken or i == _SLICES - 1:
                    told += await exchange(taken, self.shared)
                await asyncio.sleep(self._look_s / _SLICES)
            if not self._is_leaving:
                await self._look(told)

    async def leave(self) -> None:
        """Tell and hear nothing more."""
        self._is_leaving = True
        await self._redis.aclose()

    @property
    def shared(self) -> Shared:
        return Shared(
            heard_tokens=self._heard_tokens,
            told_tokens=self._told_tokens,
            missed=self._stream.num_missed,
            rejected=self._stream.num_rejected,
        )

    async def _look(self, told: Seq[Answer]) -> None:
        try:
            for message in self._messages(told):
                await self._stream.write(message.SerializeToString())
                self._told_tokens += sum(len(answer.tokens) for answer in message.answers)
            for value in await self._stream.read():
                self._hear(value)
            self._reach.found()
        except RedisError as error:  # what was to be told is not: others will have answers that are newer
            self._reach.missed(error)

    def _messages(self, answers: Seq[Answer]) -> Iterator[pb.ToldAnswers]:
        """With the newest of them, and of one that is too long for a look with its end."""
        told, num_left = deque[pb.ToldAnswer](), _MAX_TOLD
        for part in _newest_first(answers):
            num_left -= len(part.tokens)
            if num_left < 0:
                break
            if part.ByteSize() <= MAX_MESSAGE_BYTES // 2:
                told.appendleft(part)
        message = pb.ToldAnswers(model=self._model)
        for part in told:
            if message.ByteSize() + part.ByteSize() > MAX_MESSAGE_BYTES - _FRAMING_BYTES:
                yield message
                message = pb.ToldAnswers(model=self._model)
            message.answers.append(part)
        if message.answers:
            yield message

    def _hear(self, value: bytes) -> None:
        """The one place where it is looked at what others have written."""
        try:
            message = pb.ToldAnswers.FromString(value)
        except DecodeError:
            self._stream.reject("cannot be read")
            return
        if message.model != self._model:  # while a deployment is updated there are two
            return
        if any(not self._makes_sense(answer) for answer in message.answers):
            self._stream.reject("has no tokens of the model's")
            return
        for told in message.answers:
            self._waiting.append(Answer(Scope(told.tenant, told.salt, told.adapter), tuple(told.tokens)))
            self._num_waiting += len(told.tokens)
        while self._num_waiting > _MAX_WAITING:
            self._num_waiting -= len(self._waiting.popleft().tokens)

    def _makes_sense(self, told: pb.ToldAnswer) -> bool:
        is_short = all(len(word) <= _MAX_WORD for word in (told.tenant, told.salt, told.adapter))
        return is_short and 0 < len(told.tokens) <= _MAX_PART and max(told.tokens) < self._vocab_size

    def _next_slice(self) -> list[Answer]:
        """What is taken up between two steps."""
        taken: list[Answer] = []
        num_tokens = 0
        while self._waiting and num_tokens + len(self._waiting[0].tokens) <= _MAX_SLICE:
            taken.append(self._waiting.popleft())
            num_tokens += len(taken[-1].tokens)
        self._num_waiting -= num_tokens
        self._heard_tokens += num_tokens
        return taken


def _newest_first(answers: Seq[Answer]) -> Iterator[pb.ToldAnswer]:
    """Part by part, each answer from its end on."""
    for answer in reversed(answers):
        for tokens in reversed([*_parts(answer.tokens)]):
            yield pb.ToldAnswer(**answer.scope._asdict(), tokens=tokens)


def _parts(tokens: Seq[int]) -> Iterator[Seq[int]]:
    """Each begins with the last tokens of the one before, so that what follows these is found, too."""
    for start in range(0, max(1, len(tokens) - MOST_MATCH), _MAX_PART - MOST_MATCH):
        yield tokens[start : start + _MAX_PART]
