# SPDX-License-Identifier: Apache-2.0
"""Makes the mechanism of a training, which defines what a step releases, from its settings."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.utils.data import Dataset

from ..mechanisms.base import ClippedSum, Mechanism
from ..mechanisms.clipping import MicroBatches, check_rule
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.estimated_norms.mechanism import SketchedSum
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.gep.mechanism import EmbeddedSum
from ..sampling.shared_examples import share_examples
from ..support.validate import Refused
from .own_noise import check_law
from .schedule import WHERE
from .settings import TrainingSettings


def new_mechanism(settings: TrainingSettings, trained: Mapping[str, Tensor], dataset: Dataset) -> Mechanism:
    """Returns the mechanism of these settings; refuses one that does not fit owners, views or data."""
    way, names, size, unit = settings.unscheduled, list(trained), settings.expected_batch_size, settings.unit
    if isinstance(way, (GEP, BGEP)):
        if share_examples(way.subspace.dataset, dataset):
            raise Refused(
                f"{WHERE}: the auxiliary data of clipping={type(way).__name__}(...) hold private examples of "
                "dataset. The anchors' directions are released without noise and must come from public data."
            )
        return EmbeddedSum(way, trained, size, settings.views, unit)
    if isinstance(way, Sketched):
        _check_exact_norms_not_needed(settings, way)
        return SketchedSum(way, names, size, settings.clip_schedule, unit)
    rule = check_rule(WHERE, "clipping", way)
    if isinstance(rule, MicroBatches):
        _check_one_kind_of_mean(settings, rule)
    mechanism = ClippedSum(rule, names, size, settings.views, settings.clip_schedule, unit)
    if settings.own_noise is not None:
        num_trained = sum(parameter.numel() for parameter in trained.values())
        check_law(settings.own_noise, mechanism.sensitivity, num_trained, settings.sampling_probability)
    return mechanism


def _check_one_kind_of_mean(settings: TrainingSettings, rule: MicroBatches) -> None:
    """Refuses micro-batches of owners, and those that would be split."""
    if settings.owners is not None:
        raise Refused(
            f"{WHERE}: clipping={rule!r} with owners=: a row is the mean of an owner's gradients already. Take "
            "Flat(clip_norm), which clips each owner's mean by itself."
        )
    if (size := settings.performance.microbatch_size) is not None:
        raise ValueError(
            f"{WHERE}: performance=Performance(microbatch_size={size!r}) would split the groups of {rule!r}. Leave "
            "microbatch_size out."
        )


def _check_exact_norms_not_needed(settings: TrainingSettings, sketched: Sketched) -> None:
    """Refuses estimated norms of means, which are no sums of one projection for each example."""
    if settings.shares_rows:
        raise Refused(
            f"{WHERE}: owners= with per_owner={settings.owners.per_owner} needs exact norms of means, "  # type: ignore
            f"but clipping={sketched!r} was given. Take a clipping rule such as Flat, or take per_owner=1."
        )
    if settings.views > 1:
        raise Refused(
            f"{WHERE}: views={settings.views} needs exact norms, but clipping={sketched!r} was given. Take a clipping "
            "rule such as Flat; or let an item of the dataset hold all views, unfold them in the model's forward, "
            "and pass the mean of their losses."
        )
