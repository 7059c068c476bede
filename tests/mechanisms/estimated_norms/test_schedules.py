# SPDX-License-Identifier: Apache-2.0
"""Estimated norms with clip norms and noise of their own in every step: C_1 ... C_T and sigma_1 ... sigma_T."""

import copy

import pytest
import torch
from oracle import rows_of_one_graph
from parts import losses_of, own_batches, trained
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.mechanisms.estimated_norms.directions import Directions
from torch_privacy.privacy import SubsampledJL, compose

CLIPS, NOISES = [1.0, 0.25, 3.0], [1.0, 2.0, 0.5]


def training_of(clipping, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    settings = {"expected_batch_size": 8, "num_steps": 3, "noise_multiplier": 1.0, **more}
    return tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=1.0), TensorDataset(torch.randn(40, 3)), clipping=clipping,
        delta=1e-3, **settings,
    )  # fmt: skip


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_every_step_clips_estimates_at_its_own_norm_with_its_own_noise():
    training = training_of(tp.Sketched(16, clip_norm=0.5).scheduled(CLIPS), noise_schedule=NOISES, test_seed=5)
    model = training.model
    for t, (x,) in enumerate(own_batches(training, lambda model, x: losses_of(model, x))):
        before, rows = flat(model.parameters()), rows_of_one_graph(losses_of(model, x), model)
        v = Directions(training._state.releases.noise.key, t, 0).draw(range(16), trained(model))
        norms = (rows @ torch.cat([d.flatten(1) for d in v.values()], 1).T).square().mean(1).sqrt()
        noise = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        clip_norm = 0.5 * CLIPS[t]
        training._state.releases.noise.add_to(t, noise, NOISES[t] * clip_norm * PRICED_ROUNDING)
        total = (clip_norm / norms).clamp(max=1) @ rows + flat(noise.values())
        training.step(losses_of(model, x))
        torch.testing.assert_close(flat(model.parameters()), before - total / 8, rtol=1e-9, atol=1e-9)
    assert training.step_count == 3


@pytest.mark.thorough
def test_a_schedule_is_priced_step_by_step():
    training = training_of(tp.Sketched(16, clip_norm=0.5).scheduled(CLIPS), noise_schedule=NOISES)
    for (x,) in training:
        training.step(losses_of(training.model, x))
    spent = training.spent().epsilon
    low, high = compose([(SubsampledJL(noise, 16, 0.2), 1) for noise in NOISES]).epsilon(1e-3)
    assert (spent.low, spent.high) == pytest.approx((low, high), rel=1e-9)
    assert high < compose([(SubsampledJL(min(NOISES), 16, 0.2), 3)]).epsilon(1e-3).low
    clipping = training.statement()["clipping"]
    assert clipping["clip_schedule"]["last"] == CLIPS[-1]


@pytest.mark.thorough
def test_a_target_is_met_by_the_whole_schedule_of_estimates():
    training = training_of(
        tp.Sketched(32, clip_norm=0.5), noise_schedule=NOISES, noise_multiplier=None, target_epsilon=2.0
    )
    noise = training.settings.noise_multiplier
    epsilon = compose([(SubsampledJL(noise * factor, 32, 0.2), 1) for factor in NOISES]).epsilon(1e-3).high
    assert 1.99 < epsilon <= 2.0


def test_a_resumed_run_continues_the_schedule():
    more = {"clipping": tp.Sketched(16, clip_norm=0.5).scheduled(CLIPS), "noise_schedule": NOISES, "test_seed": 5}
    whole, stopped = (training_of(**more) for _ in range(2))
    for (x,) in whole:
        whole.step(losses_of(whole.model, x))
    for (x,) in stopped:
        stopped.step(losses_of(stopped.model, x))
        if stopped.step_count == 1:
            break
    resumed = training_of(**more)
    resumed.model.load_state_dict(copy.deepcopy(stopped.model.state_dict()))
    resumed.load_state_dict(stopped.state_dict())
    for (x,) in resumed:
        resumed.step(losses_of(resumed.model, x))
    assert torch.equal(flat(resumed.model.parameters()), flat(whole.model.parameters()))
