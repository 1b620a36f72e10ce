"""Faults outside the workers: router death, a full disk for logs, clocks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.request import Role, Sampling, SequenceRequest
from core.wire.channel import open_channel
from core.wire.messages import sequence_to_proto
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.identities import rank, router
from tests.support.import_graph import PACKAGES

_ROOT = Path(__file__).parents[2]
_WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now", "time.localtime"}
# Times shown to clients or written into a prompt or an audit log, never compared.
_SHOWN = {
    ("frontend/openai/answer.py", "time.time"),
    ("frontend/responses/answer.py", "time.time"),
    ("frontend/text/completion_request.py", "time.time"),
    ("frontend/chat/template_sandbox.py", "datetime.now"),
    ("frontend/text/usage.py", "time.time"),
    ("router/telemetry/tracing.py", "time.time_ns"),
    ("router/telemetry/view.py", "time.time"),
    ("cluster/launch/host_checks.py", "time.time"),  # compares the hosts' clocks
    ("cluster/launch/audit_log.py", "time.time"),
    ("cluster/control/autoscaling.py", "time.time"),
    ("cluster/cli/planning/autoscale.py", "time.localtime"),
    # Certificates hold in wall-clock time.
    ("core/identity/authority.py", "datetime.datetime.now"),
    ("core/identity/credentials.py", "time.time"),
}

_GREEDY = Sampling(max_tokens=40, temperature=0.0)


async def test_a_full_disk_for_logs_stops_nobody(lab: Lab) -> None:
    model_dir, inputs = lab.checkpoint("llama"), prompts(20, 40, 60)
    expected = lab.reference.ids(model_dir, inputs, _GREEDY)
    async with lab.own(model_dir, processes=True, **exact_tree(0, 0)) as cluster:
        for role in Role:
            await cluster.add(role, log="/dev/full")  # every write to it fails with ENOSPC
        answers = await cluster.generate_all(inputs, _GREEDY)
        assert [answer.ids for answer in answers] == expected


async def test_what_a_router_held_is_free_after_its_death(lab: Lab) -> None:
    """The router is a channel here that closes abruptly, as the kernel closes those of a killed process."""
    async with lab.own(lab.checkpoint("llama"), processes=True, **exact_tree(0, 0)) as cluster:
        decode = await cluster.add(Role.DECODE)
        seen = cluster.replicas.get(decode.id)
        assert seen
        request = SequenceRequest(
            id="r", token_ids=tuple(prompts(40)[0]), num_prompt_tokens=40, sampling=Sampling(max_tokens=80)
        )
        another = cluster.identity(router("another"))
        async with open_channel(seen.member.address, peer=rank(decode.id), identity=another) as channel:
            calls = [
                rpc.DecodeWorkerStub(channel).Generate(
                    pb.GenerateRequest(sequence=sequence_to_proto(request), prefill_here=here, router="another")
                )
                for here in (True, False)  # one that decodes, and one that waits for KV that never arrives
            ]
            for call in calls:
                event = await call.read()
                assert event is not grpc.aio.EOF and event.WhichOneof("event") == "reserved"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_decision_looks_at_a_wall_clock(package: str) -> None:
    """Clocks of two machines may differ by hours and may be set at any time.

    So deadlines are monotonic, and leases are sent as remaining seconds.
    """
    found = {
        (str(path.relative_to(_ROOT)), name)
        for path in (_ROOT / package).rglob("*.py")
        for name in _calls(ast.parse(path.read_text()))
    }
    assert found & {(path, name) for path, name in found if name in _WALL_CLOCKS} <= _SHOWN


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield ast.unparse(node.func)
