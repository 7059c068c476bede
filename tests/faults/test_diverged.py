# SPDX-License-Identifier: Apache-2.0
"""Clip norms far too large or small are refused by their true name, or train without an error."""

import pytest
import torch
from torch import nn
from trainings import N, cross_entropy, train, training_of

import torch_privacy as tp


class CoupledIfLarge(nn.Module):
    """Mixes examples once its weights are large, as overflow does: 0 * inf in a sum over the batch."""

    def __init__(self, large):
        super().__init__()
        self.f, self.large = nn.Linear(3, 2), large

    def forward(self, x):
        mixed = x - x.mean(0) if float(self.f.weight.detach().abs().max()) > self.large else x
        return self.f(mixed) / (1 + self.f.weight.detach().abs().max())


def test_a_diverged_training_is_not_blamed_on_coupled_examples():
    with pytest.raises(tp.Refused, match=r"training has diverged: after step 1 .* Lower the clip norm or the learning"):
        train(training_of(CoupledIfLarge(1e9), clipping=tp.Flat(1e21)))
    with pytest.raises(tp.Refused, match=r"^rehearsal: examples of a batch depend on each other"):
        train(training_of(CoupledIfLarge(0.0)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        return self.out(self.layer(self.embedding(x)))[:, -1]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.layer(self.embedding(x))[0][:, -1])


def convolution():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


MODELS = {"convolution": convolution, "attention": Attention, "recurrent": Recurrent}
NORMS = (1e-45, 1e-30, 1e-10, 1e10, 1e21, 1e38, 1e300)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("rule", [tp.Flat, tp.PerLayer])
@pytest.mark.parametrize("kind", MODELS)
def test_any_clip_norm_trains_or_is_refused_as_diverged(kind, rule, tally):
    """In float32, where squares overflow beyond 1e19."""
    torch.set_default_dtype(torch.float32)
    inputs = torch.randn(N, 1, 8, 8) if kind == "convolution" else torch.randint(20, (N, 6))
    data, right = torch.utils.data.TensorDataset(inputs, torch.randint(2, (N,))), 0
    for clip_norm in NORMS:
        torch.manual_seed(1)
        training = training_of(MODELS[kind](), data, clipping=rule(clip_norm))
        try:
            train(training, losses=cross_entropy)
            right += training.step_count == len(training.ledger) == 6
        except tp.Refused as error:
            right += "training has diverged" in str(error)
    tally("clip norms from 1e-45 to 1e300", len(NORMS), right)
    assert right == len(NORMS)
