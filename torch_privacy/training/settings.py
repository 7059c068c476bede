# SPDX-License-Identifier: Apache-2.0
"""What is asked of a training's arguments, and what is made of them: mechanism, noise, ledger."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from .. import privacy
from .._validate import Refused, positive, whole
from ..batches import share_examples
from ..clipping import ClippingRule, MicroBatches, check_rule
from ..estimated_norms.mechanism import SketchedSum
from ..gep.mechanism import EmbeddedSum
from ..gep.settings import BGEP, GEP
from ..mechanism import ClippedSum, Mechanism
from .statement import check_delta

if TYPE_CHECKING:
    from .loop import PrivateTraining

WHERE = "PrivateTraining"


def check_numbers(training: PrivateTraining, num_workers: int) -> None:
    """Raise a ``ValueError`` for what is out of range."""
    n, delta = training.num_examples, training.delta
    positive(WHERE, expected_batch_size=training.expected_batch_size, memory_budget=training.memory_budget)
    whole(WHERE, num_steps=training.num_steps, at_least=1)
    whole(WHERE, num_workers=num_workers)
    whole(WHERE, views=training.views, at_least=1)
    if training.microbatch_size is not None:
        whole(WHERE, microbatch_size=training.microbatch_size, at_least=1)
    if training.expected_batch_size > n:
        raise ValueError(f"{WHERE}: expected_batch_size={training.expected_batch_size!r} must be at most {n} examples.")
    if delta is not None:
        check_delta(training, delta)
    if training.assume_independent is not None and not str(training.assume_independent).strip():
        raise ValueError(f"{WHERE}: assume_independent={training.assume_independent!r} must be a reason, in words.")
    strangers = [release for release in training.prior_releases if not isinstance(release, privacy.Release)]
    if strangers:
        raise ValueError(f"{WHERE}: prior_releases holds {strangers!r}; it takes privacy.Release, as pca.release_ is.")


def new_mechanism(training: PrivateTraining, clipping: ClippingRule | None, trained: Mapping[str, Tensor]) -> Mechanism:
    """What a step of the training is to release."""
    sketched, names = training.jacobian, list(trained)
    if training.perturbation is not None:
        return _embedded_sum(training, clipping, trained)
    clipping = check_rule(WHERE, "clipping", clipping)
    if isinstance(clipping, MicroBatches) and training.microbatch_size is not None:
        raise ValueError(
            f"{WHERE}: microbatch_size={training.microbatch_size!r} would cut through the groups of {clipping!r}. "
            "Leave it out."
        )
    if sketched is None:
        return ClippedSum(clipping, names, training.expected_batch_size, training.views)
    if training.views > 1:
        raise Refused(
            f"{WHERE}: views={training.views} needs exact norms, and jacobian={sketched!r} was given. Leave one of the "
            "two out; or let an item of the dataset hold all views, unfold them in the model's forward, and give "
            "the mean of their losses."
        )
    return SketchedSum(
        sketched, clipping, names, training.expected_batch_size, not_for_release=training.not_for_release
    )


def _embedded_sum(
    training: PrivateTraining, clipping: ClippingRule | None, trained: Mapping[str, Tensor]
) -> EmbeddedSum:
    perturbation = training.perturbation
    if not isinstance(perturbation, (GEP, BGEP)):
        raise ValueError(f"{WHERE}: perturbation={perturbation!r} must be a GEP(AnchorSubspace(...)) or BGEP(...).")
    kind = type(perturbation).__name__
    if training.jacobian is not None:
        raise Refused(
            f"{WHERE}: jacobian={training.jacobian!r} with perturbation={kind}(...) has no price: the residuals' norms "
            "must be exact. Leave one of the two out."
        )
    if clipping is not None:
        raise Refused(
            f"{WHERE}: clipping={clipping!r} with perturbation={kind}(...), which clips embedding and residual by "
            f"rules of their own. Leave clipping out, and give them as {kind}(..., embedding_clipping=...)."
        )
    if share_examples(perturbation.subspace.dataset, training._batches.dataset):
        raise Refused(
            f"{WHERE}: the auxiliary data of perturbation={kind}(...) hold private examples, those of dataset. The "
            "anchors' directions are released as they are and must come from public data."
        )
    return EmbeddedSum(perturbation, trained, training.expected_batch_size, training.views)


def choose_noise(training: PrivateTraining, noise_multiplier: float | None) -> float:
    """The noise multiplier: the one given, or the smallest whose steps and prior releases stay within the target."""
    target, delta = training.target_epsilon, training.delta
    q, steps = training.sampling_probability, training.num_steps
    mechanism, prior = training._mechanism, [(release.event, 1) for release in training.prior_releases]
    if (noise_multiplier is None) == (target is None):
        raise ValueError(
            f"{WHERE}: noise_multiplier={noise_multiplier!r} and target_epsilon={target!r}: give exactly one of the "
            "two."
        )
    if noise_multiplier is not None:
        positive(WHERE, noise_multiplier=noise_multiplier)
        mechanism.check_price(noise_multiplier, q, steps, delta or 1 / (10 * training.num_examples))
        return noise_multiplier
    assert target is not None
    if delta is None:
        raise ValueError(f"{WHERE}: target_epsilon needs delta, a number below 1/n such as 1e-5.")
    exact = privacy.calibrate(target, delta, sampling_probability=q, num_steps=steps)
    mechanism.check_price(exact, q, steps, delta)
    if not prior and isinstance(mechanism.event(exact, q), privacy.SubsampledGaussian):
        return exact
    spent = privacy.compose(prior).epsilon_high(delta)
    if spent >= target:
        raise ValueError(
            f"{WHERE}: target_epsilon={target!r} is spent by prior_releases, which cost {spent:.4g}. Ask for more, or "
            "put more noise into those."
        )
    return privacy.calibrate_schedule(
        lambda noise: [*prior, (mechanism.event(noise, q), steps)], target, delta, start=exact
    )


def open_ledger(run_folder: Path | str | None, prior_releases: Sequence[privacy.Release]) -> privacy.Ledger:
    """The ledger of a run, new or begun earlier, with the prior releases first."""
    path = None if run_folder is None else Path(run_folder) / "ledger.jsonl"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    ledger = privacy.Ledger.load(path) if path is not None and path.exists() else privacy.Ledger(path)
    for step, release in enumerate(prior_releases):
        ledger.record(release.event, step, release.fingerprint)
    return ledger


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose steps want to know a loss."""
    if scheduler is None:
        return
    wanted = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        raise Refused(
            f"{WHERE}: scheduler={type(scheduler).__name__} asks for {', '.join(wanted)} at every step. A loss or an "
            "accuracy of the training data is private, and no noise is added to it. Take a schedule of the step alone, "
            "such as CosineAnnealingLR; or call the scheduler yourself, with a score of public data."
        )


def check_alone() -> None:
    """Refuse several processes: each would train a model of its own, with its own epsilon."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise Refused(
            f"{WHERE}: torch.distributed runs with {distributed.get_world_size()} processes, and private training over "
            "several of them is not there yet: each would train another model, with an epsilon of its own. Train in "
            "one process."
        )
