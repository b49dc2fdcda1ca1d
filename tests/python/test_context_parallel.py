"""Context parallelism over torch process groups of gloo. context_parallel_ranks.py has the cases."""

import copy
import gc
import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch has no torch.distributed", allow_module_level=True)

import context_parallel_ranks  # noqa: E402
import tandem  # noqa: E402

SCRIPT = pathlib.Path(__file__).with_name("context_parallel_ranks.py")


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"{ranks} ranks")
def errors(request, tmp_path_factory):
    """The errors of each rank by case."""
    folder, ranks = tmp_path_factory.mktemp("group"), request.param
    files = [folder / f"errors-{rank}.json" for rank in range(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", SCRIPT, str(rank), str(ranks), folder / "group", file],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(file.exists() for file in files), "\n".join(outputs)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", context_parallel_ranks.CASES, ids=lambda case: case.__name__)
def test_on_ranks(errors, case):
    for rank, results in enumerate(errors):
        assert results.get(case.__name__, "not run") == "", f"rank {rank}: {results.get(case.__name__, 'not run')}"


def test_plans_refuse_wrong_arguments():
    with pytest.raises(ValueError, match=r"layout \('best'\) must be one of balanced"):
        tandem.ContextPlan([4], 2, layout="best")
    with pytest.raises(ValueError, match=r"ranks \(0\) must be between"):
        tandem.ContextPlan([4], 0)
    blocks = tandem.Blocks.of("k <= q", 16, 16, BLOCK_SIZE=(8, 8))
    with pytest.raises(ValueError, match=r"args.chunk \(12\) must be a multiple of block_q \(8\)"):
        tandem.ContextPlan([16], 2, chunk=12, blocks=blocks)
    with pytest.raises(ValueError, match=r"blocks.kv_indices \(2 rows\) must have a row for each block"):
        tandem.ContextPlan([16, 17], 2, blocks=blocks)
    with pytest.raises(ValueError, match="that all heads share"):
        tandem.ContextPlan([16], 2, blocks=tandem.Blocks.of("k <= q + head", 16, 16, heads=2, BLOCK_SIZE=(8, 8)))
    with pytest.raises(TypeError, match="seqlens .* must be a list of integers"):
        tandem.ContextPlan([1.5], 2)
    with pytest.raises(ValueError, match=r"seqlens_k \(2 lengths\) must have the 1 documents"):
        tandem.ContextPlan([4], 2, seqlens_k=[3, 4])
    plan = tandem.ContextPlan([4, 3], 2)
    with pytest.raises(ValueError, match=r"rank \(2\) must be below 2"):
        plan.positions(2)
    with pytest.raises(ValueError, match=r"x.shape\[0\] \(6\) must be the 7 tokens"):
        plan.shard(np.zeros(6), 0)
    with pytest.raises(ValueError, match=r"shards \(1\) must be one for each of the 2 ranks"):
        plan.unshard([np.zeros(4)])
    with pytest.raises(ValueError, match=r"shards\[0\].shape\[0\] \(7\) must be the"):
        plan.unshard([np.zeros(7), np.zeros(0)])
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match="init_process_group"):
        tandem.context_parallel(x, x, x, plan=plan)


def test_plans_are_equal_if_their_arguments_are():
    plan = tandem.ContextPlan([9, 4], 2, causal=True)
    assert plan.hash == tandem.ContextPlan(np.array([9, 4]), 2, causal=True).hash
    assert plan.hash != tandem.ContextPlan([9, 4], 2, causal=True, chunk=2).hash
    assert repr(plan) == "ContextPlan(2 documents, 13 tokens, 2 ranks, layout='balanced', chunk=0)"
    assert sum(plan.rows(rank)[0] for rank in range(2)) == 13


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_own_their_plan(copied):
    mask = {"blocks": tandem.Blocks.of("k <= q", 9, 9, BLOCK_SIZE=(4, 4)), "causal": True, "window": (3, 0)}
    plan = tandem.ContextPlan([7, 9], 2, seqlens_k=[8, 9], layout="zigzag", chunk=4, **mask)
    facts = plan.hash, [plan.rows(rank) for rank in range(2)]
    other = copied(plan)
    del plan
    gc.collect()
    assert (other.hash, [other.rows(rank) for rank in range(2)]) == facts and other.window == (3, 0)


def test_executions_are_chosen_by_predicted_time():
    from tandem._context_choice import Link, Shapes, chosen, predicted

    shapes = Shapes(heads_q=32, heads_k=32, head_dim=128, head_dim_v=128)
    causal = {ranks: tandem.ContextPlan([65536], ranks, causal=True) for ranks in (1, 2, 4)}
    alone = predicted(causal[1], shapes)
    assert alone["gather"] == alone["ring"] == alone["heads"]
    # Without messages, all executions compute a half of the pairs on each of two ranks.
    free = Link(latency=0.0, gather=1e30, ring=1e30, merges=1e30)
    for seconds in predicted(causal[2], shapes, free).values():
        assert seconds == pytest.approx(alone["gather"] / 2, rel=0.01)
    slow = Link(latency=0.0, gather=1e9, ring=1e9)
    times = predicted(causal[2], shapes, slow)
    # The keys of half of the sequence, the slowest rank's, take longer than its own keys.
    assert times["gather"] > 32768 * 32 * 256 * 2 / 1e9
    # A window moves few keys, but the execution by heads moves all tokens.
    window = tandem.ContextPlan([65536], 2, causal=True, window=(1024, None), layout="contiguous")
    times = predicted(window, shapes, slow)
    assert times["gather"] < 0.1 * times["heads"]
    assert chosen(window, shapes) != "heads"
    # One key head of many query heads is cheaper to move than the queries.
    assert chosen(causal[4], Shapes(64, 1, 128, 128)) != "heads"
    # Short sequences on a link without latency for all peers: the ring waits for each round.
    short = predicted(tandem.ContextPlan([4096], 4), shapes, Link(latency=1e-3))
    assert short["ring"] > short["gather"]


def test_copies_make_the_execution_by_heads_faster():
    from tandem._context_choice import Shapes, chosen, predicted
    from tandem._context_copies import parts_of

    shapes, documents = Shapes(heads_q=32, heads_k=32, head_dim=128, head_dim_v=128), [6000, 200, 3000, 7184]
    causal = {n: tandem.ContextPlan([n], 2, causal=True) for n in (16384, 65536)}
    window = tandem.ContextPlan([65536], 2, causal=True, window=(1024, None))
    for plan in causal.values():
        assert chosen(plan, shapes, True) == "heads"
    for plan, of_plan in ((window, shapes), (tandem.ContextPlan(documents, 2, causal=True), Shapes(64, 8, 128, 128))):
        assert chosen(plan, of_plan, True) == chosen(plan, of_plan) == "gather"
    assert parts_of(64 << 20, 0.02, 4) == (1, 2, 1)
    assert parts_of(63 << 20, 0.02, 4) == parts_of(64 << 20, 0.01, 4) == parts_of(64 << 20, 0.02, 3) == (1,)
    slow, fast = (predicted(causal[65536], shapes, has_copies=x) for x in (False, True))
    assert fast["heads"] < slow["heads"] and fast["gather"] == slow["gather"]
    # Milliseconds of both passes on two H200.
    for plan, measured in ((causal[16384], (7.7, 7.8, 6.8)), (causal[65536], (102.8, 103.3, 104.0))):
        seconds = predicted(plan, shapes, has_copies=True)
        for name, time in zip(("gather", "ring", "heads"), measured):
            assert 1e3 * seconds[name] == pytest.approx(time, rel=0.1)


def test_copies_are_assumed_until_they_are_opened(monkeypatch):
    from tandem import _context_copies

    class Group:
        pass

    group, device = Group(), torch.device("cuda", 0)
    monkeypatch.setattr(_context_copies.dist, "get_world_size", lambda _: 16)
    assert _context_copies.is_served(group, device) and not _context_copies.is_served(group, torch.device("cpu"))
    _context_copies._copies[group] = {device: None}
    assert not _context_copies.is_served(group, device)
    monkeypatch.setattr(_context_copies, "MOST_RANKS", 15)
    assert not _context_copies.is_served(Group(), device)


def _pairs(calls, q_rows, k_rows):
    """The number of calls that compute each pair of a query row and a key row."""
    count = np.zeros((q_rows, k_rows), int)
    for step in (step for call in calls for step in call.steps):
        distance = np.arange(step.k_row, step.k_end)[None] - np.arange(step.q_row, step.q_end)[:, None]
        least, greatest = step.lines
        visible = np.ones_like(distance, bool) if least is None else distance >= least
        visible &= True if greatest is None else distance <= greatest
        assert visible.sum() == step.pairs
        count[step.q_row : step.q_end, step.k_row : step.k_end] += visible
    return count


@pytest.mark.parametrize("layout", ["balanced", "contiguous", "zigzag", "per_document", "striped"])
def test_calls_compute_each_pair_once(layout):
    from tandem._context_calls import Schedule, steps_of

    random = np.random.default_rng(7)
    for n in range(24):
        ranks, lengths = int(random.integers(1, 5)), random.integers(0, 300, random.integers(1, 4))
        mask = [{}, {"causal": True}, {"causal": True, "window": (40, None)}, {"window": (30, 20)}][n % 4]
        plan = tandem.ContextPlan(lengths, ranks, layout=layout, **mask)
        for rank in range(ranks):
            is_dense = n % 3 == 0
            schedule = Schedule(plan, rank, 1 + n % 3, is_dense or n % 5 == 0, 1 + n % 2, is_dense)
            calls = [call for batch in schedule.batches for call in [*batch.calls, *batch.direct, *batch.first]]
            assert not is_dense or not any(call.is_packed for call in calls)
            for batch in schedule.batches:
                expected = _pairs(batch.calls, schedule.q_rows, batch.rows)
                assert expected.max(initial=0) <= 1
                forward = [*batch.direct, *(call for part in batch.parts for call in part)]
                assert np.array_equal(_pairs(forward, schedule.q_rows, batch.rows), expected)
                if batch.peers == [rank]:
                    backward = [*batch.first, *batch.last] if ranks > 1 else batch.calls
                    assert np.array_equal(_pairs(backward, schedule.q_rows, batch.rows), expected)
            total = sum(step.pairs for batch in schedule.batches for step in batch.steps)
            assert total == sum(step.pairs for peer in range(ranks) for step in steps_of(plan, rank, peer))


def test_zigzags_need_few_calls():
    from tandem._context_calls import Schedule

    plan = tandem.ContextPlan([16384], 2, causal=True)
    for rank, shape in ((0, (4096, 8192)), (1, (8192, 4096))):
        own, other = Schedule(plan, rank, 1, False, 1).batches
        assert [(call.is_packed, call.window) for call in own.calls] == [(False, (None, 0))]
        assert [(c.q_end - c.q_begin, c.k_end - c.k_begin, c.window) for c in other.calls] == [(*shape, (None, None))]
    # A window's own queries have one call that needs no merge, and another for the queries with other keys.
    plan = tandem.ContextPlan([16384], 2, causal=True, window=(512, None))
    own, other = Schedule(plan, 1, 1, False, 1).batches
    assert [(call.q_begin, call.q_end) for call in own.direct] == [(512, 8192)]
    assert [[(call.q_begin, call.q_end) for call in part] for part in own.parts] == [[(0, 512)]]
    assert other.rows == 512
    # The backward stores dk and dv directly, except the ones of keys that another rank reads.
    for rank, expected in ((0, [True, False]), (1, [True, True])):
        own = Schedule(plan, rank, 1, False, 1).batches[0]
        assert [call.owns_keys for call in [*own.first, *own.last]] == expected
    # Documents of one rank have their own call, which needs no sum.
    own = Schedule(tandem.ContextPlan([30, 5, 80, 20, 12, 7, 10], 2, causal=True), 0, 1, False, 1).batches[0]
    assert [(call.owns_queries, call.owns_keys) for call in own.last] == [(True, True), (False, True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("large", [1 << 22, 500])
def test_steps_of_chunks_do_not_depend_on_ranks(ranks, large, monkeypatch):
    from tandem import _context_chunks
    from tandem._context_chunks import ChunkSchedule, chunk_steps

    monkeypatch.setattr(_context_chunks, "_LARGE", large)
    mask = {"causal": True, "window": (70, None)}
    lengths = [300, 0, 7, 129]
    names = ("document", "q_order", "k_order", "q_begin", "k_begin", "diagonal", "left", "right", "pairs")

    def of(plan):
        steps = [step for rank in range(plan.ranks) for step in chunk_steps(plan, rank)]
        return sorted([*(getattr(step, name) for name in names), step.q_end - step.q_row, step.k_end] for step in steps)

    for layout in ("balanced", "striped"):
        plan = tandem.ContextPlan(lengths, ranks, chunk=16, layout=layout, **mask)
        assert of(plan) == of(tandem.ContextPlan(lengths, 1, chunk=16, **mask))
        for rank in range(ranks):
            schedule = ChunkSchedule(plan, rank)
            calls = [*schedule.first, *schedule.others, *schedule.last]
            assert sum(len(call.steps) for call in calls) == len(chunk_steps(plan, rank))


def test_large_steps_of_chunks_have_no_mask_where_all_keys_are_visible():
    from tandem._context_chunks import ChunkSchedule

    plan = tandem.ContextPlan([65536], 2, causal=True, chunk=4096)
    for rank in range(2):
        schedule = ChunkSchedule(plan, rank)
        calls = [*schedule.first, *schedule.others, *schedule.last]
        assert all(not call.is_packed and len(call.steps) == 1 for call in calls)
        # The chunk on the diagonal is the only step with a mask.
        assert sorted(call.steps[0].q_order for call in calls if call.window != (None, None)) == sorted(
            {call.steps[0].q_order for call in calls}
        )


def test_places_of_copies_are_equal_on_all_ranks_and_disjoint():
    from tandem import _context_copies, _context_heads
    from tandem._context_execution import Execution
    from tandem._context_head_messages import Wire

    device, heads, layouts = torch.device("cpu"), (12, 6), []
    wires = tuple(
        tuple(Wire(kind, torch.float32, torch.Size(shape)) for kind, shape in wire)
        for wire in (((0, [8]), (1, [8]), (1, [12])), ((0, [12]), (0, [])))
    )
    for rank in range(3):
        execution = Execution(tandem.ContextPlan([41, 0, 26], 3, causal=True), rank, None, 1, {})
        exchange = _context_heads._Exchange(execution, heads, device, wires, (1, 1))
        assert exchange.copies is None and len(exchange.groups) == 2  # CPU tensors without a group
        layouts.append(exchange._layout(wires))
        rows = [exchange.rows(kind).counts for kind in (0, 1)]
    layout = layouts[0]
    assert all(x.places == layout.places and x.sizes == layout.sizes for x in layouts)
    # To heads travel rows of the sender for the receiver's heads: two query heads and one key head in each group.
    assert len(layout.sizes) == 4
    for sender in range(3):
        q, k = rows[0][sender] * 2 * 32, rows[1][sender] * (32 + 48)
        assert layout.sizes[0][sender][(sender + 1) % 3] == q + k
        out, lse = rows[0][sender] * 2 * 48, rows[0][sender] * 2 * 4
        assert layout.sizes[2][(sender + 1) % 3][sender] == out + -(-lse // 16) * 16
        assert layout.sizes[0][sender][sender] == 0
    for receiver in range(3):
        regions = sorted(
            (layout.places[message][sender][receiver], layout.sizes[message][sender][receiver])
            for message in range(4)
            for sender in range(3)
        )
        assert all(a + count <= b for (a, count), (b, _) in zip(regions, regions[1:]))
        assert all(place % 256 == 0 for place, _ in regions) and sum(regions[-1]) <= layout.bytes
    assert _context_copies.Layout([]).bytes == 0


def test_copies_need_rows_that_an_engine_can_read():
    from tandem._context_copies import NARROW_BYTES, strip_of

    x, one = torch.zeros(6, 4, NARROW_BYTES // 4), slice(1, 2)
    assert strip_of(x, one) == (x.data_ptr() + NARROW_BYTES, 4 * NARROW_BYTES, NARROW_BYTES, 6)
    assert strip_of(x[:, 1:], slice(0, 3)) == (x.data_ptr() + NARROW_BYTES, 4 * NARROW_BYTES, 3 * NARROW_BYTES, 6)
    assert strip_of(x[..., 0].contiguous(), slice(0, 4))[1:] == (16, 16, 6)  # narrow, but contiguous
    assert strip_of(x[:, :, 1:], one) is None and strip_of(x.transpose(1, 2), one) is None
    assert strip_of(x[:, :, : NARROW_BYTES // 8].contiguous(), one) is None  # narrow
    assert strip_of(x[:1].expand(6, 4, NARROW_BYTES // 4), one) is None


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_copies_need_a_group_that_ends_lost_ranks(monkeypatch, name):
    from tandem._context_copies_cuda import _ends_lost_ranks

    for variable in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT"):
        for prefix in ("TORCH_NCCL_", "NCCL_"):
            monkeypatch.delenv(prefix + variable, raising=False)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group)
    assert _ends_lost_ranks("cpu:gloo,cuda:nccl") and not _ends_lost_ranks("cpu:gloo,cuda:gloo")
    for handling, serves in (("0", False), ("1", True), ("2", False), ("3", True)):
        monkeypatch.setenv(name, handling)
        assert _ends_lost_ranks("cuda:nccl") == serves
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert not _ends_lost_ranks("cuda:nccl")


def test_shards_have_gradients():
    plan = tandem.ContextPlan([9, 4], 3, seqlens_k=[5, 2])
    x = torch.zeros(7, 2, requires_grad=True)
    shards = [plan.shard(x, rank, keys=True) for rank in range(3)]
    plan.unshard(shards, keys=True).sum().backward()
    assert torch.equal(x.grad, torch.ones(7, 2))


def test_varlen_drop_ins_refuse_rows_of_no_sequence():
    from tandem import ring_flash_attn

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        q = torch.randn(16, 2, 8)
        for name in ("ring", "zigzag_ring"):
            function = getattr(ring_flash_attn, f"{name}_flash_attn_varlen_func")
            with pytest.raises(ValueError, match="rows"):
                function(q, q, q, torch.tensor([0, 9], dtype=torch.int32), 9)
        out = ring_flash_attn.ring_flash_attn_varlen_func(q, q, q, torch.tensor([0, 9, 16], dtype=torch.int32), 9)
        assert out.shape == q.shape
    finally:
        torch.distributed.destroy_process_group()


def test_the_program_for_several_gpus_tries_every_case_on_cpus():
    program = pathlib.Path(__file__).parents[2] / "tools/gpu/context_parallel.py"
    arguments = ["--cpu", "--ranks", "2", "--only", "check,options,copies,transports", "--seconds", "120"]
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if "ok   " in line or "WRONG" in line]
    assert done.returncode == 0 and len(lines) == 89, done.stdout + done.stderr
