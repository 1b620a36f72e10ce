"""The cases of the list that can be played against vLLM from outside: by references in requests, and by signals."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Awaitable, Callable

from tests.benchmarks.kv_fault_vllm import NUM_BLOCKS, Reference, VllmPair

_FAR = 1 << 20
_FROZEN_S = 20.0

VllmStrike = Callable[[VllmPair], Awaitable[None]]


async def _undisturbed(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    await pair.ask(prompt, await pair.reference(prompt))
    await pair.read_all(await pair.crowd())


async def _unknown(pair: VllmPair) -> None:
    """Its own blocks, under the name of a request that nobody has."""
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.ask(prompt, reference | {"remote_request_id": "cmpl-nobody-0"})
    await pair.control()


async def _out_of_range(pair: VllmPair) -> None:
    """Far beyond its blocks, and the first beyond them."""
    for first in (NUM_BLOCKS, _FAR):
        prompt = await pair.prompt()
        reference = await pair.reference(prompt)
        await pair.ask(prompt, _with_blocks(reference, lambda n, first=first: [first + i for i in range(n)]))
    await pair.control()


async def _consumed(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.read_all([(prompt, reference)])
    await pair.ask(prompt, reference)
    await pair.control()


async def _stale(pair: VllmPair) -> None:
    """It was read once; by now its blocks are a crowd's, who have not been read yet."""
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.read_all([(prompt, reference)])
    crowd = await pair.crowd()
    await pair.ask(prompt, reference)
    await pair.read_all(crowd)


async def _expired(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await asyncio.sleep(2 * pair.lease_s)
    await pair.ask(prompt, reference)
    await pair.control()


async def _expired_reused(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await asyncio.sleep(2 * pair.lease_s)
    crowd = await pair.crowd()
    await pair.ask(prompt, reference)
    await pair.read_all(crowd)


async def _short(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.ask(prompt, reference | {"remote_block_ids": [group[:-2] for group in reference["remote_block_ids"]]})
    await pair.control()


async def _other_prompt(pair: VllmPair) -> None:
    """A prompt beside the live reference of another one of the same length."""
    prompt, other = await pair.prompt(), await pair.prompt()
    reference = await pair.reference(other)
    await pair.ask(prompt, reference)
    await pair.control()


async def _twice(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await asyncio.gather(pair.ask(prompt, dict(reference)), pair.ask(prompt, dict(reference)))
    await pair.control()


async def _forged_peer(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.ask(prompt, reference | {"remote_engine_id": str(uuid.uuid4())})
    await pair.control()


async def _nobody_there(pair: VllmPair) -> None:
    """And no server of this name is known yet."""
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.ask(prompt, reference | {"remote_engine_id": str(uuid.uuid4()), "remote_port": 1})
    await pair.control()


async def _client_gone(pair: VllmPair) -> None:
    """The proxy never comes with what the prefill server keeps."""
    await pair.reference(await pair.prompt())
    pair.outcome.seen = "nothing"


async def _killed_sender(pair: VllmPair) -> None:
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    pair.kill(pair.prefill)
    await pair.ask(prompt, reference)


async def _frozen_sender(pair: VllmPair) -> None:
    """It stands still before it is read from, and goes on after a while."""
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    pair.prefill.send(signal.SIGSTOP)
    asking = asyncio.create_task(pair.ask(prompt, reference))
    await asyncio.wait({asking}, timeout=_FROZEN_S)
    pair.prefill.send(signal.SIGCONT)
    await asking
    await pair.control()


async def _killed_receiver(pair: VllmPair) -> None:
    """Before it has read."""
    prompt = await pair.prompt()
    await pair.reference(prompt)
    pair.kill(pair.decode)
    pair.outcome.seen = "nothing"


async def _frozen_receiver(pair: VllmPair) -> None:
    """It has the request, and stands still beyond the lease; meanwhile the blocks are a crowd's."""
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    pair.decode.send(signal.SIGSTOP)
    asking = asyncio.create_task(pair.ask(prompt, reference))
    await asyncio.sleep(2 * pair.lease_s)
    crowd = await pair.crowd()
    pair.decode.send(signal.SIGCONT)
    await asking
    await pair.read_all(crowd)


async def _restarted(pair: VllmPair) -> None:
    """The prefill server is killed and is back at its address; then somebody comes with a reference of its first life.

    Its new life has other prompts in these blocks.
    """
    prompt = await pair.prompt()
    reference = await pair.reference(prompt)
    await pair.restart(pair.prefill)
    crowd = await pair.crowd()
    await pair.ask(prompt, reference)
    await pair.read_all(crowd)


VLLM_STRIKES: dict[str, VllmStrike] = {
    "undisturbed": _undisturbed,
    "unknown": _unknown,
    "out-of-range": _out_of_range,
    "consumed": _consumed,
    "stale": _stale,
    "expired": _expired,
    "expired-reused": _expired_reused,
    "short": _short,
    "other-prompt": _other_prompt,
    "twice": _twice,
    "forged-peer": _forged_peer,
    "nobody-there": _nobody_there,
    "client-gone": _client_gone,
    "sender-killed": _killed_sender,
    "sender-frozen": _frozen_sender,
    "receiver-killed": _killed_receiver,
    "receiver-frozen": _frozen_receiver,
    "restarted": _restarted,
}


def _with_blocks(reference: Reference, ids: Callable[[int], list[int]]) -> Reference:
    """The same shape: as many blocks in each group."""
    return reference | {"remote_block_ids": [ids(len(group)) for group in reference["remote_block_ids"]]}
