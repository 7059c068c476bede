# SPDX-License-Identifier: Apache-2.0
"""Several views of one example have one row, one clip factor, and one neighboring data set."""

import copy

import pytest
import torch
from oracle import one_backward_per_example, rows_of_one_graph
from parts import Calls, own_batches, trained
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from trainings import private_training

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Merging
from torch_privacy.mechanisms.base import PRICED_ROUNDING

N, VIEWS, BATCH = 24, 3, 8.0


class Shifted(Dataset):
    """Draws a new shift of an item at every fetch."""

    def __init__(self):
        self.x, self.y = torch.randn(N, 2, 6, 6), torch.randint(3, (N,))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i] + 0.3 * torch.randn(2, 1, 1), self.y[i]


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3)
    )


def training_of(model, dataset=None, **settings):
    settings = {
        "examples": {"views": VIEWS},
        "num_steps": 3,
        "clipping": tp.Flat(0.4),
        "noise_multiplier": 1.0,
        **settings,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return private_training(model, optimizer, dataset or Shifted(), expected_batch_size=BATCH, test_seed=1, **settings)


def losses_of(model, x, y, views=VIEWS):
    return nn.functional.cross_entropy(model(x), y, reduction="none").view(-1, views)


def explicit_sum(model, batches, rule):
    """Returns the sum of the clipped means over views, by one backward per view."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    rows = one_backward_per_example(
        model, torch.arange(len(x)), lambda m, i: nn.functional.cross_entropy(m(x[i]), y[i], reduction="none")
    )
    means = rows.view(len(x) // VIEWS, VIEWS, -1).mean(1)
    return rule.factors(means.norm(dim=1)) @ means


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("dataset", [Shifted, lambda: TensorDataset(torch.randn(N, 2, 6, 6), torch.randint(3, (N,)))])
def test_a_step_releases_the_sum_of_clipped_means_over_views(dataset, microbatch_size):
    model = network()
    training = training_of(model, dataset(), performance=tp.Performance(microbatch_size=microbatch_size))
    batches, before, step = [], copy.deepcopy(model), 0
    for x, y in own_batches(training, losses_of):
        assert len(x) % VIEWS == 0
        assert all(len(set(y[i : i + VIEWS].tolist())) == 1 for i in range(0, len(y), VIEWS))
        made = training.step(losses_of(model, x, y))
        batches += [] if training.rehearsing else [(x, y)]  # one that runs new code comes again
        if not made:
            continue
        noise = {name: torch.zeros_like(p) for name, p in trained(before).items()}
        training._state.releases.noise.add_to(step, noise, 0.4 * PRICED_ROUNDING)
        total = explicit_sum(before, batches, tp.Flat(0.4)) + torch.cat([z.flatten() for z in noise.values()])
        moved = [b - a for a, b in zip(model.parameters(), before.parameters(), strict=True)]
        torch.testing.assert_close(torch.cat([m.flatten() for m in moved]), total / BATCH, rtol=1e-9, atol=1e-9)
        batches, before, step = [], copy.deepcopy(model), step + 1
    assert step == 3


def test_views_of_one_example_differ_and_cost_no_privacy():
    training = training_of(network())
    x, _ = next(own_batches(training, losses_of))
    assert not torch.equal(x[0], x[1])
    assert training.event == training_of(network(), examples={"views": 1}).event
    assert training.clipping.sensitivity(training.event.neighboring_relation) == 0.4


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    "rule", [tp.PerLayer(0.4), tp.Adaptive(0.4, count_noise_stddev=2.0), tp.Automatic(0.4), tp.MicroBatches(0.4, 4)]
)
def test_any_rule_takes_views(rule):
    training = training_of(network(), clipping=rule, num_steps=4)
    for x, y in training:
        training.step(losses_of(training.model, x, y))
    assert training.step_count == 4


def test_equal_views_do_not_change_embedding_perturbation():
    data, auxiliary = TensorDataset(torch.randn(N, 2, 6, 6), torch.randint(3, (N,))), torch.randn(12, 2, 6, 6)
    start, ends = network(), []
    for views in (1, VIEWS):
        model = copy.deepcopy(start)
        subspace = tp.AnchorSubspace(auxiliary, num_basis=6)
        settings = {"clipping": tp.GEP(subspace), "examples": {"views": views}}
        training = training_of(model, data, **settings)
        for x, y in training:
            training.step(losses_of(model, x, y, views).squeeze(1))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_an_example_with_one_bad_view_is_left_out_once():
    data = Shifted()
    data.x[:] = torch.where(torch.arange(N)[:, None, None, None] % 4 == 0, torch.inf, data.x)
    training, bad = training_of(network(), data), 0
    for x, y in own_batches(training, losses_of):
        bad += int((~x.flatten(1).isfinite().all(1)).sum())
        training.step(losses_of(training.model, x, y))
    assert training.num_non_finite == bad // VIEWS > 0


@pytest.mark.parametrize(
    "losses", [lambda losses: losses.flatten(), lambda losses: losses.mean(1), lambda losses: losses.T, torch.mean]
)
def test_losses_of_another_shape_are_refused(losses):
    training = training_of(network())
    x, y = next(batches := iter(training))
    with pytest.raises(tp.Refused, match=r"must be \((\d+, 3\)|n,\))"):
        training.step(losses(losses_of(training.model, x, y)))
    assert training.step_count == 0
    batches.close()


class Centered(nn.Linear):
    """Subtracts the mean of the batch, or of an example's views, from every input."""

    def __init__(self, own):
        super().__init__(72, 3)
        self.own = own

    def forward(self, x):
        x = x.flatten(1)
        means = x.view(-1, VIEWS, 72).mean(1).repeat_interleave(VIEWS, 0) if self.own else x.mean(0)
        return super().forward(x - means)


def test_views_that_depend_on_other_examples_are_refused():
    training = training_of(Centered(own=False))
    steps = (training.step(losses_of(training.model, x, y)) for x, y in training)
    with pytest.raises(tp.Refused, match="examples of a batch depend on each other"):
        list(steps)
    assert training.step_count == 0


def test_views_may_depend_on_the_examples_other_views():
    """The example's row is the gradient of the mean over all views."""
    model = Centered(own=True)
    training = training_of(model, performance=tp.Performance(microbatch_size=3))
    for x, y in own_batches(training, losses_of):
        means = losses_of(model, x, y).mean(1)
        jacobian = training._runs.pending.tape.jacobian(losses_of(model, x, y).flatten(), retain_graph=True)
        rows = torch.cat([part.flatten(1) for part in jacobian.rows().values()], 1)
        torch.testing.assert_close(rows.view(-1, VIEWS, rows.shape[1]).mean(1), rows_of_one_graph(means, model))
        training.step(losses_of(model, x, y))
    assert training.step_count == 3


@pytest.mark.parametrize("own", [False, True])
def test_views_that_mix_in_hidden_values_are_refused(own):
    def forward(m, x):
        h = m.f(x.flatten(1))
        return h - (h.view(-1, VIEWS, 3).mean(1).repeat_interleave(VIEWS, 0) if own else h.mean(0))

    training = training_of(Calls(forward, f=nn.Linear(72, 3)))
    steps = (training.step(losses_of(training.model, x, y)) for x, y in training)
    with pytest.raises(tp.Refused, match="cannot be separated"):
        list(steps)
    assert training.step_count == 0


def test_a_run_resumes_with_the_same_number_of_views_only():
    state = training_of(network()).state_dict()
    with pytest.raises(tp.Refused, match="views"):
        training_of(network(), examples={"views": 2}).load_state_dict(state)


def test_estimated_norms_and_invalid_views_are_refused():
    with pytest.raises(tp.Refused, match="views=3 needs exact norms"):
        training_of(network(), clipping=tp.Sketched(32, clip_norm=0.4))
    for views in (0, -1, 1.5):
        with pytest.raises(ValueError, match="views"):
            training_of(network(), examples={"views": views})


def test_the_mean_over_views_has_the_precision_of_float64_whatever_the_default_type():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # torch's own; these tests have float64
    try:
        weights = Merging.views(4, VIEWS).weights()
    finally:
        torch.set_default_dtype(before)
    assert weights.tolist() == [1 / VIEWS] * 4 * VIEWS
