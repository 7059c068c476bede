# SPDX-License-Identifier: Apache-2.0
"""More sentences of docs/comparison.md: what a library computes for hard inputs, and what a step costs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from comparison_points import (
    DELTA,
    DIFFPRIVLIB,
    DP_ACCOUNTING,
    HISTORIES,
    JAX,
    OPACUS,
    diffprivlib_module,
    network,
    of,
    opacus_epsilon,
    our_epsilon,
    weights,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy import privacy

WIDE = TensorDataset(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 2)
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


class CallWatch(TorchDispatchMode):
    """Counts the calls of torch and notes how many entries of four bytes their largest result has."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        sizes = [x.untyped_storage().nbytes() // 4 for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.most = max(self.most, *sizes, 0)
        return result


def wide_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2)).float()


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def opacus_steps(model: nn.Module, data: Any, steps: int, mode: str = "hooks", loss: Loss = plain) -> list[CallWatch]:
    """Trains with Opacus in batches of 16 on average; returns what each step called."""
    criterion = nn.CrossEntropyLoss()
    given = {"criterion": criterion} if mode == "ghost" else {}
    made: Any = importlib.import_module("opacus").PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=1.0,
        grad_sample_mode=mode, **given,
    )  # fmt: skip
    model, optimizer, loader = made[0], made[1], made[-1]
    found: list[CallWatch] = []
    while len(found) < steps:
        for x, y in loader:
            with CallWatch() as watch:
                optimizer.zero_grad()
                (made[2](model(x), y) if mode == "ghost" else loss(model, x, y).mean()).backward()
                optimizer.step()
            found.append(watch)
    return found[:steps]


def our_steps(model: nn.Module, data: Any, steps: int, loss: Loss = plain) -> list[CallWatch]:
    """Trains with PrivateTraining in batches of 16 on average; returns what each step called, rehearsals included."""
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, expected_batch_size=16, clipping=tp.Flat(1.0),
        noise_multiplier=1.0, num_steps=steps, delta=1e-3,
    )  # fmt: skip
    batches, found, watch = iter(training), [], CallWatch()
    while training.step_count < steps:
        with watch:
            x, y = next(batches)
            training.step(loss(model, x, y))
        if training.step_count > len(found):
            found.append(watch)
            watch = CallWatch()
    return found


def without_a_number(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns losses of which those of large inputs have no finite gradient."""
    return plain(model, x, y) * torch.where(x[:, 0] > 1e3, torch.nan, 1.0)


def gaussians_of(history: tuple[float, float, int]) -> tuple[Any, int]:
    noise, q, steps = history
    dp_accounting = importlib.import_module("dp_accounting")
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise)), steps


def pld_of(*composed: tuple[Any, int]) -> Any:
    accountant = importlib.import_module("dp_accounting.pld").PLDAccountant()
    for event, count in composed:
        accountant.compose(event, count)
    return accountant


# Opacus


@of(OPACUS)
def norms_of_another_batch() -> None:
    """Its ghost clipping of a linear layer reuses the norms of the batch before on inputs of rank 4; ours are exact."""
    opacus = importlib.import_module("opacus.grad_sample")
    small, large = torch.randn(5, 2, 3), 100 * torch.randn(5, 2, 6, 3)
    theirs = opacus.GradSampleModuleFastGradientClipping(
        nn.Sequential(nn.Linear(3, 4)), max_grad_norm=1.0, use_ghost_clipping=True
    )
    found = []
    for x in (small, large):
        theirs(x).sum().backward()
        found.append(theirs.get_norm_sample().clone())
    assert torch.equal(*found)
    ours = nn.Linear(3, 4)
    with tp.record(ours) as tape:
        losses = ours(large).square().sum((1, 2, 3))
    norms = tape.jacobian(losses).squared_norms().sqrt()
    for x, norm in zip(large, norms, strict=True):
        gradient = torch.autograd.grad(ours(x).square().sum(), list(ours.parameters()))
        assert norm.item() == pytest.approx(nn.utils.parameters_to_vector(gradient).norm().item(), rel=1e-4)


@of(OPACUS)
def tied_weights() -> None:
    """Its ghost clipping refuses tied weights, which its default mode takes; ours takes them, with exact norms."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).mT, x, reduction="none").sum(1)

    opacus = importlib.import_module("opacus.grad_sample")
    x = torch.tensor([[1, 2], [3, 4], [1, 1]])
    theirs = opacus.GradSampleModuleFastGradientClipping(Tied(), max_grad_norm=1.0, use_ghost_clipping=True)
    with pytest.raises(NotImplementedError, match="tying"):
        losses_of(theirs, x).mean().backward()
    default = opacus.GradSampleModule(Tied())
    losses_of(default, x).mean().backward()
    assert next(default.parameters()).grad_sample.shape == (3, 7, 4)
    ours = Tied()
    with tp.record(ours) as tape:
        losses = losses_of(ours, x)
    norms = tape.jacobian(losses).squared_norms().sqrt()
    for i, norm in enumerate(norms):
        (gradient,) = torch.autograd.grad(losses_of(ours, x[i : i + 1]).sum(), [ours.inner.weight])
        assert norm.item() == pytest.approx(gradient.norm().item(), rel=1e-4)


@of(OPACUS)
def one_gradient_without_a_number() -> None:
    """One example with a gradient that is not finite makes all its weights not a number; ours stay finite."""
    x = torch.randn(64, 4, dtype=torch.float32)
    x[::4, 0] = 1e4  # so that each batch of 16 has some
    data = TensorDataset(x, torch.arange(64) % 2)
    theirs, ours = network(), network()
    opacus_steps(theirs, data, 4, loss=without_a_number)
    our_steps(ours, data, 4, loss=without_a_number)
    assert weights(theirs).isnan().all()
    assert weights(ours).isfinite().all()


@of(OPACUS)
def memory_of_a_step() -> None:
    """Linear layers: its default mode makes a tensor of examples × weights; here, as in its ghost mode, of weights."""
    size = sum(p.numel() for p in wide_network().parameters())
    assert max(watch.most for watch in opacus_steps(wide_network(), WIDE, 4)) > 8 * size
    assert max(watch.most for watch in opacus_steps(wide_network(), WIDE, 4, mode="ghost")) <= size
    assert max(watch.most for watch in our_steps(wide_network(), WIDE, 4)) <= size


@of(OPACUS)
def batches_once_an_epoch() -> None:
    """Its accountants price Poisson batches; here 20 epochs with each example once in each cost 4 % less."""
    assert our_epsilon((1.0, 0.01, 2000)).high < opacus_epsilon("prv", (1.0, 0.01, 2000))
    once = privacy.compose([(privacy.BallsAndBins(1.0, 100), 20)]).epsilon(DELTA)
    assert once.high < 0.96 * opacus_epsilon("prv", (1.0, 0.01, 2000))


@of(OPACUS)
def short_trainings() -> None:
    """Better there: its first ten steps make under half of our calls of torch; our later steps make fewer than its."""
    theirs = [watch.calls for watch in opacus_steps(wide_network(), WIDE, 40)]
    ours = [watch.calls for watch in our_steps(wide_network(), WIDE, 40)]
    assert sum(ours[:10]) > 2 * sum(theirs[:10])
    assert median(ours[20:]) < median(theirs[20:])


# dp-accounting


@of(DP_ACCOUNTING)
def tiny_delta() -> None:
    """At delta = 1e-20 its PLD accountant answers infinity; we answer 6.36 for a thousand steps."""
    assert pld_of(gaussians_of(HISTORIES[2])).get_epsilon(1e-20) == np.inf
    low, high = our_epsilon(HISTORIES[2], 1e-20)
    assert 6.35 < low <= high < 6.37


@of(DP_ACCOUNTING)
def seconds_of_an_answer() -> None:
    """For three usual histories it takes at least five times as long as we do."""
    for history in HISTORIES:
        start = time.process_time()
        pld_of(gaussians_of(history)).get_epsilon(DELTA)
        middle = time.process_time()
        our_epsilon(history)
        assert middle - start > 5 * (time.process_time() - middle)


@of(DP_ACCOUNTING)
def what_an_attacker_can_do() -> None:
    """It answers with epsilon or delta; we have true positive rates too, and they agree with its deltas to 0.1 %."""
    accountant = pld_of(gaussians_of(HISTORIES[2]))
    assert not any("positive" in name or "tradeoff" in name for name in dir(accountant))
    noise, q, steps = HISTORIES[2]
    profile = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)])
    for rate in (0.001, 0.01):
        highest = min(accountant.get_delta(e) + np.exp(e) * rate for e in np.linspace(0, 2, 65))
        assert profile.true_positive_rate(rate).high == pytest.approx(highest, rel=1e-3)


@of(DP_ACCOUNTING)
def any_samples() -> None:
    """Better there: its event of fixed-size samples has a price; `from_dp_event` refuses it, and names ours."""
    dp_accounting, rdp = importlib.import_module("dp_accounting"), importlib.import_module("dp_accounting.rdp")
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.0))
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(event, 100)
    assert np.isfinite(accountant.get_epsilon(DELTA))
    with pytest.raises(tp.Refused, match="Use FixedSizeGaussian"):
        privacy.from_dp_event(event)


# JAX-Privacy


def largest(jaxpr: Any) -> int:
    """Returns the number of entries of the largest result in a program of JAX, calls inside it included."""
    sizes = [0]
    for line in jaxpr.eqns:
        sizes += [int(np.prod(result.aval.shape)) for result in line.outvars]
        for value in line.params.values():
            inner = [getattr(part, "jaxpr", part) for part in (value if isinstance(value, (list, tuple)) else [value])]
            sizes += [largest(part) for part in inner if hasattr(part, "eqns")]
    return max(sizes)


@of(JAX)
def rows_of_all_examples() -> None:
    """Linear layers: its clipped gradient makes a tensor of a microbatch's examples × weights; here of weights."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    jax_privacy = importlib.import_module("jax_privacy")
    model = {"w": jnp.ones((256, 256)), "v": jnp.ones((256, 2))}
    size = sum(part.size for part in model.values())

    def loss(model: Any, x: Any) -> Any:
        return (jnp.tanh(x @ model["w"]) @ model["v"]).sum() ** 2

    for microbatch in (4, 16):
        clipped = jax_privacy.clipped_grad(
            loss, l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False, microbatch_size=microbatch
        )
        assert largest(jax.make_jaxpr(clipped)(model, jnp.ones((16, 256))).jaxpr) == microbatch * 256 * 256
    wide = wide_network()
    assert max(watch.most for watch in our_steps(wide, WIDE, 4)) <= sum(p.numel() for p in wide.parameters())
    assert size == pytest.approx(sum(p.numel() for p in wide.parameters()), rel=0.01)  # alike


@of(JAX)
def gradients_without_a_number() -> None:
    """Both go on where one example has a gradient that is not finite."""
    jnp, jax_privacy = importlib.import_module("jax.numpy"), importlib.import_module("jax_privacy")
    clipped = jax_privacy.clipped_grad(
        lambda w, x: (jnp.log(x) @ w).sum(), l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False
    )
    total = np.asarray(clipped(jnp.ones(4), jnp.array([[1.0, 2, 3, 4], [-1.0, 2, 3, 4]])))
    assert np.isfinite(total).all()
    assert total.any()
    x = torch.randn(64, 4, dtype=torch.float32)
    x[::4, 0] = 1e4
    ours = network()
    our_steps(ours, TensorDataset(x, torch.arange(64) % 2), 2, loss=without_a_number)
    assert weights(ours).isfinite().all()


@of(JAX)
def each_example_once_a_cycle() -> None:
    """It draws balls-in-bins batches, but its accounting has no sampling method for them; here they have a price."""
    selection = importlib.import_module("jax_privacy.batch_selection")
    batches = list(selection.BallsInBinsSampling(iterations=6, cycle_length=3).batch_iterator(60))
    assert sorted(np.concatenate(batches[:3])) == list(range(60))
    methods = importlib.import_module("jax_privacy.accounting").SamplingMethod
    assert {method.name for method in methods} == {"POISSON", "FIXED_BATCH_SIZE"}
    assert privacy.compose([(privacy.BallsAndBins(1.0, 3), 2)]).epsilon(DELTA).high < np.inf


# diffprivlib


@of(DIFFPRIVLIB)
def bounds_from_the_data() -> None:
    """Without declared bounds its scaler warns, reads them off the data and goes on; ours looks at no data."""
    rows = np.random.default_rng(1).uniform(0, 1, (200, 2))
    outlier = rows.copy()
    outlier[0] = 1e6
    models = diffprivlib_module("models")
    sums = []
    for data in (rows, outlier):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sums.append(models.StandardScaler(epsilon=1e9, random_state=1).fit(data).mean_)
        assert "PrivacyLeakWarning" in {warning.category.__name__ for warning in caught}
    assert (sums[1] - sums[0] > 1000).all()
    from torch_privacy.sklearn import PublicScaler

    ours = [PublicScaler((0.0, 1.0)).fit(data).transform(rows) for data in (rows, outlier)]
    assert (ours[0] == ours[1]).all()


@of(DIFFPRIVLIB)
def statistics_of_a_column() -> None:
    """Better there: histograms, means and quantiles of a column by one call; here a release of them is priced only."""
    tools = diffprivlib_module("tools")
    column = np.linspace(0, 1, 2000)
    middle = tools.quantile(column, 0.5, epsilon=1.0, bounds=(0, 1), random_state=1)
    assert middle == pytest.approx(0.5, abs=0.1)
    assert not any(word in name.lower() for name in tp.__all__ for word in ("histogram", "quantile"))
    assert privacy.compose([(privacy.Laplace(1.0), 1)]).epsilon(0.0).high == pytest.approx(1.0, rel=1e-6)


def seconds_of_both() -> tuple[float, float]:
    """Returns the seconds that naive Bayes of diffprivlib and our classifier take to fit 569 rows."""
    from sklearn.datasets import load_breast_cancer

    from torch_privacy.sklearn import PrivateClassifier

    x, y = (np.asarray(part) for part in load_breast_cancer(return_X_y=True))
    bounds = np.zeros(x.shape[1]), 2.0 ** np.ceil(np.log2(x.max(0)))
    theirs = diffprivlib_module("models").GaussianNB(epsilon=1.0, bounds=bounds, random_state=1)
    start = time.process_time()
    theirs.fit(x, y)
    middle = time.process_time()
    PrivateClassifier(epsilon=1.0, classes=[0, 1], bounds=bounds).fit(x, y)
    return middle - start, time.process_time() - middle


@of(DIFFPRIVLIB)
def seconds_of_a_fit() -> None:
    """Better there: naive Bayes fits 569 rows in less than a tenth of the seconds that our classifier takes."""
    code = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import comparison_measures as m; "
    code += "print(*m.seconds_of_both())"  # a process of its own, as pytest under --strict-markers disturbs the fit
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    theirs, ours = (float(word) for word in done.stdout.split())
    assert theirs < ours / 10
