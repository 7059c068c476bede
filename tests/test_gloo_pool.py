# SPDX-License-Identifier: Apache-2.0
"""Calls on a pool of ranks return, fail, hang and die as the tests of distributed training need it."""

import os
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from gloo_pool import Hang, Launcher, Pool, RanksFailed
from torch import nn

import torch_privacy as tp


@pytest.fixture
def own_ranks(launcher: Launcher):
    """Two ranks that a test may kill."""
    with launcher.pool(2) as pool:
        yield pool


def summed(rank: int, number: int) -> tuple[int, int, str]:
    total = torch.tensor(rank + number)
    dist.all_reduce(total)
    return rank, int(total), os.environ["RANK"]


def test_a_call_runs_on_every_rank_of_a_process_group(ranks2: Pool):
    assert ranks2.run(summed, 10) == [(0, 21, "0"), (1, 21, "1")]


def failing_on_rank_1(rank: int):
    if rank == 1:
        raise ValueError("a reason")
    return "fine"


def test_an_exception_comes_back_with_its_traceback(ranks2: Pool):
    fine, failed = ranks2.outcomes(failing_on_rank_1)
    assert (fine.value, fine.failed) == ("fine", False)
    assert (failed.kind, failed.text) == ("ValueError", "a reason")
    assert "in failing_on_rank_1\n    raise ValueError" in failed.traceback
    with pytest.raises(RanksFailed, match=r"rank 0 returned 'fine'\nrank 1 Traceback"):
        ranks2.run(failing_on_rank_1)


def refusing(rank: int, texts: list[str]):
    raise tp.Refused(texts[rank])


def test_a_refusal_must_be_the_same_on_all_ranks(ranks2: Pool):
    assert ranks2.refusal(refusing, ["no", "no"]) == "no"
    with pytest.raises(RanksFailed):
        ranks2.refusal(refusing, ["no", "never"])
    for no_refusal in failing_on_rank_1, keys:
        with pytest.raises(RanksFailed):
            ranks2.refusal(no_refusal)


def waiting_for_rank_1(rank: int):
    if rank == 0:
        dist.barrier()
    return "did not wait"


@pytest.mark.thorough
def test_a_hang_shows_the_stack_of_each_rank_and_later_calls_run(own_ranks: Pool):
    with pytest.raises(Hang) as caught:
        own_ranks.run(waiting_for_rank_1, timeout=1)
    text = str(caught.value)
    assert "did not end within 1 seconds" in text
    assert "in waiting_for_rank_1" in text
    assert "rank 1 returned 'did not wait'" in text
    assert own_ranks.run(summed, 1) == [(0, 3, "0"), (1, 3, "1")]


def dying(rank: int):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_replaced(own_ranks: Pool):
    first, died = own_ranks.outcomes(dying)
    assert died.exit_code == 7
    assert first.kind == "RuntimeError"  # gloo's
    assert own_ranks.run(summed, 1) == [(0, 3, "0"), (1, 3, "1")]


def leaving_a_collective_open(rank: int):
    if rank == 0:
        dist.isend(torch.ones(1), 1)
        raise ValueError("rank 1 never takes it")


def test_a_collective_that_is_left_open_does_not_reach_the_next_call(ranks2: Pool):
    ranks2.outcomes(leaving_a_collective_open)
    assert ranks2.run(summed, 1) == [(0, 3, "0"), (1, 3, "1")]


def failing_hook(*_: object) -> None:
    raise AssertionError("a hook of another test")


def leaving_traces(rank: int):
    nn.modules.module.register_module_forward_hook(failing_hook)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    torch.manual_seed(99)
    random.seed(99)


def state(rank: int):
    nn.Linear(1, 1)(torch.ones(1))
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.rand(1).item(), rank


def warning(rank: int):
    warnings.warn("a warning", stacklevel=1)


def test_a_call_begins_with_the_state_of_every_test(ranks2: Pool):
    before = ranks2.run(state)
    ranks2.run(leaving_traces)
    assert ranks2.run(state) == before
    here = state(0)
    assert before == [here, (*here[:-1], 1)]
    assert [outcome.kind for outcome in ranks2.outcomes(warning)] == ["UserWarning"] * 2
    warnings.filterwarnings("ignore", message="a warn")
    assert [outcome.kind for outcome in ranks2.outcomes(warning)] == ["", ""]


def hashed(rank: int):
    return hash("a string")


def test_ranks_hash_strings_in_different_ways(ranks2: Pool):
    assert len(set(ranks2.run(hashed))) == 2


def keys(rank: int):
    import secrets

    return secrets.token_bytes(8)


def test_ranks_draw_different_keys_in_every_call(ranks2: Pool):
    assert len({*ranks2.run(keys), *ranks2.run(keys)}) == 4
