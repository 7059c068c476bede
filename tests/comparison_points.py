# SPDX-License-Identifier: Apache-2.0
"""The sentences of docs/comparison.md, each with a program that runs both sides and asserts what it says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy import privacy

# Library, as its heading on the page, and the name of a point -> the point. Pytest imports the files twice, for their
# doctests too, so that each point is added twice.
POINTS: dict[str, dict[str, Callable[[], None]]] = {}
DELTA = 1e-5


def of(library: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a point to a library; its docstring is the sentence on the page."""

    def add(point: Callable[[], None]) -> Callable[[], None]:
        POINTS.setdefault(library, {})[point.__name__] = point
        return point

    return add


def in_order() -> dict[str, list[Callable[[], None]]]:
    """Returns the points as on the page: of each library those in which it is better come last."""
    return {
        name: sorted(found.values(), key=lambda p: sentence(p).startswith("Better there"))
        for name, found in POINTS.items()
    }


def sentence(point: Callable[[], None]) -> str:
    """Returns the sentence of a point, on one line."""
    return " ".join((point.__doc__ or "").split())


# Small trainings of both sides

OPACUS, DP_ACCOUNTING, JAX, DIFFPRIVLIB = "Opacus 1.6", "dp-accounting 0.6", "JAX-Privacy 2.0", "diffprivlib 0.6"
DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(1)).float(), torch.arange(60) % 2)
GIVEN: Mapping[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
OURS: Mapping[str, Any] = {"expected_batch_size": 10, "clipping": tp.Flat(1.0), "delta": 1e-3}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).float()


class Centered(nn.Module):
    """Takes off the mean of the batch: the gradient of an example depends on all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(0))


def opacus_training(model: nn.Module, passes: int = 1, **given: Any) -> Any:
    """Trains with Opacus; returns (engine, model, number of batches that the loop saw)."""
    opacus = importlib.import_module("opacus")
    engine = opacus.PrivacyEngine()
    given = {"target_delta": 1e-3} | given if "target_epsilon" in given else {"noise_multiplier": 1.0} | given
    make = engine.make_private_with_epsilon if "target_epsilon" in given else engine.make_private
    model, optimizer, loader = make(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=DataLoader(DATA, batch_size=10), **given,
    )  # fmt: skip
    seen = 0
    for _ in range(passes):
        for x, y in loader:
            seen += 1
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return engine, model, seen


def our_training(model: nn.Module, **given: Any) -> Any:
    """Trains with PrivateTraining; returns (training, number of batches that the loop saw)."""
    given = {"num_steps": 6} | given
    given |= {} if "target_epsilon" in given else {"noise_multiplier": 1.0}
    training = tp.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, **(dict(OURS) | given))
    seen = 0
    for x, y in training:
        seen += 1
        training.step(F.cross_entropy(model(x), y, reduction="none"))
    return training, seen


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def opacus_epsilon(accountant: str, history: tuple[float, float, int]) -> float:
    found = importlib.import_module("opacus.accountants").create_accountant(accountant)
    found.history = [history]
    return found.get_epsilon(delta=DELTA)


HISTORIES = [(1.1, 1 / 235, 3525), (0.7, 1 / 118, 4720), (1.0, 0.01, 1000)]


def our_epsilon(history: tuple[float, float, int], delta: float = DELTA) -> Any:
    noise, q, steps = history
    return privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(delta)


# Opacus


@of(OPACUS)
def gdp_accountant() -> None:
    """Its GDP accountant reports an epsilon below the truth on three usual histories; ours is never below it."""
    for history in HISTORIES:
        assert opacus_epsilon("gdp", history) < our_epsilon(history).low


@of(OPACUS)
def other_accountants() -> None:
    """Its PRV and RDP accountants report larger epsilons than our certified upper bound for the same histories."""
    for history in HISTORIES:
        assert our_epsilon(history).high < opacus_epsilon("prv", history) < opacus_epsilon("rdp", history)


@of(OPACUS)
def coupled_examples() -> None:
    """It trains a model that takes off the mean of the batch, which no clipping bounds; we refuse the model."""
    engine, _, _ = opacus_training(Centered())
    assert engine.get_epsilon(delta=1e-3) > 0
    with pytest.raises(tp.Refused, match="depend on each other"):
        our_training(Centered())


@of(OPACUS)
def shuffled_batches() -> None:
    """With `poisson_sampling=False` it reports the epsilon of Poisson samples all the same; we refuse it."""
    engines = [opacus_training(network(), poisson_sampling=given)[0] for given in (True, False)]
    found = [engine.get_epsilon(delta=1e-3) for engine in engines]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    from torch_privacy.opacus import PrivacyEngine

    model = network()
    parts = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(tp.Refused, match="poisson_sampling=False"):
        PrivacyEngine().make_private(
            **parts, data_loader=DataLoader(DATA, batch_size=10), poisson_sampling=False, **GIVEN
        )


@of(OPACUS)
def noise_that_repeats() -> None:
    """Its noise follows `torch.manual_seed` by default, and whoever knows the seed can take it off; ours does not."""
    theirs, ours = [], []
    for _ in range(2):
        torch.manual_seed(5)
        theirs.append(weights(opacus_training(network())[1]))
        torch.manual_seed(5)
        ours.append(weights(our_training(network())[0].model))
    assert torch.equal(*theirs)
    assert not torch.equal(*ours)


@of(OPACUS)
def steps_beyond_the_target() -> None:
    """Its loop goes on beyond `target_epsilon` when it makes more epochs than planned; ours ends there."""
    engine, _, _ = opacus_training(network(), passes=4, target_epsilon=2.0, epochs=1)
    assert engine.get_epsilon(delta=1e-3) > 2.1
    training, _ = our_training(network(), target_epsilon=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not [batch for batch in training]
    assert training.spent().epsilon.high <= 2.0


@of(OPACUS)
def per_example_gradients() -> None:
    """Better there: the gradient of each example is in `p.grad_sample` after the backward; here it is never formed."""
    opacus = importlib.import_module("opacus")
    model, x, y = opacus.GradSampleModule(network()), *DATA.tensors
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad_sample.shape == (60, *p.shape) for p in model.parameters())
    ours = network()
    with tp.record(ours) as tape:
        losses = F.cross_entropy(ours(x), y, reduction="none")
    assert tape.jacobian(losses).squared_norms().shape == (60,)
    assert not any(hasattr(p, "grad_sample") for p in ours.parameters())


@of(OPACUS)
def batches_of_the_loop() -> None:
    """Better there: the loop sees each batch once; here the first steps come with rehearsals."""
    assert opacus_training(network())[2] <= 6
    training, seen = our_training(network())
    assert seen > training.step_count == 6


# dp-accounting


@of(DP_ACCOUNTING)
def repeated_answers() -> None:
    """It prices ten randomized responses like one; we price ten."""
    dp_accounting = importlib.import_module("dp_accounting")
    event, zero_out = dp_accounting.RandomizedResponseDpEvent(0.5, 2), dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    theirs, ours = [], []
    for count in (1, 10):
        accountant = importlib.import_module("dp_accounting.pld").PLDAccountant(neighboring_relation=zero_out)
        accountant.compose(event, count)
        theirs.append(accountant.get_epsilon(DELTA))
        ours.append(privacy.compose([(e, n * count) for e, n in privacy.from_dp_event(event)]).epsilon(DELTA))
    assert theirs[0] == pytest.approx(theirs[1], rel=1e-6)
    assert theirs[0] == pytest.approx(ours[0].high, rel=1e-3)
    assert ours[1].low > 3 * ours[0].high


@of(DP_ACCOUNTING)
def two_sides() -> None:
    """Its PLD accountant gives one number, above the truth; we give a certified interval, which lies below it."""
    dp_accounting, pld = importlib.import_module("dp_accounting"), importlib.import_module("dp_accounting.pld")
    for noise, q, steps in HISTORIES:
        accountant = pld.PLDAccountant()
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise)), steps)
        low, high = our_epsilon((noise, q, steps))
        assert low <= high < accountant.get_epsilon(DELTA) < high * 1.01
        assert high - low < 1e-6


@of(DP_ACCOUNTING)
def without_a_framework() -> None:
    """Better there: it installs without PyTorch; our accounting runs without importing torch, but installs it."""
    assert not any(line.startswith("torch") for line in requires("dp-accounting") or ())
    assert any(line.startswith("torch") for line in requires("torch-privacy") or ())
    code = "import sys, torch_privacy.privacy; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"]


# JAX-Privacy


@of(JAX)
def examples_apart() -> None:
    """Better there: the loss gets one example at a time, so that none depends on another; here rehearsals show it."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    jax_privacy = importlib.import_module("jax_privacy")
    x, w = jnp.asarray(DATA.tensors[0].numpy()), jnp.ones(4)
    clipped = jax_privacy.clipped_grad(lambda w, x: ((x - x.mean(0)) @ w).sum(), l2_clip_norm=1.0, batch_argnums=1)
    assert np.allclose(clipped(w, x), 0)  # the mean is that of one example
    assert jax.jit(clipped)(w, x).shape == (4,)
    with pytest.raises(tp.Refused, match="depend on each other"):
        our_training(Centered())


@of(JAX)
def one_program() -> None:
    """Better there: clipping and sum compile to one program by `jax.jit`; here a private step runs uncompiled."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    jax_privacy = importlib.import_module("jax_privacy")
    clipped = jax_privacy.clipped_grad(
        lambda w, x: (x @ w) ** 2, l2_clip_norm=1.0, batch_argnums=1, keep_batch_dim=False
    )
    x = jnp.asarray(DATA.tensors[0].numpy())
    text = jax.jit(clipped).lower(jnp.ones(4), x).as_text()
    assert text.count("func.func public") == 1
    runs = []

    def backend(program: Any, _: Any) -> Callable[..., Any]:
        return lambda *inputs: (runs.append(1), program(*inputs))[1]

    model: Any = torch.compile(network(), backend=backend)
    model(DATA.tensors[0])
    assert len(runs) == 1
    training, _ = our_training(model, num_steps=2)
    assert training.step_count == 2
    assert len(runs) == 1


@of(JAX)
def correlated_noise() -> None:
    """Better there: noise correlated by buffered Toeplitz matrices too; here by bands alone."""
    assert callable(importlib.import_module("jax_privacy.matrix_factorization").buffered_toeplitz.BufferedToeplitz)
    assert hasattr(tp, "Banded")
    assert not any("toeplitz" in name.lower() for name in tp.__all__)


@of(JAX)
def lasting_ledger() -> None:
    """Its accounting is a call that one makes; here every release is in a ledger on the disk before it is used."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    jax_privacy = importlib.import_module("jax_privacy")
    x = jnp.asarray(DATA.tensors[0].numpy())
    with tempfile.TemporaryDirectory() as folder:
        before = sorted(Path(folder).iterdir())
        clipped = jax_privacy.clipped_grad(lambda w, x: (x @ w).sum(), l2_clip_norm=1.0, batch_argnums=1)
        privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
        privatizer.update(clipped(jnp.ones(4), x), privatizer.init(jnp.ones(4)))
        assert sorted(Path(folder).iterdir()) == before
        run = Path(folder) / "run"
        model = network()
        training = tp.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, **OURS, num_steps=2, noise_multiplier=1.0,
            run_folder=run,
        )  # fmt: skip
        counted = []
        training.optimizer.register_step_pre_hook(
            lambda *_: counted.append(sum(n for _, n in privacy.Ledger.read(run / "ledger.jsonl").events))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for x, y in training:
                training.step(F.cross_entropy(model(x), y, reduction="none"))
        assert counted == [1, 2]


# diffprivlib


def diffprivlib_classes() -> set[str]:
    """Returns the models that diffprivlib's source defines, without importing it."""
    found = importlib.util.find_spec("diffprivlib")
    assert found is not None
    assert found.submodule_search_locations
    (folder,) = found.submodule_search_locations
    trees = [ast.parse(path.read_text()) for path in (Path(folder) / "models").glob("*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def diffprivlib_module(module: str) -> Any:
    """Imports a module of diffprivlib, with what it does not find in scikit-learn 1.9 in place."""
    tree: Any = importlib.import_module("sklearn.tree._tree")
    for name, value in (("DOUBLE", np.float64), ("DTYPE", np.float32)):
        if not hasattr(tree, name):
            setattr(tree, name, value)
    return importlib.import_module(f"diffprivlib.{module}")


@of(DIFFPRIVLIB)
def recent_scikit_learn() -> None:
    """It does not import with scikit-learn 1.9; `torch_privacy.sklearn` does."""
    assert importlib.import_module("sklearn").__version__.startswith("1.9")
    done = subprocess.run([sys.executable, "-c", "import diffprivlib"], capture_output=True, text=True)
    assert "ImportError: cannot import name" in done.stderr
    assert importlib.import_module("torch_privacy.sklearn").PrivateClassifier


@of(DIFFPRIVLIB)
def more_models() -> None:
    """Better there: random forests, naive Bayes and k-means; here networks and principal components."""
    theirs = diffprivlib_classes()
    assert {"RandomForestClassifier", "GaussianNB", "KMeans", "StandardScaler", "PCA"} <= theirs
    ours = dir(importlib.import_module("torch_privacy.sklearn"))
    assert not any(word in name for name in ours for word in ("Forest", "Bayes", "KMeans"))


@of(DIFFPRIVLIB)
def pure_epsilon() -> None:
    """Better there: a mean or a model at delta = 0 (pure epsilon); here a training has Gaussian noise and a delta."""
    mechanisms = diffprivlib_module("mechanisms")
    assert np.isfinite(mechanisms.Laplace(epsilon=1.0, delta=0.0, sensitivity=1.0, random_state=1).randomise(0.5))
    training, _ = our_training(network())
    assert training.spent(1e-12).epsilon.high > training.spent(1e-3).epsilon.high
    assert np.isinf(training.profile_at_step().epsilon(0.0).high)


@of(DIFFPRIVLIB)
def composition() -> None:
    """Its budget adds up by the basic and advanced theorems; ours is exact, and less for a hundred Laplace releases."""
    accountant = diffprivlib_module("accountant").BudgetAccountant(delta=DELTA)
    for _ in range(100):
        accountant.spend(0.1, 0)
    assert privacy.compose([(privacy.Laplace(10.0), 100)]).epsilon(DELTA).high < 0.95 * accountant.total()[0]
