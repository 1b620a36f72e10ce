"""Who may import whom, room by room (docs/ARCHITECTURE.md §3). `python -m tests.rooms` prints what the code does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rooms import (
    ROOT,
    circles,
    entry,
    module_arrows,
    modules,
    parse_table,
    paths_in_strings,
    picture,
    room_arrows,
    room_of,
)

# Every arrow that there may be, and no other: a new one is a decision, and so is one that goes.
_ARROWS = parse_table("""
cluster.bench: cluster(rpc wire words)
cluster.chaos: cluster(control host process rpc wire words)
cluster.cli: cluster(bench chaos control doctor host identity model process rpc wire words)
    engine(config quantization tools training) kvtransfer(bench) router(autoscale bench monitoring simulator text)
cluster.control: cluster(identity index process rpc wire words) router(autoscale)
cluster.doctor: cluster(control host index model process words)
cluster.grammar: cluster(words)
cluster.host: cluster(control index model process rpc wire words) router(app text)
cluster.identity: cluster(words)
cluster.index: cluster(words)
cluster.model: cluster(process words)
cluster.process: cluster(words)
cluster.rpc:
cluster.wire: cluster(identity rpc words)
cluster.words:
cluster.worker: cluster(grammar index model process rpc wire words) engine(batch config device_mark engine heads kv
    orders pace parallel prompts rate runner sampler scorer sequence speculation step tiers) kvtransfer(links movers
    protocol)
decode_worker.actor: cluster(rpc words worker) engine(config speculation) decode_worker(drafts server worker)
decode_worker.drafts: cluster(model words worker) engine(config draft_models heads speculation)
decode_worker.server: cluster(worker) decode_worker(worker)
decode_worker.ticket: cluster(words) engine(prompts)
decode_worker.worker: cluster(rpc wire words worker) engine(orders prompts speculation step) kvtransfer(protocol)
    decode_worker(ticket)
engine.admission: cluster(words) engine(decoding guests kv prompts sequence)
engine.ahead: engine(batch sequence step)
engine.attention: cluster(model) engine(batch cpu kernels kv layers streams)
engine.batch: engine(kernels streams)
engine.config: cluster(model words) engine(kv)
engine.cpu: cluster(model process words)
engine.decode_graphs: engine(batch kernels)
engine.decoding: engine(kv next_tokens sequence)
engine.device_mark:
engine.device_memory: cluster(words) engine(config)
engine.draft_cost:
engine.draft_draws: engine(cpu likeliest sampler sampling)
engine.draft_models: cluster(model) engine(batch config decode_graphs draft_draws heads kv runner sampling sequence
    speculation weights)
engine.engine: cluster(words) engine(admission ahead decoding guests known_tokens kv last_rows orders pace prompts
    sampling sequence speculation step tiers)
engine.expert_placement:
engine.guests: engine(decoding kv prompts sequence)
engine.heads: cluster(model words) engine(attention batch cpu kernels kv layers model parallel streams weights)
engine.kernels: engine(cpu)
engine.known_tokens: cluster(words) engine(kv sequence)
engine.kv: cluster(words) engine(batch cpu kernels streams)
engine.last_rows: engine(batch next_tokens scoring sequence)
engine.layers: cluster(words) engine(cpu kernels parallel weights)
engine.learnt_timing: cluster(words) engine(batch least_squares)
engine.least_squares:
engine.likeliest: engine(batch cpu penalties)
engine.logprobs: engine(kernels)
engine.memory_trial: engine(batch config decode_graphs device_memory kv)
engine.model: cluster(model) engine(attention batch cpu expert_placement kernels kv layers parallel weights)
engine.next_tokens: engine(batch sequence)
engine.orders: cluster(words) engine(tiers)
engine.pace: cluster(words) engine(batch draft_cost learnt_timing rate)
engine.parallel: cluster(words)
engine.penalties: cluster(words)
engine.prompts: cluster(words) engine(kv sequence)
engine.quantization: cluster(model words) engine(batch config kernels kv layers model parallel weights)
engine.rate:
engine.recorded_steps: engine(batch config decode_graphs kv model)
engine.ruled_tokens: cluster(words)
engine.runner: cluster(model words) engine(batch config cpu decode_graphs device_memory heads kernels kv
    layers memory_trial model orders parallel recorded_steps scorer step weights)
engine.sampler: cluster(words) engine(batch kernels likeliest logprobs ruled_tokens sampling)
engine.sampling: cluster(words) engine(penalties ruled_tokens)
engine.scorer: cluster(words) engine(logprobs scoring step)
engine.scoring: cluster(words)
engine.sequence: cluster(words) engine(kv ruled_tokens sampling scoring)
engine.speculation: cluster(words) engine(batch draft_cost kv least_squares sampling sequence)
engine.step: cluster(words) engine(batch last_rows next_tokens orders prompts sampling scoring sequence speculation)
engine.streams: cluster(words)
engine.tiers: cluster(process words) engine(kv rate sequence streams)
engine.tools: cluster(model process words) engine(batch config cpu draft_models engine kernels kv layers
    learnt_timing model orders pace parallel prompts runner sampler sampling sequence speculation step weights)
engine.training: cluster(model process words) engine(attention batch config kv layers model parallel runner tools
    weights)
engine.weights: cluster(model words)
kvtransfer.bench: cluster(process rpc wire words) engine(batch config kv runner) kvtransfer(links movers protocol)
kvtransfer.links: cluster(words) engine(streams)
kvtransfer.movers: cluster(rpc wire words) engine(cpu kernels kv orders streams tiers) kvtransfer(links protocol)
kvtransfer.protocol: cluster(words) engine(kv)
prefill_worker.actor: cluster(words worker) engine(config) prefill_worker(server worker)
prefill_worker.guest_answers: cluster(rpc wire words worker) engine(orders prompts step) kvtransfer(protocol)
prefill_worker.server: cluster(rpc wire words worker) engine(prompts) kvtransfer(protocol) prefill_worker(worker)
prefill_worker.worker: cluster(rpc wire words worker) engine(orders prompts step) kvtransfer(protocol)
    prefill_worker(guest_answers)
router.access: cluster(index process words) router(text)
router.admin_door: cluster(index process words) router(doors metrics monitoring serving)
router.app: cluster(control process words) router(borrowers service)
router.autoscale: cluster(bench words) router(simulator)
router.batches: cluster(index process words) router(access)
router.bench: cluster(bench index process rpc wire words) router(access doors metrics routing serving text
    tracing)
router.doors: cluster(rpc wire words) router(access batches metrics stored text tracing)
router.generation: cluster(words)
router.borrowers: cluster(process words) router(metrics served_model text tracing)
router.metrics: cluster(rpc words)
router.monitoring: cluster(rpc words) router(metrics routing serving)
router.parsers:
router.routing: cluster(index words)
router.served_model: cluster(grammar index model process rpc words) router(admin_door metrics routing serving text
    tracing traffic traffic_teller)
router.service: cluster(process words) router(access batches doors borrowers metrics served_model stored text tracing)
router.serving: cluster(index process rpc wire words) router(generation metrics routing)
router.simulator: cluster(bench index words) engine(engine kv orders prompts sampling sequence speculation step)
    router(routing)
router.stored: cluster(index words)
router.text: cluster(grammar words) router(generation metrics parsers tracing traffic)
router.tracing: cluster(words)
router.traffic: cluster(words)
router.traffic_teller: cluster(words) router(routing serving traffic)
""")


# Whoever starts a module by its path in a string, and which.
_BY_PATH = {
    "cluster.control.desired": {"prefill_worker.actor", "decode_worker.actor"},
}

# What rooms do without: on a machine where it is not installed, or for the time that it takes to load.
_NEVER_LOADED = {
    "cluster.words cluster.process cluster.model": "torch transformers ray redis fastapi cryptography",
    "cluster.identity": "torch transformers ray redis grpc pydantic",
    "cluster.rpc cluster.wire": "torch transformers ray redis pydantic cryptography",
    "cluster.index": "torch transformers ray grpc pydantic",
    "cluster.bench": "torch transformers ray redis pydantic",
    "cluster.control cluster.host cluster.chaos": "torch transformers",
    "cluster.cli": "torch transformers ray redis pydantic numpy rich httpx cryptography",
    "router": "torch transformers",
    "engine": "ray redis grpc pydantic msgspec transformers gguf cryptography",
    "kvtransfer": "ray redis pydantic msgspec transformers gguf",
}


def test_every_arrow_between_rooms_is_in_the_table_and_every_one_there_is_used() -> None:
    found = room_arrows()
    assert _ARROWS.keys() == found.keys(), "rooms that came or went: " + ", ".join(_ARROWS.keys() ^ found.keys())
    changed = [room for room in sorted(found) if found[room] != _ARROWS[room]]
    for room in changed:
        for to in sorted(found[room] - _ARROWS[room]):
            who = [
                name
                for name, imported in module_arrows().items()
                if room_of(name) == room
                for i in imported
                if room_of(i) == to
            ]
            print(f"new: {room} -> {to}, in {', '.join(sorted(set(who)))}")
        for to in sorted(_ARROWS[room] - found[room]):
            print(f"not used any more: {room} -> {to}")
    assert not changed, "the table would have to say:\n" + "\n".join(entry(room, found[room]) for room in changed)


def test_no_module_and_no_room_is_in_a_circle() -> None:
    assert [*circles(module_arrows()), *circles(_ARROWS)] == []


def test_the_rooms_stand_on_floors() -> None:
    """Without circles there is a floor for every room; `pytest -s` shows them."""
    print("\n" + picture(_ARROWS))


def test_nothing_is_imported_by_path_but_what_is_started_so() -> None:
    assert paths_in_strings() == _BY_PATH


@pytest.mark.timeout(300)  # torch alone takes half a minute where other work keeps every core busy
@pytest.mark.parametrize("rooms", _NEVER_LOADED)
def test_a_room_loads_without_what_it_must_not_need(rooms: str) -> None:
    wanted = tuple(rooms.split())
    names = [
        name
        for name, path in modules().items()
        if path.name != "__main__.py" and f"{name}.".startswith(tuple(f"{room}." for room in wanted))
    ]
    without = set(_NEVER_LOADED[rooms].split())
    program = f"import sys; [__import__(name) for name in {names}]; print(*{without} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


def test_proto_holds_no_python() -> None:
    """A package of that name would shadow proto-plus, which Ray's dependencies import as `proto`."""
    assert {path.suffix for path in (ROOT / "proto").iterdir()} == {".proto"}
    import proto

    assert hasattr(proto, "Message")
