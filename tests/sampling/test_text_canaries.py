# SPDX-License-Identifier: Apache-2.0
"""Checks canaries of text: their law, what an exposure says of models that have met them, and audits with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torch_privacy as tp

PREFIX, DIGITS, LENGTH = [11, 12, 13], range(10), 6


class TinyGPT(nn.Module):
    """A causal transformer with one block, of tokens 0 to 15."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(16, width), nn.Embedding(16, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        t = tokens.shape[1]
        x = self.embedding(tokens) + self.places(torch.arange(t))
        mask = torch.full((t, t), -torch.inf).triu(1)
        return self.head(self.block(x, src_mask=mask, is_causal=True))


class Scored(nn.Module):
    """Gives the right next token the logit that a table has for the text, and all others 0."""

    def __init__(self, logit):
        super().__init__()
        self.logit = logit

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        right = F.one_hot(tokens.roll(-1, 1), 16) * self.logit(tokens)[:, None, None]
        return SimpleNamespace(logits=right.float())


def first_digits(tokens: torch.Tensor) -> torch.Tensor:
    return tokens[:, 3:].double() @ 7.0 ** -torch.arange(6.0).double()


def canaries(count: int = 40, **options) -> tp.TextCanaries:
    return tp.TextCanaries(PREFIX, DIGITS, LENGTH, count, **{"test_seed": 1, **options})


def test_texts_have_the_prefix_and_a_uniform_suffix():
    texts = canaries(2000).tokens
    assert texts[:, :3].unique(dim=0).tolist() == [PREFIX]
    counts = np.stack([np.bincount(column, minlength=10) for column in texts[:, 3:].T.numpy()])
    assert counts.shape == (LENGTH, 10)
    assert (abs(counts - 200) <= 5.5 * np.sqrt(2000 * 0.09)).all()
    assert len(texts.unique(dim=0)) > 1990
    assert not tp.TextCanaries(PREFIX, DIGITS, LENGTH, 40).tokens.equal(
        tp.TextCanaries(PREFIX, DIGITS, LENGTH, 40).tokens
    )


def test_examples_are_those_that_the_data_set_has():
    inputs, labels = canaries()[3]
    assert inputs.tolist() == canaries().tokens[3, :-1].tolist()
    assert labels.tolist() == canaries().tokens[3, 1:].tolist()
    assert canaries(example=lambda tokens: {"input_ids": tokens})[0]["input_ids"].shape == (9,)


def test_an_exposure_is_the_rank_of_the_suffix_alone():
    """The loss falls with the first digit of the suffix, so nine beats about nine of ten references."""
    data = canaries(200)
    found = data.exposure(Scored(lambda tokens: tokens[:, 3]), num_references=5000)
    first = data.tokens[:, 3].numpy()
    assert abs(found.p_values - (10 - first) / 10).max() < 0.04
    assert found.bits == pytest.approx(-np.log2(found.p_values))
    prefix_only = data.exposure(Scored(lambda tokens: tokens[:, 0]))
    assert (prefix_only.p_values == 1).all()  # every suffix is equally likely


def test_a_model_that_has_met_the_canaries_knows_them_and_one_that_has_not_does_not():
    met, model = canaries(20), TinyGPT()
    never_met = canaries(200, test_seed=2)
    before = never_met.exposure(model.train(), num_references=499).p_values
    assert all(module.training for module in model.modules())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        loss = F.cross_entropy(model(met.tokens[:, :-1]).flatten(0, 1), met.tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert met.exposure(model, num_references=499).p_values.max() <= 0.01
    after = never_met.exposure(model, num_references=499).p_values
    for p_values in (before, after):  # 0.17, not 0.1: the references vary, too
        assert (p_values <= 0.1).sum() <= binom.ppf(1 - 1e-7, 200, 0.17)


def test_p_values_are_exact_with_few_references():
    """Two references and the canary are exchangeable: each rank has a probability of 1/3."""
    ranks = []
    for seed in range(200):
        data = canaries(1, test_seed=seed)
        ranks.append(data.exposure(Scored(first_digits), num_references=2).p_values[0])
    for rank in (1, 2, 3):
        assert abs(np.isclose(ranks, rank / 3).sum() - 200 / 3) <= 5.5 * np.sqrt(200 * 2 / 9)


@pytest.mark.thorough
def test_text_canaries_audit_a_language_model():
    texts = torch.randint(10, (60, 9), generator=torch.Generator().manual_seed(0))
    data, found = TensorDataset(texts[:, :-1], texts[:, 1:]), canaries(40)

    def train(dataset):
        model = TinyGPT()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        training = tp.PrivateTraining(
            model,
            optimizer,
            dataset,
            expected_batch_size=50,
            num_steps=80,
            clipping=tp.Flat(1.0),
            noise_multiplier=0.003,
        )
        for x, y in training:
            losses = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)
            training.step(losses)
        return training

    audit = tp.audit(train, data, found, score="loss", test_seed=3)
    assert audit.area_under_curve > 0.9
    assert not audit.is_rejected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": 0}, "length"),
        ({"count": 0}, "count"),
        ({"prefix": []}, r"prefix=\[\]"),
        ({"alphabet": [3]}, "two or more"),
        ({"alphabet": [3, 3, 4]}, "differ"),
    ],
)
def test_texts_without_a_choice_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        tp.TextCanaries(**{"prefix": PREFIX, "alphabet": DIGITS, "length": 6, "count": 10, **options})
