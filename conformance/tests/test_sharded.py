"""Ranks: caches are loaded on another number of ranks; over torch.distributed, ranks that are slow or killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvref
from kvref.errors import RankLost
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import all_checks

HEADS, DIM, TOKENS = 4, 3, 16
SIZES = {"num_kv_heads": HEADS, "head_dim": DIM, "num_blocks": 4, "dtype": "float32"}


def tokens(count=TOKENS, seed=0):
    keys, values = np.random.default_rng(seed).normal(size=(2, count, HEADS, DIM)).astype(np.float32)
    return keys, values


def paged():
    cache = kvref.PagedCache(kvref.PagedConfig(num_blocks=8, block_size=4, num_layers=1, num_kv_heads=HEADS, head_dim=DIM))
    return cache, cache.create()


def of_one_rank(sharded, rank, path):
    """Save one rank's part as a paged cache with the rank's heads and tokens, which are one range here."""
    heads, positions = sharded.heads(rank), sharded.positions(rank)
    rows = np.full((2, TOKENS, HEADS, DIM), 77, np.float32)
    rows[np.ix_((0, 1), positions, heads)] = np.stack(sharded.read_rank(rank))
    cache, sequence = paged()
    cache.write(sequence, 0, 0, *rows)
    span = {"heads": [heads[0], heads[-1] + 1], "tokens": [positions[0], positions[-1] + 1]}
    kvref.save(cache, path, sequence, **span)


@pytest.mark.parametrize(("rows", "columns"), [(4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize(("fewer_rows", "fewer_columns"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_what_four_ranks_saved_two_load(tmp_path, rows, columns, fewer_rows, fewer_columns, order):
    """Split by heads, by tokens, and by both: nothing is loaded before the last part, and then everything is."""
    four = kvref.ShardedCache(kvref.ShardedConfig(**SIZES, head_ranks=rows, token_ranks=columns, block_size=TOKENS // columns))
    keys, values = tokens()
    four.append(keys, values)
    whole, sequence = paged()
    for rank in order:
        assert whole.length(sequence, 0) == 0
        of_one_rank(four, rank, tmp_path / f"{rank}.safetensors")
        kvref.load(whole, tmp_path / f"{rank}.safetensors", sequence)
    assert whole.length(sequence, 0) == TOKENS
    two = kvref.ShardedCache(kvref.ShardedConfig(**SIZES, head_ranks=fewer_rows, token_ranks=fewer_columns, block_size=4))
    two.append(*whole.gather(sequence, 0))
    for rank in range(2):
        at = np.ix_(two.positions(rank), two.heads(rank))
        for part, given in zip(two.read_rank(rank), (keys, values), strict=True):
            np.testing.assert_array_equal(part, given[at])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_check_of_its_own_is_asked_of_who_has_everything():
    """No check is skipped because its sizes are replaced, as an odd number of heads once was."""
    judge = CheckRunner(OnBackend(kvref.backend("numpy")), Effort())
    checks = [check for check in all_checks() if check.family == "sharded" and check.run and check.clause.startswith("SHARD")]
    asked = {check.name: judge.judge_check(check) for check in checks}
    assert {name: outcome for name, outcome in asked.items() if getattr(outcome, "verdict", "failed") != "passed"} == {}


def made(kind="Grid", delays=None, **changes):
    from kvref_adapters.torch import distributed

    sizes = {"head_ranks": 2, "token_ranks": 2, "block_size": 2} | changes
    implementation = getattr(distributed, f"TorchDistributed{kind}")(delays)
    return implementation, implementation.sharded(**SIZES, **sizes)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["Grid", "Heads", "Tokens"])
def test_two_to_four_processes_are_one_cache(kind):
    implementation, _ = made(kind, **{"Grid": {}, "Heads": {"token_ranks": 1}, "Tokens": {"head_ranks": 1}}[kind])
    judge = CheckRunner(implementation, Effort(examples=3))
    found = {
        clause.id: verdict_of(judge.judge_clause([check for check in checks if check.family == "sharded" and not check.real]))
        for clause, checks in select_checks(family="sharded").items()
        if clause.id != "LAW-18"
    }
    assert {clause for clause, verdict in found.items() if verdict == "failed"} == set()
    assert {f"SHARD-0{number}" for number in range(1, 5)} <= {clause for clause, verdict in found.items() if verdict == "passed"}


@pytest.mark.torch
def test_a_rank_that_is_late_changes_nothing():
    keys, values = tokens(7)
    query = np.random.default_rng(1).normal(size=(2, 2 * HEADS, DIM)).astype(np.float32)
    seen = []
    for delays in ({}, {2: 0.05}):
        implementation, cache = made(delays=delays)
        for part in (slice(0, 3), slice(3, 7)):
            cache.append(implementation.asarray(keys[part]), implementation.asarray(values[part]))
        ranks = [[cache.positions(rank), cache.block_table(rank), *map(implementation.to_numpy, cache.read_rank(rank))]
                 for rank in range(4)]  # fmt: skip
        seen.append((ranks, implementation.to_numpy(cache.attend(implementation.asarray(query), 0.5))))
    np.testing.assert_array_equal(seen[0][1], seen[1][1])
    for once, late in zip(seen[0][0], seen[1][0], strict=True):
        for one, other in zip(once, late, strict=True):
            np.testing.assert_array_equal(one, other)


def killing(cache, rank, after):
    """A timer that kills a rank's process."""
    timer = threading.Timer(after, os.kill, (cache._world.processes[rank].pid, signal.SIGKILL))
    timer.start()


@pytest.mark.torch
@pytest.mark.parametrize("call", ["append", "attend"])
def test_a_process_that_is_killed_while_others_wait_for_it_is_a_rank_lost(call):
    """Killed inside the call: no hang, and the remaining ranks keep their contents."""
    implementation, cache = made(delays={3: 1.0})
    keys, values = map(implementation.asarray, tokens(5))
    cache.append(keys, values)
    held = [cache.positions(rank) for rank in range(3)]
    begun = time.monotonic()
    killing(cache, 3, after=0.3)
    waiting = {"append": lambda: cache.append(keys, values), "attend": lambda: cache.attend(keys[:2], 0.5)}[call]
    with pytest.raises(RankLost):
        waiting()
    assert time.monotonic() - begun < 8
    assert cache.length == 5
    assert [cache.positions(rank) for rank in range(3)] == held
    with pytest.raises(RankLost):
        cache.read()


@pytest.mark.torch
def test_an_append_that_all_were_ready_for_has_happened():
    """A rank that is killed after all ranks acknowledged and before any has written (SHARD-04)."""
    implementation, cache = made()
    keys, values = map(implementation.asarray, tokens(5))
    cache.append(keys, values)
    decided = cache._decided

    def killed_before(name):
        os.kill(cache._world.processes[3].pid, signal.SIGKILL)
        cache._world.processes[3].join()
        decided(name)

    cache._decided = killed_before
    cache.append(keys, values)
    assert cache.length == 10
    assert [cache.positions(rank) for rank in range(3)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7], [0, 1, 4, 5, 8, 9]]
    for part, given in zip(cache.read_rank(0), (keys, values), strict=True):
        np.testing.assert_array_equal(part, np.concatenate([given, given])[np.ix_(cache.positions(0), cache.heads(0))])
    with pytest.raises(RankLost):
        cache.append(keys, values)
    assert cache.length == 10


@pytest.mark.torch
def test_a_truncate_is_done_by_who_is_left():
    implementation, cache = made(delays={3: 1.0})
    cache.append(*map(implementation.asarray, tokens(5)))
    killing(cache, 3, after=0.3)
    cache.truncate(3)
    assert cache.length == 3
    assert [cache.positions(rank) for rank in range(3)] == [[0, 1], [2], [0, 1]]
    with pytest.raises(RankLost):
        cache.truncate(1)
    assert [cache.positions(rank) for rank in range(3)] == [[0, 1], [2], [0, 1]]


@pytest.mark.jax
def test_a_mesh_of_devices_is_one_cache():
    """In a process of its own, because XLA_FLAGS must be set before JAX initializes."""
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "jax-sharded", "--family", "sharded"]
    done = subprocess.run([*command, "--examples", "3", "--timeout", "60"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"SHARD Many devices +4 +· +·", done.stdout), done.stdout


@pytest.mark.torch
def test_who_is_killed_between_two_calls_keeps_nobody_waiting():
    implementation, cache = made()
    keys, values = map(implementation.asarray, tokens(5))
    process = cache._world.processes[1]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    begun = time.monotonic()
    with pytest.raises(RankLost):
        cache.append(keys, values)
    assert time.monotonic() - begun < 4  # not the 5 s after which a rank stops waiting for another
    assert cache.length == 0


@pytest.mark.torch
def test_the_file_by_which_processes_meet_is_gone_once_they_have_met():
    _, cache = made()
    assert not Path(cache._world.folder.name).exists()
    assert len(cache.positions(3)) == 0
