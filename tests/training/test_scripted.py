# SPDX-License-Identifier: Apache-2.0
"""Models with scripted and traced parts are trained, with exact and with estimated norms; their state is looked at."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torch_privacy as tp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit


class LearningMean(nn.Module):
    """Keeps the mean of all inputs in an attribute of TorchScript."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


MODELS = {
    "scripted": lambda: torch.jit.script(network()),
    "traced": lambda: torch.jit.trace(network(), torch.randn(2, 4)),
    "a scripted layer": lambda: nn.Sequential(nn.Linear(4, 5), torch.jit.script(nn.Linear(5, 2))),
}


def train(model: nn.Module, forward=lambda model, x: model(x), **options):
    data = TensorDataset(torch.randn(60, 4), torch.randint(2, (60,)))
    training = tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        **{"expected_batch_size": 8, "num_steps": 3, "clipping": tp.Flat(1.0), "noise_multiplier": 1.0}
        | {"delta": 1e-3, "test_seed": 1}
        | options,
    )
    for x, y in training:
        training.step(F.cross_entropy(forward(model, x), y, reduction="none"))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_branches_of_cond_are_trained_as_ordinary_ones():
    """In rehearsals that compare losses alone, too, in which nothing is recorded."""
    model, weights = network(), []
    begin = {name: p.clone() for name, p in model.state_dict().items()}
    on = torch.tensor(True)
    for forward in (
        lambda m, x: torch.cond(on, lambda h: m[2](h.relu()), m[2], (torch.cond(on, m[0], m[0], (x,)),)),
        lambda m, x: m(x),
    ):
        model.load_state_dict(begin)
        torch.manual_seed(1)
        weights.append(train(model, forward))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("kind", MODELS)
def test_model_of_torch_script_is_trained_as_the_ordinary_one(kind):
    model = MODELS[kind]()
    plain = network() if kind != "a scripted layer" else nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    plain.load_state_dict(model.state_dict())
    state = torch.get_rng_state()
    weights = train(model)
    torch.set_rng_state(state)
    torch.testing.assert_close(weights, train(plain))


@pytest.mark.parametrize("kind", MODELS)
def test_model_of_torch_script_is_trained_with_estimated_norms(kind):
    assert train(MODELS[kind](), clipping=tp.Sketched(32, clip_norm=1.0)).isfinite().all()


def test_scripted_module_that_keeps_data_is_refused():
    with pytest.raises(tp.Refused, match=r"'0\.mean'"):
        train(nn.Sequential(torch.jit.script(LearningMean()), network()))


TRANSFORMED = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "jvp": lambda model, x: model(x) + torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "gradient": lambda model, x: model(x) + torch.vmap(torch.func.grad(lambda one: model(one)[0]))(x)[:, :2],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_model_may_be_called_by_the_transforms_of_torch_func(name):
    model = network()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert not torch.equal(train(model, forward=TRANSFORMED[name]), before)


def test_check_agrees_with_training_about_scripted_models():
    batch = torch.randn(6, 4), torch.randint(2, (6,))

    def losses(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert all(tp.check(make(), losses, batch).ok for make in MODELS.values())
    assert not tp.check(nn.Sequential(torch.jit.script(LearningMean()), network()), losses, batch).ok
