# SPDX-License-Identifier: Apache-2.0
"""Models from Opacus: weights of its layers compute the same in torch's, and its fixes are made here, too."""

from __future__ import annotations

import importlib
import inspect
import warnings

import opacus.layers
import pytest
import torch
from migrating import made_private, sgd, trained
from opacus.grad_sample import GradSampleModule
from opacus.validators import ModuleValidator as TheirValidator
from torch import nn
from torch.utils.data import TensorDataset

from torch_privacy import Refused
from torch_privacy.model_check.requirements import check_model
from torch_privacy.opacus import ModuleValidator, PrivacyEngine, from_opacus, layers
from torch_privacy.opacus.checkpoints import load_optimizer
from torch_privacy.support.normalization import SmallGroups


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int):
        super().__init__()
        self.embedding, self.rnn, self.out = nn.Embedding(7, 4), layer, nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.embedding(tokens))[0][:, -1])


class Attending(nn.Module):
    def __init__(self, layer: nn.Module, **widths: int):
        super().__init__()
        self.keys = nn.Linear(8, widths.get("kdim", 8))
        self.values = nn.Linear(8, widths.get("vdim", 8))
        self.attention = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, self.keys(x), self.values(x))[0]


RECURRENT = [
    (name, options)
    for name in ("DPLSTM", "DPGRU", "DPRNN")
    for options in ({}, {"bias": False}, {"num_layers": 2, "bidirectional": True})
]
ATTENTION = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"kdim": 5, "vdim": 6},
    {"kdim": 5, "vdim": 6, "add_bias_kv": True},
]


def both(name: str, *args: int, **options: object) -> tuple[nn.Module, nn.Module]:
    """Returns a layer of Opacus, and the one of the same name here."""
    return getattr(opacus.layers, name)(*args, **options), getattr(layers, name)(*args, **options)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("name", "options"), RECURRENT)
def test_recurrent_weights_of_opacus_compute_the_same(name: str, options: dict, wrapped: bool) -> None:
    theirs, ours = both(name, 4, 5, batch_first=True, **options)
    width = 10 if options.get("bidirectional") else 5
    old, new = Recurrent(theirs, width), Recurrent(ours, width)
    tokens = torch.randint(7, (3, 6))
    state = (GradSampleModule(old) if wrapped else old).state_dict()
    new.load_state_dict(from_opacus(state, new))
    torch.testing.assert_close(new(tokens), old(tokens), rtol=1e-6, atol=1e-6)
    ours.load_state_dict(from_opacus(theirs.state_dict(), ours))  # of the layer alone


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("options", ATTENTION)
def test_attention_weights_of_opacus_compute_the_same(options: dict, wrapped: bool) -> None:
    theirs, ours = both("DPMultiheadAttention", 8, 2, **options)
    old, new = Attending(theirs, **options), Attending(ours, **options)
    x = torch.randn(3, 6, 8)
    state = (GradSampleModule(old) if wrapped else old).state_dict()
    new.load_state_dict(from_opacus(state, new))
    torch.testing.assert_close(new(x), old(x), rtol=1e-6, atol=1e-6)
    ours.load_state_dict(from_opacus(theirs.state_dict(), ours))


def test_attention_that_opacus_computes_otherwise_is_named() -> None:
    theirs, ours = both("DPMultiheadAttention", 8, 1, batch_first=True)
    old, new = Attending(theirs), Attending(ours)
    new.load_state_dict(from_opacus(old.state_dict(), new))
    x = torch.randn(3, 6, 8)
    torch.testing.assert_close(new(x), old(x), rtol=1e-6, atol=1e-6)
    theirs, ours = both("DPMultiheadAttention", 8, 2, batch_first=True)
    old, new = Attending(theirs), Attending(ours)
    with pytest.warns(UserWarning, match="'attention' was a DPMultiheadAttention with batch_first=True"):
        new.load_state_dict(from_opacus(old.state_dict(), new))
    assert (new(x) - old(x)).abs().max() > 0.01


def test_names_that_the_model_has_stay() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._module, self.qlinear, self.l0 = (
                nn.Linear(2, 2),
                nn.Linear(2, 2),
                nn.ModuleDict({"ih": nn.Linear(2, 2)}),
            )

    model = Named()
    assert from_opacus(model.state_dict(), model).keys() == model.state_dict().keys()
    wrapped = {f"_module.{name}": value for name, value in model.state_dict().items()}
    assert from_opacus(wrapped, model).keys() == model.state_dict().keys()


def test_weights_that_do_not_fit_are_listed() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    state = model.state_dict() | {"0.weight": torch.ones(2, 4), "head.bias": torch.ones(1)}
    del state["1.bias"]
    with pytest.raises(
        Refused, match=r"has no '1.bias'; it has besides 'head.bias'; it has other shapes: '0.weight \(2, 4\)"
    ):
        from_opacus(state, model)
    theirs, ours = both("DPLSTM", 4, 5)
    state = Recurrent(theirs, 5).state_dict()
    state["rnn.l0.ih.weight"] = state["rnn.l0.ih.weight"] + 1
    if "rnn.weight_ih_l0" in state:
        with pytest.raises(Refused, match="two different values"):
            from_opacus(state, Recurrent(ours, 5))


def test_a_momentum_of_other_layers_is_refused() -> None:
    theirs, ours = both("DPLSTM", 4, 5, batch_first=True)
    old, new = Recurrent(theirs, 5), Recurrent(ours, 5)
    optimizer = sgd(old)
    old(torch.randint(7, (3, 6))).sum().backward()
    optimizer.step()
    with pytest.raises(Refused, match="in another order, as Opacus' DPLSTM"):
        load_optimizer(sgd(new), optimizer.state_dict())
    load_optimizer(sgd(old), optimizer.state_dict())


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", ["DPLSTM", "DPGRU", "DPRNN"])
def test_layers_of_either_library_train(name: str) -> None:
    data = TensorDataset(torch.randint(7, (30, 4)), torch.randint(3, (30,)))
    for layer in both(name, 4, 5, batch_first=True):
        engine, model, optimizer, loader = made_private(model=Recurrent(layer, 5), data=data)
        trained(model, optimizer, loader)
        assert engine.training.step_count == 3


NORMS = {
    "1d": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
    "2d": lambda: nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 2, 1)),
    "3d": lambda: nn.Sequential(nn.Conv3d(1, 48, 1), nn.BatchNorm3d(48)),
    "synchronized": lambda: nn.Sequential(nn.SyncBatchNorm(8)),
    "root": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.Sequential(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.BatchNorm2d(8))), nn.LayerNorm(4)),
}
OPTIONS = [{}, {"num_groups": 2}, {"replace_bn_with_in": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NORMS)
def test_fix_makes_the_model_that_opacus_makes_where_that_can_learn(name: str, options: dict) -> None:
    model = NORMS[name]()
    if name == "synchronized" and "replace_bn_with_in" in options:
        with pytest.raises(Refused, match="SyncBatchNorm has no counterpart"):
            ModuleValidator.fix(model, **options)
        return
    before = repr(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = TheirValidator.fix(model, **({} if name == "instance" else options))
    ours = ModuleValidator.fix(model, **options)
    assert repr(model) == before
    if options or name == "instance":
        assert repr(ours) == repr(theirs)
    for (key, p), q in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(p, q), key
    assert not ModuleValidator.is_valid(model)
    assert ModuleValidator.is_valid(ours) == TheirValidator.is_valid(theirs) is True
    assert repr(PrivacyEngine.get_compatible_module(model)) == repr(ModuleValidator.fix_and_validate(model))


@pytest.mark.parametrize("channels", [4, 6, 8, 16, 30, 48, 64, 128])
def test_fix_normalizes_at_least_four_values_together(channels: int) -> None:
    dense = nn.Sequential(nn.Linear(5, channels), nn.BatchNorm1d(channels))
    line = nn.Sequential(nn.Conv1d(2, channels, 1), nn.BatchNorm1d(channels))
    image = nn.Sequential(nn.Conv2d(2, channels, 1), nn.BatchNorm2d(channels))
    for model, x in ((dense, torch.randn(9, 5)), (line, torch.randn(9, 2, 1)), (image, torch.randn(9, 2, 1, 1))):
        fixed = ModuleValidator.fix(model)
        told: list[str] = []
        with SmallGroups(fixed, told.append):
            y = fixed(x)
        assert not told
        assert y[:, 0].std() > 0.1  # that of one value alone is 0 everywhere
    assert isinstance(ModuleValidator.fix(dense)[1], nn.LayerNorm)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_too_few_features_to_normalize_are_left_as_they_are(kind: type, channels: int) -> None:
    with pytest.warns(UserWarning, match=rf"{kind.__name__}\({channels}\) after a linear layer became nn.Identity"):
        fixed = ModuleValidator.fix(nn.Sequential(nn.Linear(5, channels), kind(channels)))
    assert isinstance(fixed[1], nn.Identity)
    with pytest.warns(UserWarning, match=rf"on inputs \(n, {channels}\) .* Replace it by nn.Identity\(\) if"):
        ModuleValidator.fix(kind(channels))
    with pytest.raises(Refused, match=rf"use nn.Identity\(\), or on inputs \(n, {channels}, ...\) with 4 or more"):
        check_model(kind(channels), torch.optim.SGD([nn.Parameter(torch.zeros(1))]))


def test_few_values_in_a_group_of_ones_own_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"GroupNorm\(8, 16\) on inputs \(n, 16\) normalizes 2 values at a time"):
        ModuleValidator.fix(nn.BatchNorm1d(16), num_groups=8)


def test_fix_replaces_shared_and_plain_norms_and_leaves_frozen_ones() -> None:
    shared, frozen = nn.BatchNorm1d(4), nn.BatchNorm1d(4).requires_grad_(False)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared, nn.BatchNorm1d(4, affine=False), frozen).double()
    fixed = ModuleValidator.fix(model)
    assert fixed[0] is fixed[2]
    assert [type(part).__name__ for part in fixed] == ["GroupNorm", "Linear", "GroupNorm", "LayerNorm", "BatchNorm1d"]
    assert fixed[0].weight.dtype == torch.float64
    with pytest.raises(Refused, match=r"'4' is a BatchNorm1d, which mixes examples. It is frozen: call eval"):
        PrivacyEngine().validate(module=fixed)
    fixed[4].eval()
    assert PrivacyEngine().is_compatible(module=fixed)
    assert [str(e) for e in ModuleValidator.validate(fixed.eval())] == [
        "ModuleValidator: the model must be in training mode."
    ]
    with pytest.raises(ValueError, match="not both"):
        ModuleValidator.fix(model, replace_bn_with_in=True, num_groups=2)


def test_the_wrapper_for_several_processes_has_its_old_name() -> None:
    wrapper = importlib.import_module("torch_privacy.opacus.distributed").DifferentiallyPrivateDistributedDataParallel
    assert issubclass(wrapper, nn.parallel.DistributedDataParallel)
    theirs = importlib.import_module("opacus.distributed").DifferentiallyPrivateDistributedDataParallel
    assert [*inspect.signature(wrapper).parameters] == [*inspect.signature(theirs).parameters]
