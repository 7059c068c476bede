# SPDX-License-Identifier: Apache-2.0
"""Trains a network for an estimator, and states what that spent."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .. import privacy
from ..mechanisms.clipping import Flat, check_rule
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.scheduled import unscheduled
from ..privacy.spent import Spent
from ..privacy.summary import attacker_as_json, interval_as_json
from ..sampling.examples import Examples
from ..support.random_state import seeded
from ..support.validate import Refused, in_range, strictly_between, whole
from ..training.averaging import MovingAverage
from ..training.loop import PrivateTraining
from ..training.sampling import number_of_steps
from ..training.settings import Performance
from .features import scaled
from .refits import Fit

Array = NDArray[Any]
Losses = Callable[[Tensor, Tensor], Tensor]

USUAL_DELTA = 1e-5
STANDARDIZED = (
    "NOT PRIVATE (column {} of X has mean 0 and standard deviation 1, as after a StandardScaler that was fitted to "
    "these data; the trained network depends on its numbers, which have no noise)"
)


@dataclass(frozen=True)
class NetworkPlan:
    """The numbers of a training that follow from the parameters and the number of examples."""

    delta: float
    batch_size: float
    num_steps: int
    releases: list[tuple[privacy.Event, int]]  # of one fit, as far as known before it


@dataclass(frozen=True)
class Target:
    """Holds what a network learns: a tensor, the losses, and what became known of the targets."""

    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    num_outputs: int = 1
    losses: Losses = lambda outputs, targets: outputs
    classes: Array | None = None
    releases: tuple[privacy.Release, ...] = ()  # that finding the classes took
    treated_as_public: tuple[str, ...] = ()
    statement: Mapping[str, Any] = field(default_factory=dict)


def default_delta(where: str, delta: float | None, num_examples: int) -> float:
    """Returns the given delta, or one that follows from the number of examples alone; it must be below 1/n."""
    n = num_examples
    delta = min(USUAL_DELTA, 1 / (10 * n)) if delta is None else delta
    strictly_between(where, 0, 1 / n, delta=delta, hint=f"It must be below 1/n for the {n} examples.")
    return delta


def prior_of(estimator: Any) -> list[privacy.Release]:
    """Returns the earlier releases that the estimator's epsilon covers, those of fitted transformers among them."""
    found, given = [], estimator.prior_releases
    for one in [given] if isinstance(given, BaseEstimator) else given:
        if isinstance(one, BaseEstimator) and not hasattr(one, "release_"):
            raise Refused(
                f"{type(estimator).__name__}.fit: prior_releases has a {type(one).__name__} that is not fitted, so "
                "what it releases is not known. Fit it first, or put the same object in front in the pipeline, without "
                "memory= there."
            )
        found.append(one.release_ if isinstance(one, BaseEstimator) else one)  # pyright: ignore
    return found


def plan_of(estimator: Any, num_examples: int) -> NetworkPlan:
    """Returns delta, batch size and number of steps; by default they are functions of the number of examples alone."""
    n, size = num_examples, estimator.batch_size
    if size is None:
        size = min(n, max(256, n // 50))
    where = type(estimator).__name__
    in_range(where, 0, n, batch_size=size, hint="It is the mean size of a batch.")
    steps = number_of_steps(None, estimator.epochs, n, size)
    delta = default_delta(where, estimator.delta, n)
    noise = privacy.calibrate(float(estimator.epsilon), delta, sampling_probability=size / n, num_steps=steps)
    return NetworkPlan(delta, size, steps, [(_step(noise, size / n), steps)])


def _step(noise_multiplier: float, sampling_probability: float) -> privacy.SubsampledGaussian:
    zero_out = privacy.NeighboringRelation.REPLACE_SPECIAL  # because the probability is batch_size / n
    return privacy.SubsampledGaussian(noise_multiplier, sampling_probability, zero_out)


def check_makers(where: str, module: Any, optimizer: Any) -> None:
    """Refuses, before anything is released, what cannot make the network or the optimizer as it will be called."""
    if isinstance(module, nn.Module):
        raise ValueError(
            f"{where}: module={type(module).__name__}(...) is a network: must be a function of the numbers of inputs "
            "and outputs that returns a new one, such as torch.nn.Linear."
        )
    if optimizer is None:
        return
    try:
        inspect.signature(optimizer).bind((), lr=0.01)
    except TypeError as error:
        raise ValueError(
            f"{where}: optimizer={optimizer!r} cannot be called as optimizer(parameters, lr=learning_rate) ({error}). "
            "Give such a function, as functools.partial(torch.optim.SGD, momentum=0.9)."
        ) from None
    except ValueError:  # it shows no signature
        pass


def check_clipping(where: str, clipping: Any) -> None:
    """Refuses, before anything is released, what is no clipping."""
    way = unscheduled(clipping)
    if way is not None and not isinstance(way, Sketched | GEP | BGEP):
        check_rule(where, "clipping", way)


def new_network(estimator: Any, num_inputs: int, num_outputs: int) -> nn.Module:
    """Returns the network with initial weights that depend on ``random_state`` alone."""
    where, widths = type(estimator).__name__, estimator.hidden_units
    seed = int(check_random_state(estimator.random_state).randint(np.iinfo(np.int32).max))
    with seeded(seed):
        if estimator.module is not None:
            network = estimator.module(num_inputs, num_outputs)
            if not isinstance(network, nn.Module):
                raise ValueError(
                    f"{where}: module={estimator.module!r} returned a {type(network).__name__}: must be a function of "
                    "the numbers of inputs and outputs that returns an nn.Module, such as torch.nn.Linear."
                )
            return network
        hidden = [widths] if isinstance(widths, (int, np.integer)) else list(widths)
        layers: list[nn.Module] = []
        for width in map(int, hidden):
            whole(where, at_least=1, hidden_units=width)
            layers += [nn.Linear(num_inputs, width, dtype=torch.float32), nn.ReLU()]
            num_inputs = width
        return nn.Sequential(*layers, nn.Linear(num_inputs, num_outputs, dtype=torch.float32))


def rows_for(network: nn.Module, x: Array, low: Array, high: Array) -> Tensor:
    """Returns the features scaled by their bounds, in the dtype of the network."""
    dtypes = (p.dtype for p in network.parameters() if p.is_floating_point())
    return torch.from_numpy(scaled(x, low, high)).to(next(dtypes, torch.float32))


def _noise_of(estimator: Any, plan: NetworkPlan, target: Target) -> tuple[float | None, float | None]:
    """Returns the target epsilon or the noise multiplier of the training; finding the classes is part of epsilon.

    A release that fails to be private with some probability is slow to calibrate with. So the noise is calibrated for
    the other releases and for the rest of delta, which is certain to be enough; the whole is then checked once.
    `PrivateTraining` knows what its other steps cost: those of estimated norms, and those of several sums.
    """
    epsilon = float(estimator.epsilon)
    if not target.releases or isinstance(unscheduled(estimator.clipping), Sketched | GEP):
        return epsilon, None
    others = [(release.event, 1) for release in prior_of(estimator)]
    ((gaussian, failing), (step, count)) = (release.event for release in target.releases), plan.releases[0]
    assert isinstance(failing, privacy.KnownProfile)
    assert isinstance(step, privacy.SubsampledGaussian)

    def releases(noise: float) -> list[tuple[privacy.Event, int]]:
        return [*others, (gaussian, 1), (_step(noise, step.sampling_probability), count)]

    left = plan.delta - sum(failing.deltas)
    noise = privacy.calibrate_schedule(releases, epsilon, left, start=step.noise_multiplier)
    while privacy.compose([(failing, 1), *releases(noise)]).epsilon_high(plan.delta) > epsilon:
        noise *= 1.001
    return None, noise


@dataclass
class Fitted:
    """A trained network, and what it spent."""

    module: nn.Module
    spent: Spent
    statement: dict[str, Any]
    num_steps: int


def check_folder(estimator: Any, fit: Fit) -> None:
    """Refuses a run folder that would not state what was spent, before anything is."""
    folder, where = estimator.run_folder, f"{type(estimator).__name__}.fit"
    if folder is None:
        return
    if (Path(folder) / "ledger.jsonl").exists():
        raise Refused(f"{where}: run_folder={str(folder)!r} has a ledger already. Give each fit a new folder.")
    if fit.earlier or fit.warning is not None:
        lacks = fit.warning or f"{len(fit.earlier)} earlier fits, which refits='count' counts"
        raise Refused(
            f"{where}: the files in run_folder={str(folder)!r} would state this training alone, and lack: {lacks}. "
            "Leave run_folder out, and save statement_."
        )


def train(
    estimator: Any, plan: NetworkPlan, network: nn.Module, data: TensorDataset, target: Target, fit: Fit
) -> Fitted:
    """Trains the network, notes in ``fit`` what was released, and returns copies without ties to the training."""
    warning = fit.warning
    training: PrivateTraining | None = None
    try:
        released = copy.deepcopy(network)
        training, mean = _new_training(estimator, plan, network, data, target)
        for x, y in training:
            training.step(target.losses(network(x), y))
        if estimator.run_folder is not None and mean is not None:
            training.write_run(model=mean.model)
        spent, statement = training.spent(), training.statement()
        warning = warning or statement.get("warning")
    finally:
        made = [(release.event, 1) for release in target.releases]
        if training is not None:
            made = training.ledger.events if made or training.step_count else []
        fit.end(made, warning)
    assert training is not None
    released.load_state_dict((network if mean is None else mean.model).state_dict())
    spent, statement = of_all_fits(fit, spent, statement, warning)
    return Fitted(released.requires_grad_(False).eval(), spent, statement, training.step_count)


def check_trainable(estimator: Any, plan: NetworkPlan, x: Array, low: Array, high: Array) -> None:
    """Makes a network and a training as `train` does, and leaves them: refuses what cannot be, before any release."""
    trial = copy.copy(estimator)
    trial.random_state, trial.run_folder, trial.budget = copy.deepcopy(estimator.random_state), None, None
    network = new_network(trial, x.shape[1], 2)
    data = TensorDataset(rows_for(network, x, low, high), torch.zeros(len(x), dtype=torch.int64))
    ((step, _),) = plan.releases
    assert isinstance(step, privacy.SubsampledGaussian)
    _new_training(trial, plan, network, data, Target(), step.noise_multiplier)


def _new_training(
    estimator: Any,
    plan: NetworkPlan,
    network: nn.Module,
    data: TensorDataset,
    target: Target,
    noise_multiplier: float | None = None,
) -> tuple[PrivateTraining, MovingAverage | None]:
    """Returns a training with this noise, by default that of the target epsilon, and the average of its weights."""
    average, mean = estimator.average, None
    make = torch.optim.Adam if estimator.optimizer is None else estimator.optimizer
    optimizer = make(network.parameters(), lr=estimator.learning_rate)
    if average is not None:
        in_range(type(estimator).__name__, 0, 1, average=average, hint="It is a share of the steps.")
        mean = MovingAverage(network, optimizer, decay=1 - 1 / max(2.0, average * plan.num_steps))
    network.train()
    given = noise_multiplier is not None
    epsilon, noise = (None, noise_multiplier) if given else _noise_of(estimator, plan, target)
    training = PrivateTraining(
        network,
        optimizer,
        Examples(data, assume_independent=estimator.assume_independent, budget=estimator.budget),
        expected_batch_size=plan.batch_size,
        num_steps=plan.num_steps,
        clipping=Flat(float(estimator.clip_norm)) if estimator.clipping is None else estimator.clipping,
        target_epsilon=epsilon,
        noise_multiplier=noise,
        delta=plan.delta,
        performance=Performance(microbatch_size=estimator.microbatch_size),
        prior_releases=(*prior_of(estimator), *target.releases),
        run_folder=estimator.run_folder,
        test_seed=estimator.test_seed,
    )
    return training, mean


def of_all_fits(fit: Fit, spent: Spent, statement: dict[str, Any], warning: str | None) -> tuple[Spent, dict[str, Any]]:
    """Returns what was spent with the earlier fits that count, and with the warnings of all."""
    if fit.earlier:
        releases = [release for past in [*fit.earlier, fit] for release in past.releases]
        profile = privacy.compose(releases)
        epsilon = profile.epsilon(spent.delta)
        text = f"{profile.statement(spent.delta)} for {len(fit.earlier) + 1} fits"
        warning = warning or next((past.warning for past in fit.earlier if past.warning), None)
        text = text if warning is None else f"{warning}: {text}"
        spent = replace(
            spent, epsilon=epsilon, text=text, planned=epsilon, is_public=warning is not None, profile=profile
        )
        events = [{"event": privacy.event_to_dict(event), "count": count} for event, count in releases]
        statement |= {"epsilon": interval_as_json(epsilon), "releases": events, "fits": len(fit.earlier) + 1}
        statement["attacker"] = attacker_as_json(profile)
    elif warning is not None and not spent.text.startswith(warning):
        spent = replace(spent, text=f"{warning}: {spent.text}", is_public=True)
    if warning is not None:
        statement |= {"private": False, "warning": warning}
    return spent, statement
