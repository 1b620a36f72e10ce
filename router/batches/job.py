"""One batch, worked on by this router for as long as it has the lease.

check     every line of the input file           problems: failed, and nothing runs
answer    each line that has no answer yet       some at a time; an answer is recorded with its line, once
end       completed · expired · cancelled · failed; what was answered until then is in the output file

Whoever loses the lease leaves everything as it is: whoever has it now goes on from what is recorded. A line that was
being answered is answered again, and has one answer, for Redis takes the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import RedisError

from core.index.redis_client import RedisReach
from core.types.errors import KeysUnknown, Unauthenticated
from frontend.access.identity import Client
from router.batches.answering import LineEndpoint, answer_line, error_line
from router.batches.bounds import BatchBounds
from router.batches.lines import AskedLine, LineCheck, lines_of, read_line
from router.batches.patience import Patience, is_cancelled
from router.batches.records import OUTPUT, BatchProblem, BatchRecord, BatchState, FileRecord
from router.batches.redis_batches import HashedPlace, RedisBatches

logger = logging.getLogger(__name__)

_MAX_PAUSE_S = 30.0  # before a line that was refused is tried again
_MAX_LOST = 5  # times that one line is tried again, where what serves it fails: it may be the line
_REST_S = 60.0  # for telling each line that is left so
_TOO_LATE = "this request could not be answered before the completion window expired"


@dataclass(frozen=True, kw_only=True)
class _End:
    """What becomes of a batch before all of its lines are answered."""

    status: str
    problem: BatchProblem | None = None


_LOST = _End(status="lost")  # the lease: somebody else works on it
_EXPIRED = _End(status="expired")


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What the jobs of one router share."""

    store: RedisBatches
    bounds: BatchBounds
    target: LineEndpoint
    client_of: Callable[[str], Client]  # by a key's id. Raises Unauthenticated or KeysUnknown
    slots: asyncio.Semaphore  # of the lines that are answered at a time
    at_a_time: int  # of one batch
    lease_s: float
    again_s: float  # before what could not be done is tried again, where Redis is not what was away


class BatchJob:
    """Belongs to one event loop; `run` once."""

    def __init__(self, workplace: Workplace, place: HashedPlace, token: str, record: BatchRecord) -> None:
        self._workplace = workplace
        self._store = workplace.store
        self._place = place
        self._token = token
        self._made = record.made
        self._state = record.state
        self._input = self._store.place(self._made.tenant, self._made.input_file_id)
        self._end: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._reach = RedisReach("a batch waits for it, or for another router")
        # For as long as the lease may be held: an answer that costs minutes is not thrown away for a pause of Redis's.
        self._kept_trying = Patience(self._reach)
        self._paused_until = 0.0  # monotonic: the key may ask for nothing before

    async def run(self) -> None:
        """Until it has ended, or the lease is lost."""
        logger.info("batch begun batch=%s status=%s", self._made.id, self._state.status)
        keeping = asyncio.create_task(self._keep_lease())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            keeping.cancel()
            working.cancel()
            await asyncio.gather(keeping, working, return_exceptions=True)
        logger.info("batch left batch=%s status=%s", self._made.id, self._state.status)

    async def _keep_lease(self) -> None:
        """Returns where it is lost: also where nothing was heard of it for so long that it may be."""
        lease_s = self._workplace.lease_s
        held_until = time.monotonic() + lease_s
        while time.monotonic() < held_until and not is_cancelled():
            asked_at = time.monotonic()
            try:
                told = await self._store.renew(self._place, self._token, lease_s=lease_s)
            except RedisError as error:
                self._reach.missed(error)
            else:
                if told == "lost":
                    return
                if told == "cancel":
                    self._end_with(_End(status="cancelled"))
                held_until = asked_at + lease_s
            await asyncio.sleep(min(1.0, lease_s / 4))

    async def _work(self) -> None:
        end = await self._until_end(self._answer_all(), within_s=self._made.expires_at - time.time())
        if end is _EXPIRED and self._state.status == "in_progress":
            await self._until_end(self._reject_rest(), within_s=_REST_S)
        if end is not _LOST:
            await self._finish(end)

    async def _until_end(self, work: Coroutine[Any, Any, _End], *, within_s: float) -> _End:
        """What `work` ends with, or what comes upon it."""
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait(
                {task, self._end}, timeout=max(0.0, within_s), return_when=asyncio.FIRST_COMPLETED
            )
            if self._end in done:
                return self._end.result()
            return task.result() if task in done else _EXPIRED
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _answer_all(self) -> _End:
        if self._state.status == "validating":
            check = await self._check()
            if check.problems:
                self._state = self._moved("validating", problems=check.problems)
                return _End(status="failed")
            state = self._moved("in_progress", num_lines=check.num_lines, model=check.model)
            if await self._kept_trying(lambda: self._store.set_state(self._place, self._token, state)) == "lost":
                return _LOST
            self._state = state
        window = asyncio.Semaphore(self._workplace.at_a_time)
        async with asyncio.TaskGroup() as group:
            async for line in self._left():
                await window.acquire()
                task = group.create_task(self._answer(line))
                task.add_done_callback(lambda _: window.release())
        return _End(status="completed")

    async def _check(self) -> LineCheck:
        target, bounds = self._workplace.target, self._workplace.bounds
        check = LineCheck(endpoint=self._made.endpoint, models=target.models, max_lines=bounds.max_lines)
        async for line in lines_of(self._input_parts()):
            check.add(line)
            if check.is_over:
                return check
        check.end()
        return check

    async def _left(self) -> AsyncIterator[AskedLine]:
        """Lines without an answer."""
        answered = set[int]()
        for id in (self._made.output_file_id, self._made.error_file_id):
            file = self._store.place(self._made.tenant, id)
            answered.update(await self._kept_trying(lambda file=file: self._store.numbers(file)))  # type: ignore[misc]
        async for line in lines_of(self._input_parts()):
            if line.number not in answered:
                yield read_line(line)

    async def _input_parts(self) -> AsyncIterator[bytes]:
        """Of the input file; ends this batch where it has gone."""
        record = await self._kept_trying(lambda: self._store.file(self._input))
        for number in range(record.num_parts if record else 0):
            found = await self._kept_trying(lambda number=number: self._part(number))  # type: ignore[misc]
            if not found:
                record = None
                break
            yield found
        if record is None:
            text = f"the input file {self._made.input_file_id} is not there any more"
            self._end_with(_failed("file_not_found", text, "input_file_id"))
            await asyncio.Event().wait()  # until this is cancelled, which it is by that

    async def _part(self, number: int) -> bytes:
        """Empty where it has gone."""
        async for part in self._store.parts(self._input, [number], part_bytes=1):
            return part
        return b""

    async def _answer(self, line: AskedLine) -> None:
        """Until there is an answer, and it is recorded."""
        num_lost = 0
        while True:
            await self._until_it_may_ask()
            async with self._workplace.slots:
                if (client := await self._client()) is None:
                    return
                answer = await self._workplace.target.answer(self._made.endpoint, line.body, client)
            if answer.retry_after_s is not None:
                pause_s = min(_MAX_PAUSE_S, answer.retry_after_s)
                self._paused_until = max(self._paused_until, time.monotonic() + pause_s)
            elif answer.is_lost and num_lost < _MAX_LOST:
                num_lost += 1
                await asyncio.sleep(self._workplace.again_s * 2**num_lost)
            else:
                break
        await self._record(line.number, answer_line(line, answer), is_error=answer.status != 200)

    async def _until_it_may_ask(self) -> None:
        while (left_s := self._paused_until - time.monotonic()) > 0:
            await asyncio.sleep(left_s)

    async def _client(self) -> Client | None:
        """Who has made this batch, as one that nobody waits for. None: its key was revoked, which ends the batch."""
        while True:
            try:
                return self._workplace.client_of(self._made.key_id).offline()
            except KeysUnknown:
                await asyncio.sleep(self._workplace.again_s)
            except Unauthenticated:
                text = "the API key that made this batch is not known any more"
                self._end_with(_failed("invalid_api_key", text, None))
                return None

    async def _reject_rest(self) -> _End:
        """It is too late for them."""
        async for line in self._left():
            await self._record(line.number, error_line(line, "batch_expired", _TOO_LATE), is_error=True)
        return _EXPIRED

    async def _record(self, number: int, answer: bytes, *, is_error: bool) -> None:
        told = await self._kept_trying(
            lambda: self._store.record(
                self._place, self._token, self._made, line=number, answer=answer, is_error=is_error
            )
        )
        if told in ("tenant", "all"):
            whose = "this tenant has" if told == "tenant" else "there is"
            text = f"no more room for answers: {whose} all that router.batch_mib allows; delete files and try the rest"
            self._end_with(_failed("storage_full", text, None))
        elif told == "lost":
            self._end_with(_LOST)

    async def _finish(self, end: _End) -> None:
        made, now = self._made, int(time.time())
        files = list[FileRecord]()
        for id, what in ((made.output_file_id, "output"), (made.error_file_id, "error")):
            file = self._store.place(made.tenant, id)
            if num_bytes := await self._kept_trying(lambda file=file: self._store.num_bytes(file)):  # type: ignore[misc]
                numbers = await self._kept_trying(lambda file=file: self._store.numbers(file))  # type: ignore[misc]
                record = FileRecord(
                    id=id,
                    name=f"{made.id}_{what}.jsonl",
                    purpose=OUTPUT,
                    num_bytes=num_bytes,
                    num_parts=len(numbers),
                    created_at=now,
                    expires_at=now + int(self._workplace.bounds.keep_s),
                )
                files.append(record)
        ids = {record.id for record in files}
        problems = [*self._state.problems, *([end.problem] if end.problem else [])]
        state = self._moved(
            end.status,
            problems=problems,
            has_output=made.output_file_id in ids,
            has_errors=made.error_file_id in ids,
        )
        told = await self._kept_trying(lambda: self._store.finish(self._place, self._token, state, files, made.tenant))
        if told != "lost":
            self._state = state

    def _moved(self, status: str, **changes: Any) -> BatchState:
        now = int(time.time())
        times = dict(self._state.times)
        if status != "validating":
            times |= {"finalizing_at": now} if status == "completed" else {}
            times[f"{status}_at"] = now
        return msgspec.structs.replace(self._state, status=status, times=times, **changes)

    def _end_with(self, end: _End) -> None:
        if not self._end.done():
            self._end.set_result(end)


def _failed(code: str, message: str, param: str | None) -> _End:
    return _End(status="failed", problem=BatchProblem(code=code, message=message, param=param))
