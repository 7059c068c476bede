# SPDX-License-Identifier: Apache-2.0
"""A log that leaves out rehearsals and stand-ins counts each example of a batch once, on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainings import cross_entropy, network, training_of


def gathered(value: bool) -> list[bool]:
    if not dist.is_initialized():
        return [value]
    found: list[bool] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def logged(rank: int, wrap: bool = True) -> list[int]:
    """Returns the number of examples of every turn that is no rehearsal."""
    model = DistributedDataParallel(network()) if wrap else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = training_of(model, optimizer=optimizer, expected_batch_size=1, num_steps=12)
    sizes = []
    for x, y in training:
        training.step(cross_entropy(model, x, y))
        assert len({*gathered(training.rehearsing)}) == 1
        if not training.rehearsing and not training.stands_in:
            sizes.append(len(y))
    return sizes


@pytest.mark.thorough
def test_stand_ins_are_told_apart_and_rehearsals_are_those_of_all_ranks(ranks2):
    first, second = ranks2.run(logged)
    alone = logged(0, wrap=False)
    assert sum(first) + sum(second) == sum(alone)
    assert len(second) < len(alone), "some batches have one example, and rank 1 has none of it"
