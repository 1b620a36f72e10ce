"""Replayed decode steps equal those launched kernel by kernel, whatever was replayed before; states stay with rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.types.request import Sampling
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.device_batch import DeviceBatch, upload
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.pool import KVPool
from engine.model.layer_kinds import StepStates
from engine.runner import decode_graphs, graph_replay
from engine.runner.decode_graphs import Step, graph_sizes
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from engine.sampling.sampler import choose_by_torch
from engine.spec_decode.speculation import Speculation
from tests.engine.engine_requests import Asked, Oracle, answers, check_with_leavers
from tests.engine.fake_capture import FakeReplays
from tests.engine.kernels.launched import launch_kernels
from tests.engine.spec_decode.proposers import FakeProposer
from tests.engine.steps import VOCAB_SIZE, DecodeSteps, prompts
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, DELTA_NET, LFM2, NEMOTRON_H, MakeModel
from tests.support.grids import quick

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 8
NUM_BLOCKS = 150
MAX_CONTEXT = 128  # of the tiny models
MAX_ROWS = 9
# Slots that rows use; there are more.
NUM_STATES = 32


def decode_batch(contexts: list[int], seed: int) -> Batch:
    """Return a batch of one query per row, at the end of its context, over blocks in random order."""
    return batch_of([(context, 1, 1) for context in contexts], seed)


def batch_of(rows: list[tuple[int, int, int]], seed: int) -> Batch:
    """Return a batch. Per row: context at the end, number of tokens computed, and how many of the last of these have
    logits."""
    generator = np.random.default_rng(seed)
    blocks = iter(generator.permutation(NUM_BLOCKS).tolist())
    states = iter(np.random.default_rng(seed).permutation(NUM_STATES).tolist())
    return Batch.of(
        [
            Row(
                token_ids=generator.integers(0, VOCAB_SIZE, num_tokens).tolist(),
                start=context - num_tokens,
                blocks=[next(blocks) for _ in range(-(-context // BLOCK_SIZE))],
                num_logits=num_logits,
                state_index=next(states),
            )
            for context, num_tokens, num_logits in rows
        ],
        block_size=BLOCK_SIZE,
    )


def fill(pool: KVPool, seed: int) -> None:
    """Fill the pool as earlier steps would."""
    every = torch.arange(pool.num_blocks * BLOCK_SIZE, device=pool.device)
    layout = pool.layout
    shape = (layout.num_sides, len(every), *layout.heads[0])
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(pool.device)
    for layer in range(layout.num_layers):
        if layout.num_sides == 1:
            pool.write_latents(layer, every, kv[0, :, 0])
        else:
            pool.write(layer, every, *kv)
    for part in states_of(pool):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))


def contents(pool: KVPool) -> Tensor:
    """(layers, 2, K, slots, D) fp32."""
    every = torch.arange(pool.num_blocks, device=pool.device)
    return torch.stack([pool.read(layer, every, torch.float32) for layer in range(pool.layout.num_layers)])


def states_of(pool: KVPool) -> list[Tensor]:
    """Return views of the states, (slots, …), of each recurrent layer: matrices and kept inputs."""
    return [part for layer in pool.states for part in layer.tensors]


def check_equal(pair: tuple[ModelRunner, ModelRunner], batch: Batch, *, tolerance: float = 1e-4) -> None:
    """Check that both runners return equal logits, write equal KV and states, and write only to the batch's slots."""
    if pair[0].pool.scales:
        tolerance = max(tolerance, 0.15)  # a value between two codes of e4m3 or int4 may become either
    before, states_before = contents(pair[0].pool), [part.clone() for part in states_of(pair[0].pool)]
    logits = [runner.forward(batch).clone() for runner in pair]
    torch.testing.assert_close(*logits, atol=tolerance, rtol=tolerance)
    after = [contents(runner.pool) for runner in pair]
    torch.testing.assert_close(*after, atol=tolerance, rtol=tolerance)
    is_other = torch.ones(before.shape[3], dtype=torch.bool)
    is_other[batch.slots] = False
    assert torch.equal(after[0][..., is_other, :], before[..., is_other, :])
    for ours, theirs, old in zip(states_of(pair[0].pool), states_of(pair[1].pool), states_before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        is_other = torch.ones(len(old), dtype=torch.bool)
        is_other[batch.state_indices] = False
        assert torch.equal(ours[is_other], old[is_other]), "the step writes a state that is not of its rows"


MakePair = Callable[..., tuple[ModelRunner, ModelRunner]]


@pytest.fixture(scope="module")
def make_pair(tiny_model: MakeModel) -> MakePair:
    """make_pair(capture, "llama", pool_dtype="fp8_e4m3", …) -> a runner that replays, and one that does not."""

    def make(
        capture: Any,
        family: str,
        *,
        dtype: str = "float32",
        pool_dtype: str = "auto",
        device: str = "cpu",
        **changes: Any,
    ) -> tuple[ModelRunner, ModelRunner]:
        directory, _ = tiny_model(family, **changes)
        config = EngineConfig(
            model_dir=directory,
            dtype=dtype,
            pool_dtype=pool_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            device=str(device),
        )
        replaying = ModelRunner(replace(config, recorded_rows=MAX_ROWS), capture=capture)
        return replaying, ModelRunner(config)

    return make


LATENT = DEEPSEEK_V3 | {"first_k_dense_replace": 3}  # no layer has experts
# Rows choose positions from 38 on.
SPARSE = DEEPSEEK_V32 | {"first_k_dense_replace": 3, "index_topk": 37}
# Small enough for the interpreter.
SMALL_DELTA_NET = DELTA_NET | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SMALL_DELTA_NET |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
RECURRENT = {"qwen3_5": DELTA_NET, "nemotron_h": NEMOTRON_H, "lfm2": LFM2}


@pytest.fixture(
    scope="module",
    params=[
        *("llama", "qwen3 fp8_e4m3", "qwen3 int8", "qwen3 int4", "mistral window", "deepseek_v3 latent"),
        *("qwen3_5 recurrent", "nemotron_h recurrent", "lfm2 recurrent", "deepseek_v32 sparse"),
    ],
)
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> tuple[ModelRunner, ModelRunner]:
    family, _, kind = request.param.partition(" ")
    pool_dtype = kind if kind in ("fp8_e4m3", "int8", "int4") else "auto"
    changes: dict[str, Any] = {"window": {"sliding_window": 9}, "latent": LATENT, "sparse": SPARSE}.get(kind, {})
    changes = RECURRENT.get(family, changes)
    return make_pair(FakeReplays(), family, pool_dtype=pool_dtype, **changes)


@settings(max_examples=settings.default.max_examples // 6)
@given(
    steps=st.lists(st.lists(st.integers(1, MAX_CONTEXT), min_size=1, max_size=MAX_ROWS), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_steps_of_any_sizes(pair: tuple[ModelRunner, ModelRunner], steps: list[list[int]], seed: int) -> None:
    for runner in pair:
        fill(runner.pool, seed)
    for i, contexts in enumerate(steps):
        check_equal(pair, decode_batch(contexts, seed + i))


@st.composite
def rows_of_several(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return batches as in steps that verify drafts, with a chunk of a prompt, up to the limit of tokens."""
    left, rows = graph_sizes(MAX_ROWS)[-1], list[tuple[int, int, int]]()
    while left and len(rows) < 6:
        num_tokens = draw(st.integers(1, min(7, left)))
        context = draw(st.integers(num_tokens, MAX_CONTEXT))
        rows.append((context, num_tokens, draw(st.sampled_from([num_tokens, 1, 0]))))
        left -= num_tokens
        if draw(st.booleans()):
            break
    return rows


@settings(max_examples=settings.default.max_examples // 5)
@given(steps=st.lists(rows_of_several(), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_rows_of_several_tokens_are_replayed_in_query_groups(
    pair: tuple[ModelRunner, ModelRunner], steps: list[list[tuple[int, int, int]]], seed: int
) -> None:
    for runner in pair:
        fill(runner.pool, seed)
    for i, rows in enumerate(steps):
        check_equal(pair, batch_of(rows, seed + i))


def test_small_batch_does_not_read_state_of_a_big_one(pair: tuple[ModelRunner, ModelRunner]) -> None:
    replaying, _ = pair
    big, small = decode_batch([40] * 8, seed=1), decode_batch([17, 9, 30], seed=2)
    fill(replaying.pool, 1)
    expected = replaying.forward(small).clone()
    replaying.forward(big)
    fill(replaying.pool, 1)  # of recurrent layers, the first step has changed what it read
    # Poison what only the big batch uses: reading it gives NaN, and writing it makes it finite.
    used = {block for row, n in zip(small.block_tables, (3, 2, 4), strict=True) for block in row[:n].tolist()}
    others = [block for block in big.block_tables.ravel().tolist() if block not in used]
    poisoned = replaying.pool.scales or replaying.pool.codes
    # The scales of int4 are two numbers.
    poisoned = [part.view(torch.bfloat16) if part.dtype == torch.int32 else part for part in poisoned]
    unused = [slot for slot in range(replaying.pool.num_states) if slot not in small.state_indices]
    places = [*((part, others) for part in poisoned), *((part, unused) for part in states_of(replaying.pool))]
    for part, of_others in places:
        part[of_others] = torch.nan
    torch.testing.assert_close(replaying.forward(small), expected)
    assert all(part[of_others].isnan().all() for part, of_others in places)


def growing(contexts: list[int], seed: int) -> DecodeSteps:
    """Return sequences over blocks in random order; five blocks each."""
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
    tables = [blocks[5 * i : 5 * i + 5] for i in range(len(contexts))]
    return DecodeSteps(contexts, tables, block_size=BLOCK_SIZE)


def test_block_tables_grow_in_place_on_the_device(make_pair: MakePair) -> None:
    pair = make_pair(FakeReplays(), "llama")
    for runner in pair:
        fill(runner.pool, 8)
    ours, others = growing([5, 8, 13, 16], seed=1), growing([9, 3, 7], seed=2)
    for step in range(16):
        check_equal(pair, ours.batch())
        if step in (3, 4, 9):
            check_equal(pair, others.batch())  # in the same static inputs
        if step == 7:
            check_equal(pair, ours.batch({1: list(range(8))}))  # two query groups, so the tables of later rows move
        if step == 6:
            unseen = ours.batch()
            for runner in pair:
                runner.forward(unseen, on_layer=lambda layer: None)  # not replayed
        if step == 11:
            del ours.sequences[1]


def test_only_new_block_table_cells_are_uploaded(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[int] = []

    def spy(arrays: Any, device: torch.device) -> list[torch.Tensor]:
        uploaded.append(sum(array.size for array in arrays))
        return upload(arrays, device)

    monkeypatch.setattr(decode_graphs, "upload", spy)
    pair, ours = make_pair(FakeReplays(), "llama"), growing([5, 21, 13, 24], seed=1)
    for _ in range(4):
        pair[0].forward(ours.batch())
    numbers = 7 * 4
    assert uploaded == [numbers + 4 * 3, numbers + 3, numbers, numbers], (
        "expected whole tables first, then the row, column and block of one cell"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_recorded_step_reads_no_host_memory(family: str, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploaded host memory is overwritten before the replay; it has been copied to the static inputs."""
    uploaded: list[torch.Tensor] = []

    def spy(*arguments: Any) -> list[torch.Tensor]:
        uploaded[:] = upload(*arguments)
        return uploaded

    def capture(step: Step) -> Step:
        step()

        def replay() -> None:
            for tensor in uploaded:
                tensor.fill_(-7)
            with monkeypatch.context() as context:
                for name in ("from_numpy", "tensor", "as_tensor"):
                    context.delattr(torch, name)
                step()

        return replay

    monkeypatch.setattr(decode_graphs, "upload", spy)
    pair = make_pair(capture, family, **RECURRENT.get(family, {}))
    for runner in pair:
        fill(runner.pool, 5)
    check_equal(pair, decode_batch([20, 3, 128], seed=5))
    assert uploaded and all((tensor == -7).all() for tensor in uploaded)


def test_which_steps_are_replayed(make_pair: MakePair) -> None:
    capture = FakeReplays()
    pair = make_pair(capture, "llama")

    def is_replayed(batch: Batch, **options: Any) -> bool:
        before = capture.num_replays
        expected = pair[1].forward(batch)
        torch.testing.assert_close(pair[0].forward(batch, **options), expected, atol=1e-4, rtol=1e-4)
        return capture.num_replays > before

    def row(start: int, end: int, *, num_logits: int = 1) -> Row:
        blocks = range(-(-end // BLOCK_SIZE))
        return Row(token_ids=[7] * (end - start), start=start, blocks=blocks, num_logits=num_logits)

    def batch(*rows: Row) -> Batch:
        return Batch.of(rows, block_size=BLOCK_SIZE)

    assert is_replayed(batch(row(0, 1))) and is_replayed(decode_batch([5] * MAX_ROWS, seed=0))
    most = graph_sizes(MAX_ROWS)[-1]
    assert is_replayed(batch(row(4, 8, num_logits=4), row(9, 10))), "draft"
    assert is_replayed(batch(row(4, 5), row(0, most - 1, num_logits=0))), "short chunk"
    assert not is_replayed(batch(row(0, most + 1))), "long chunk"
    assert not is_replayed(batch(row(4, 5)), on_layer=lambda layer: None), "on_layer"
    assert not is_replayed(decode_batch([5] * (most + 1), seed=0)), "too many rows"
    assert not is_replayed(batch(row(MAX_CONTEXT, MAX_CONTEXT + 1))), "too long a table"


def test_rows_that_choose_positions_are_replayed(make_pair: MakePair) -> None:
    """Beside rows that see too few to choose."""
    capture = FakeReplays()
    pair = make_pair(capture, "deepseek_v32", **SPARSE)
    for runner in pair:
        fill(runner.pool, 4)
    check_equal(pair, decode_batch([9, MAX_CONTEXT, 37, 38], seed=1))
    assert capture.num_replays == 1


def test_batch_that_rereads_too_much_kv_is_not_replayed(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens after 50 are two query groups, the first of which reads 58 positions; one group reads its own
    once."""
    for most_bytes, is_replayed in ((1 << 30, True), (0, False)):
        monkeypatch.setattr(graph_replay, "READ_AGAIN_BYTES", most_bytes)
        capture = FakeReplays()
        pair = make_pair(capture, "llama")
        batch = batch_of([(62, 12, 12)], seed=1)
        torch.testing.assert_close(*(runner.forward(batch) for runner in pair), atol=1e-4, rtol=1e-4)
        assert bool(capture.num_replays) is is_replayed
        for once in (decode_batch([62, 9], seed=1), batch_of([(62, 8, 8), (9, 2, 1)], seed=1)):
            before = capture.num_replays
            assert pair[0].forward(once) is not None and capture.num_replays == before + 1


def test_scored_prompt_is_not_replayed(make_pair: MakePair) -> None:
    """No graph returns them."""
    capture = FakeReplays()
    pair = make_pair(capture, "llama")
    row = Row(token_ids=[3, 5, 7], start=0, blocks=[1], num_logits=1)
    batch = Batch.of([row], block_size=BLOCK_SIZE)
    scored = replace(batch, scored_rows=np.array([0, 1]))
    scores = [list[torch.Tensor](), list[torch.Tensor]()]
    for runner, of in zip(pair, scores, strict=True):
        runner.forward(scored, on_logits=of.append)
    assert not capture.num_replays and len(scores[0]) == len(scores[1]) == 1
    torch.testing.assert_close(*(of[0] for of in scores))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        # On a CPU experts are called one by one.
        ("deepseek_v2", DEEPSEEK_V2, "experts"),
        ("mixtral", {}, "experts"),
    ],
)
def test_unrecordable_model_logs_the_reason(
    family: str, changes: dict[str, Any], reason: str, make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    capture = FakeReplays()
    with caplog.at_level(logging.INFO, logger="engine.runner"):
        pair = make_pair(capture, family, **changes)
    assert reason in caplog.text
    batch = decode_batch([5], seed=0)
    torch.testing.assert_close(*(runner.forward(batch) for runner in pair))
    assert not capture.num_replays


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (1,)), (3, (1, 2, 4)), (17, (1, 2, 4, 8, 16, 24)), (64, (1, 2, 4, *range(8, 65, 8)))]
)
def test_sizes(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes and graph_sizes(4096)[-1] == graph_sizes(256)[-1] == 256


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        *quick([("mistral", {"sliding_window": 9})], ()),
        *quick([("deepseek_v3", LATENT), ("deepseek_v32", SPARSE)], ()),
        *quick([("qwen3_5", SMALL_DELTA_NET)], ()),
        ("lfm2", LFM2 | {"num_hidden_layers": 2, "full_attn_idxs": [1]}),
        *quick([("nemotron_h", NEMOTRON_H)], ()),
    ],
)
def test_kernels_launched_in_the_interpreter(
    family: str, changes: dict[str, Any], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run prompts and replayed steps of a whole model with the kernels of a GPU."""
    layers = {} if family in RECURRENT else {"num_hidden_layers": 1}
    replaying, plain = make_pair(FakeReplays(), family, **changes, **layers)
    launch_kernels(monkeypatch)
    prompt = Row(token_ids=[5, 9, 2] * 6, start=4, blocks=[140, 141, 142], num_logits=1, state_index=30)
    single = Row(token_ids=[3], start=11, blocks=[143, 144], num_logits=1, state_index=31)
    mixed = Batch.of([prompt, single], block_size=BLOCK_SIZE)
    for most_queries in {1, replaying._model.most_queries}:
        for runner in (replaying, plain):
            fill(runner.pool, 3)
        with torch.inference_mode():
            on_device, states = (
                DeviceBatch.of(mixed, replaying.device, most_queries=most_queries),
                StepStates.of(mixed, replaying.pool),
            )
            computed = replaying._model.compute(on_device, replaying.pool, states=states)
        torch.testing.assert_close(computed, plain.forward(mixed), atol=1e-4, rtol=1e-4)
    check_equal((replaying, plain), decode_batch([12, 40, 7], seed=4))
    # Drafts, one of them in two query groups. In another, the sliding window of the first query begins a block of keys
    # before the last one's.
    check_equal((replaying, plain), batch_of([(75, 4, 4), (21, 1, 1), (40, 9, 9)], seed=5))


@pytest.mark.parametrize(
    ("sources", "places"), [([0, 1, 2], [0, 1, 2]), ([0, 1], [0, 1]), ([3, 0], [0, 2]), ([2, 1, 0], [0, 1, 2])]
)
def test_device_tokens_equal_chosen_tokens(
    sources: list[int], places: list[int], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying, plain = make_pair(FakeReplays(), "llama")
    fill(replaying.pool, 6), fill(plain.pool, 6)
    batch = decode_batch([5, 9, 30], seed=3)
    chosen_S = torch.tensor([7, -1, 3, 11], dtype=torch.int32)  # the second has failed
    device_tokens = DeviceTokens(token_ids=chosen_S, sources=np.array(sources), places=np.array(places))
    token_ids = batch.token_ids.copy()
    device_tokens.fill(token_ids)
    assert [token_ids[place] for place in places] == [max(0, int(chosen_S[source])) for source in sources]
    expected = plain.forward(replace(batch, token_ids=token_ids))
    monkeypatch.setattr(DeviceTokens, "fill", lambda self, token_ids_T: None)  # the host does not know them
    unknown = replace(batch, device_tokens=device_tokens)
    torch.testing.assert_close(replaying.forward(unknown), expected, atol=1e-4, rtol=1e-4)
    assert DeviceBatch.of(unknown, torch.device("cpu")).token_ids_T.tolist() == token_ids.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("pool_dtype", ["auto", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        ("qwen3", {"head_dim": 64}, "bfloat16"),
        ("qwen3_moe", {}, "float32"),  # less rounding, so that no token chooses other experts
        ("deepseek_v3", DEEPSEEK_V3, "float32"),
        ("deepseek_v32", SPARSE, "float32"),
        *((family, changes, "float32") for family, changes in RECURRENT.items()),
    ],
)
def test_cuda_graphs(family: str, changes: dict[str, Any], dtype: str, pool_dtype: str, make_pair: MakePair) -> None:
    if pool_dtype == "int4" and family.startswith("deepseek"):
        pytest.skip("latents are not stored in int4")
    pair = make_pair(None, family, dtype=dtype, pool_dtype=pool_dtype, device="cuda", **changes)
    assert pair[0]._recorded is not None
    for runner in pair:
        fill(runner.pool, 6)
    for seed, num_rows in enumerate((1, 9, 2, 5, 1, 8)):
        contexts = np.random.default_rng(seed).integers(1, MAX_CONTEXT + 1, num_rows).tolist()
        check_equal(pair, decode_batch(contexts, seed), tolerance=0.25 if dtype == "bfloat16" else 1e-3)
    # A draft to verify, and a short chunk of a prompt.
    check_equal(pair, batch_of([(40, 4, 4), (21, 1, 1), (9, 3, 0)], 7), tolerance=0.25 if dtype == "bfloat16" else 1e-3)


FAMILIES: list[tuple[str, dict[str, Any]]] = [("qwen3_5", DELTA_NET), ("nemotron_h", NEMOTRON_H), ("lfm2", LFM2)]

_STOPS = tuple(range(0, VOCAB_SIZE, 9))


def filled_pair(make_pair: MakePair, capture: Any) -> tuple[ModelRunner, ModelRunner]:
    pair = make_pair(capture, "qwen3_5", **DELTA_NET)
    for runner in pair:
        fill(runner.pool, 5)
    return pair


def row_of(start: int, num_tokens: int, *, state_index: int = 3) -> Row:
    blocks = range(-(-(start + num_tokens) // BLOCK_SIZE))
    return Row(token_ids=[7] * num_tokens, start=start, blocks=blocks, num_logits=num_tokens, state_index=state_index)


def test_rows_of_one_token_are_replayed(make_pair: MakePair) -> None:
    """Drafts and chunks are not: their launches depend on the longest of them."""
    capture = FakeReplays()
    pair = filled_pair(make_pair, capture)
    for batch, is_replayed in (
        (decode_batch([5, 30, 1], seed=0), True),
        (Batch.of([row_of(0, 1)], block_size=BLOCK_SIZE), True),
        (batch_of([(20, 4, 4), (9, 1, 1)], seed=1), False),
        (batch_of([(9, 9, 1)], seed=2), False),
        (decode_batch([5, 30, 1], seed=3), True),
    ):
        before = capture.num_replays
        check_equal(pair, batch)
        assert (capture.num_replays > before) is is_replayed


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_answers_by_replays(
    family: str, changes: dict[str, Any], is_async: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive in chunks, fork, end at unpredictable places and are preempted; drafts are not replayed."""
    monkeypatch.setattr(sampler, "choose_by_torch", lambda *given: choose_by_torch(*given).to(torch.int32))
    capture = FakeReplays()
    replaying, plain = make_pair(capture, family, **changes)
    asked = [
        Asked(prompt, Sampling(temperature=0.9, seed=i, max_tokens=20, stop_token_ids=stops), num_choices=1 + i % 2)
        for i, (prompt, stops) in enumerate(zip(prompts(9, 20, 30, 14), ((), _STOPS, (), _STOPS), strict=True))
    ]
    limits = SchedulerConfig(max_batch_tokens=9, max_running=8, max_waiting=9)
    expected = answers(plain, asked, limits, num_blocks=12)
    found = answers(replaying, asked, limits, num_blocks=12, is_async=is_async)
    assert found.ids == expected.ids and found.num_preemptions and capture.num_replays > 9
    assert bool(found.num_device_tokens) is is_async
    proposer = FakeProposer(Oracle(expected, asked, lambda position: position % 5 > 0))
    speculation = Speculation({"oracle": proposer}, max_tokens=3, vocab_size=VOCAB_SIZE, backs_off=False)
    drafted = answers(replaying, asked, limits, num_blocks=40, is_async=is_async, speculation=speculation)
    assert drafted.ids == expected.ids and drafted.num_accepted


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_from_checkpoints(is_async: bool, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests share prefixes with earlier prompts and answers, arrive one by one, and some leave early."""
    monkeypatch.setattr(sampler, "choose_by_torch", lambda *given: choose_by_torch(*given).to(torch.int32))
    replaying, plain = make_pair(FakeReplays(), "qwen3_5", **DELTA_NET)
    sampling, (prompt, *others) = Sampling(temperature=0.0, max_tokens=30), prompts(20, 9, 26)
    (answer,) = answers(plain, [Asked(prompt, sampling)]).ids
    texts = [prompt + answer[:length] for length in (0, 9, 20, 29)]
    texts += [other[:17] + prompt for other in others] + others
    asked = [Asked(text, sampling, num_choices=1 + i % 2) for i, text in enumerate(texts)]
    expected = answers(plain, asked)
    blocks = BlockManager(60, num_states=replaying.pool.num_states)
    assert blocks.states
    blocks.states.interval = BLOCK_SIZE
    hits: list[bytes] = []
    take = blocks.states.take

    def noted(prefix_hash: bytes | None = None) -> int:
        hits.extend([prefix_hash] if prefix_hash else [])
        return take(prefix_hash)

    monkeypatch.setattr(blocks.states, "take", noted)
    for _ in range(2):
        check_with_leavers(replaying, asked, expected, None, blocks=blocks, is_async=is_async)
    assert len(hits) > 6
