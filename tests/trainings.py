# SPDX-License-Identifier: Apache-2.0
"""Provides a small private training for tests, and its noise, rows and parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import one_backward_per_example
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.mechanisms.sums import COUNT
from torch_privacy.sampling.samplers import PoissonSampler

N = 40
ZERO_OUT = tp.privacy.NeighboringRelation.REPLACE_SPECIAL  # of every training


def data(n=N):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, torch.randint(2, (n,), generator=generator))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def training_of(model=None, dataset=None, optimizer=None, **settings):
    model = model or network()
    settings = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0} | settings
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return private_training(model, optimizer, data() if dataset is None else dataset, test_seed=5, **settings)


def private_training(model, optimizer, dataset, examples=None, **settings):
    """Returns a training; ``examples`` are arguments of `tp.Examples`, besides the data set."""
    dataset = dataset if examples is None else tp.Examples(dataset, **examples)
    return tp.PrivateTraining(model, optimizer, dataset, **settings)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def train(training, steps=None, losses=cross_entropy):
    """Trains to the end or to this step; returns the examples (first column of x) of each batch but rehearsals."""
    seen = []
    for x, y in training:
        training.step(losses(training.model, x, y))
        if not training.rehearsing:
            seen.append(x[:, 0].tolist())
        if steps is not None and training.step_count >= steps:
            break
    return seen


def cross_entropy_of_pair(model, pair):
    return F.cross_entropy(model(pair[0]), pair[1], reduction="none")


def noise_of(training, step):
    """Returns the standard normal numbers of a step, flattened; with an adaptive rule the count's is the last."""
    zeros = {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
    if isinstance(training.clipping, tp.Adaptive):
        zeros[COUNT] = torch.zeros(1)
    Noise(bytes.fromhex(training.state_dict()["noise_key"])).add_to(step, zeros, stddev=1.0)
    return torch.cat([z.flatten() for z in zeros.values()])


def groups_of(training, step, size, count):
    """Returns the micro-batch, one of ``count``, that each of ``size`` examples of a step joins."""
    settings, key = training.settings, bytes.fromhex(training.state_dict()["sampler_key"])
    return torch.from_numpy(
        PoissonSampler(settings.num_examples, settings.sampling_probability, key=key).groups(step, size, count)
    )


def squared_norms_of(training, losses):
    """Returns the squared norms of the rows that the training has recorded for its present batch."""
    tape = training.record()
    return tape.jacobian(losses, retain_graph=True).squared_norms()


def network_parameters():
    return torch.cat([p.detach().flatten() for p in network().parameters()])


def parameters_of(training):
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def clipped(rows, clip_norm):
    return (rows * (clip_norm / rows.norm(dim=1)).clamp(max=1)[:, None]).nan_to_num().sum(0)


def clipped_in_parts(sizes, clip_norms):
    def clip(rows, groups):
        parts = rows.split(sizes, dim=1)
        return torch.cat([clipped(part, clip_norm) for part, clip_norm in zip(parts, clip_norms, strict=True)])

    return clip


def scaled_automatically(rows, groups):
    return (rows * (0.5 / (rows.norm(dim=1) + 0.1))[:, None]).nan_to_num().sum(0)


def clipped_means(rows, groups):
    return clipped(torch.stack([rows[groups == k].mean(0) for k in groups.unique()]), 0.5)


RULES = {  # name -> (rule, function of rows and groups to the clipped sum, sensitivity)
    "flat": (tp.Flat(0.5), clipped_in_parts([26], [0.5]), 0.5),
    "per layer": (tp.PerLayer(0.5), clipped_in_parts([16, 10], [0.125**0.5] * 2), 0.5),
    "each layer": (tp.EachLayer(0.3), clipped_in_parts([16, 10], [0.3, 0.3]), 0.18**0.5),
    "groups": (
        tp.Groups({"": 0.3, "2": 0.2, "2.weight": 0.6}),
        clipped_in_parts([16, 8, 2], [0.3, 0.6, 0.2]),
        0.7,
    ),
    "automatic": (tp.Automatic(0.5, gamma=0.1), scaled_automatically, 0.5),
    "adaptive": (tp.Adaptive(0.5, count_noise_stddev=4.0), clipped_in_parts([26], [0.5]), 0.5),
    "micro-batches": (tp.MicroBatches(0.5, 4), clipped_means, 1.0),
}


def by_each_rule(function):
    return pytest.mark.parametrize("rule", RULES)(function)


def rows_of(training, x, y):
    examples = list(zip(x.split(1), y.split(1), strict=True))
    return one_backward_per_example(copy.deepcopy(training.model), x, cross_entropy_of_pair, examples)
