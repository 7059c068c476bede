# SPDX-License-Identifier: Apache-2.0
"""Scores the canaries of an audited training, by their losses or by their parts in the releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import privacy
from ..jacobian.tape import Tape
from ..mechanisms.base import Mechanism, added
from ..mechanisms.clipping import MicroBatches
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.sums import Recording, Summation
from ..model_check.rehearsal.turn import Turn
from ..sampling.batches import Batches, BatchRequest, split
from ..sampling.canaries import WithCanaries
from ..sampling.variants import DatasetExamples
from ..support.draws import IN_EVAL
from ..support.model_state import ModelTensors
from ..support.own_draws import randperm
from ..support.validate import Refused
from .callbacks import Listener
from .draws import Share
from .rehearsals import Part, one_turn
from .release import Releases
from .settings import TrainingSettings
from .state import State

LENGTH = 1e4  # of a gradient canary, in units of the sensitivity: it is always clipped
UNLIMITED = 100.0  # memory budget: all rows are kept
NORMAL_QUARTILE = 0.6745
FEWEST_FOR_SPREAD = 50  # canaries, to estimate how much they disturb each other
LEAST_OBSERVED = 256  # canaries that are handed out together

Take = Callable[[Any, Tensor], None]


@dataclass
class Observed:
    """Holds what an attacker knows of m canaries after T steps, for a score of one's own.

    ``projections[t, i]`` is the product of release t, less the known sum of all other examples, with the direction of
    canary i, divided by the standard deviation of its noise: normal with variance 1 and mean ``signals[t, i]`` if
    canary i joined the step, else 0.
    """

    losses_before: Tensor | None = None  # (m,) losses of the canaries before the first step, in eval mode
    losses_after: Tensor | None = None  # (m,) the same, after the last step
    projections: Tensor | None = None  # (T, m)
    signals: Tensor | None = None  # (T, m)
    log_ratio: Tensor | None = None  # (m,) logarithm of the likelihood ratio, in against out, of all steps


@dataclass
class CanaryScores:
    """Observes the training on a data set with canaries.

    Args:
        data: the data set.
        by_losses: hands the canaries out before the first step and after the last, for their losses.
        by_releases: computes the canaries' directions before every step, and their products with its release.
        keeps_steps: keeps the products of every step, (T, m), not only their likelihood ratio.
    """

    data: WithCanaries
    by_losses: bool
    by_releases: bool
    keeps_steps: bool = False
    observed: Observed = field(default_factory=Observed)
    is_complete: bool = False  # once the last step was made

    def __post_init__(self) -> None:
        self._losses: list[tuple[int, Tensor]] = []
        self._rows: dict[tuple[int, str], Any] = {}  # first canary and group of parameters -> their Jacobian
        self._known: dict[str, Tensor] = {}  # sum of the step's examples that are no canaries
        self._entries: dict[str, Tensor] = {}  # (m,) each gradient canary's entry of a parameter
        self._steps: list[tuple[Tensor, Tensor]] = []
        self._made, self._before, self._of_epoch = 0, torch.zeros(0), torch.zeros(0)  # of an epoch
        if self.by_releases:
            self.observed.log_ratio = torch.zeros(self.data.num_canaries, dtype=torch.float64, device="cpu")

    # Losses

    def take_losses(self, first: int, views: int) -> Take:
        """Returns the function that takes the losses of some canaries, the first of which has this number."""
        return lambda _, losses: self._losses.append((first, losses.detach().view(-1, views).mean(1).double().cpu()))

    def conclude_losses(self, *, after: bool) -> None:
        """Puts the losses taken so far together."""
        losses = torch.cat([part for _, part in sorted(self._losses, key=lambda pair: pair[0])])
        self._losses = []
        if after:
            self.observed.losses_after = losses
        else:
            self.observed.losses_before = losses

    # Releases

    def begin_step(self) -> None:
        """Forgets rows and sums of the last step."""
        self._rows, self._known = {}, {}

    def take_rows(self, first: int, mechanism: Mechanism, summation: Summation) -> Take:
        """Returns the function that keeps the rows of some canaries, the first of which has this number."""

        def take(recording: Recording, losses: Tensor) -> None:
            recording.clipped_sum(
                losses,
                mechanism.groups(list(recording.parameters)),
                None,
                merging=summation.merging,
                may_miss=recording.parameters,
                memory_budget=UNLIMITED,
                observe=lambda rows, group: self._rows.update({(first, group): rows}),
            )

        return take

    def take_known(self, mechanism: Mechanism, summation: Summation) -> Take:
        """Returns the function that adds the clipped sum of examples that are no canaries to what is known."""

        def take(recording: Recording, losses: Tensor) -> None:
            sums = recording.clipped_sum(
                losses,
                mechanism.groups(list(recording.parameters)),
                summation,
                merging=summation.merging,
                may_miss=recording.parameters,
            )
            self.know(sums)

        return take

    def know(self, sums: Mapping[str, Tensor]) -> None:
        """Adds a sum over examples that are no canaries to what the attacker knows of the step."""
        copies = {name: total.clone() for name, total in sums.items()}  # the noise is added to the sums in place
        self._known = added(self._known, copies)

    def note_release(
        self,
        release: Mapping[str, Tensor],
        stddevs: Mapping[str, float],
        summation: Callable[[int], Summation],
        sampling_probability: float,
        *,
        same_epoch: bool = False,
    ) -> None:
        """Compares a release with the directions of the canaries, and adds what it shows to the log-ratio.

        The likelihood ratio of a step is that of a normal variable with mean 0 against the mixture of the means 0 and
        μ with weights 1 - q and q: ``1 + q (r - 1)``, r the ratio of the means. Of the steps of one epoch, in which a
        canary has one batch, it is ``1 + q Σ (r - 1)``. For records that disturb each other, the variance is that seen
        among them.
        """
        unknown = {name: total - self._known[name] if name in self._known else total for name, total in release.items()}
        products = torch.zeros(self.data.num_canaries, dtype=torch.float64, device="cpu")
        squares = torch.zeros_like(products)
        for (first, group), rows in self._rows.items():
            size = rows.num_examples
            along, square = summation(size).responses(rows, group, unknown, stddevs)
            products[first : first + size] += along.double().cpu()
            squares[first : first + size] += square.double().cpu()
        signals = squares.sqrt()
        projections = torch.where(signals > 0, products / signals, 0)
        variance = self._variance(projections[signals > 0])
        q = sampling_probability
        exponent = (projections * signals - squares / 2) / variance
        exponent = torch.where(signals > 0, exponent, 0)
        assert self.observed.log_ratio is not None
        if not same_epoch:
            self._made, self._before, self._of_epoch = 0, self.observed.log_ratio, torch.full_like(products, -np.inf)
        self._made, self._of_epoch = self._made + 1, torch.logaddexp(self._of_epoch, exponent)
        rest = max(1 - self._made * q, 0.0)
        log_rest = torch.tensor(np.log(rest) if rest else -np.inf, device="cpu")
        self.observed.log_ratio = self._before + torch.logaddexp(log_rest, np.log(q) + self._of_epoch)
        if self.keeps_steps:
            self._steps.append((projections.float(), signals.float()))
        self.begin_step()

    def _variance(self, projections: Tensor) -> float:
        """Returns the variance of projections with noise of variance 1, which other canaries may disturb."""
        if not self.data.are_records or len(projections) < FEWEST_FOR_SPREAD:
            return 1.0
        deviation = (projections - projections.median()).abs().median() / NORMAL_QUARTILE
        return max(1.0, float(deviation) ** 2)

    def conclude(self) -> Observed:
        """Returns what was observed in the whole training."""
        if self._steps:
            self.observed.projections, self.observed.signals = (
                torch.stack(list(part)) for part in zip(*self._steps, strict=True)
            )
        return self.observed

    # Gradient canaries

    def gradient_losses(
        self, tape: Recording, parameters: Mapping[str, Tensor], chosen: Tensor, length: float
    ) -> Tensor:
        """Returns losses with the gradients of the chosen gradient canaries, recorded on the tape."""
        entries = {name: part[chosen] for name, part in self._entries_of(parameters).items()}
        with torch.enable_grad(), tape:
            values = [F.embedding(part, parameters[name].reshape(-1, 1)).squeeze(1) for name, part in entries.items()]
            return length * torch.stack([value.to(values[0].device) for value in values]).sum(0)

    def _entries_of(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._entries:
            return self._entries
        m, generator = self.data.num_canaries, torch.Generator().manual_seed(0)
        large = [name for name, p in parameters.items() if p.numel() >= m]
        if large:
            self._entries = {
                name: randperm(p.numel(), generator=generator)[:m].to(p.device)
                for name, p in parameters.items()
                if name in large
            }
            return self._entries
        total = sum(p.numel() for p in parameters.values())
        raise Refused(
            f"tp.audit: GradientCanaries({m}) need a trained parameter with {m} entries, one for each; the largest has "
            f"{max((p.numel() for p in parameters.values()), default=0)} of {total} in all. Take fewer canaries."
        )


class Observation(Listener):
    """Hands the canaries of an audit out through the user's loop, and adds gradient canaries to the sums.

    Args:
        data: data set with canaries, and the object that scores them, if any.
        settings, mechanism, batches: those of the training.

    Raises:
        Refused: the mechanism has no scores of this kind.
    """

    def __init__(self, data: WithCanaries, settings: TrainingSettings, mechanism: Mechanism, batches: Batches):
        self._data, self._settings, self._mechanism, self._batches = data, settings, mechanism, batches
        self._scores: CanaryScores | None = data.scores
        if isinstance(settings.unscheduled, MicroBatches) and (self._by_releases or not data.are_records):
            raise Refused(
                "tp.audit: with MicroBatches a canary has no gradient of its own, so releases cannot be scored. Take "
                'score="loss", and records as canaries.'
            )
        if settings.correlation is not None and (self._by_releases or not data.are_records):
            raise Refused(
                "tp.audit: with correlation= a release shows what earlier ones did, so that it cannot be scored alone. "
                'Take score="loss", and records as canaries.'
            )
        if isinstance(settings.unscheduled, Sketched) and not data.are_records:
            raise Refused(
                f"tp.audit: GradientCanaries cannot be used with clipping={settings.clipping!r}, which estimates norms "
                "in the model's forward. Pass records as canaries."
            )

    @property
    def _by_releases(self) -> bool:
        return self._scores is not None and self._scores.by_releases

    def batches_before_step(self, state: State) -> Iterator[Part]:
        """Yields what the scores need before a step: the canaries, and each (micro)batch without them."""
        scores, releases, tensors, step = self._scores, state.releases, state.tensors, state.step
        if scores is None:
            return
        if scores.by_losses and step == 0 and scores.observed.losses_before is None:
            yield from self._losses(scores, releases, step)
            scores.conclude_losses(after=False)
        if not scores.by_releases:
            return
        scores.begin_step()
        if not self._data.are_records:
            everyone = np.arange(self._data.num_canaries)
            tape = self._mechanism.exact_recorder(tensors, len(everyone) * self._settings.views)
            losses = self._gradient_losses(scores, tape, tensors, everyone)
            scores.take_rows(0, self._mechanism, self._mechanism.summation(None, len(everyone)))(tape, losses)
            return
        for first, canaries in self._canaries():
            take = scores.take_rows(first, self._mechanism, self._mechanism.summation(None, len(canaries)))
            yield self._part(canaries, take, releases, step)
        for share in releases.draws.parts(step):
            keep = ~self._data.is_canary(share.indices)
            known = share.indices[keep]
            if len(known):
                summation = self._mechanism.summation(share.units_of(keep), len(known))
                take = scores.take_known(self._mechanism, summation)
                yield self._part(known, take, releases, step)

    def after_release(self, release: Mapping[str, Tensor], stddevs: Mapping[str, float], state: State) -> None:
        """Scores the canaries by a release."""
        if self._scores is not None and self._scores.by_releases:
            self._scores.note_release(
                release,
                stddevs,
                lambda size: self._mechanism.summation(None, size),
                self._settings.sampling_probability,
                same_epoch=isinstance(state.releases.plan.at(state.step), privacy.LaterBatch),
            )

    def batches_at_end(self, state: State) -> Iterator[Part]:
        """Yields what the scores need after the last step."""
        if self._scores is not None:
            if self._scores.by_losses:
                yield from self._losses(self._scores, state.releases, state.step)
                self._scores.conclude_losses(after=True)
            self._scores.is_complete = True

    def completed(self, sums: dict[str, Tensor], state: State) -> dict[str, Tensor]:
        """Returns the sums with the clipped gradients of the step's canaries, if these are gradients."""
        scores, releases, tensors, step = self._scores, state.releases, state.tensors, state.step
        if self._data.are_records or scores is None:
            return sums
        scores.know(sums)
        chosen = releases.draws.gradient_canaries(step)
        if not len(chosen):
            return sums
        size, part = len(chosen) * self._settings.views, len(releases.draws.parts(step))
        tape = self._mechanism.recorder(tensors, releases.noise.key, step, part, size)
        assert isinstance(tape, Tape), "norms are exact"
        summation = self._mechanism.summation(None, len(chosen))
        of_canaries = tape.clipped_sum(
            self._gradient_losses(scores, tape, tensors, chosen),
            self._mechanism.groups(list(tape.parameters)),
            summation,
            merging=summation.merging,
            may_miss=tape.parameters,
            memory_budget=self._settings.performance.memory_budget,
        )
        return added(sums, of_canaries)

    def _losses(self, scores: CanaryScores, releases: Releases, step: int) -> Iterator[Part]:
        for first, canaries in self._canaries():
            yield self._part(canaries, scores.take_losses(first, self._settings.views), releases, step, rows=False)

    def _canaries(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields parts of the canaries' indices, with the number of the first of each."""
        settings = self._settings
        size = settings.performance.microbatch_size or max(int(settings.expected_batch_size), LEAST_OBSERVED)
        for part in split(self._data.num_examples + np.arange(self._data.num_canaries), size):
            yield int(part[0]) - self._data.num_examples, part

    def _part(self, indices: np.ndarray, take: Take, releases: Releases, step: int, *, rows: bool = True) -> Part:
        """Returns a batch of these examples, of which nothing is released; ``take`` gets recording and losses."""
        seed = releases.draws.secret(b"observed", step, int(indices[0]))
        request = BatchRequest(indices, self._settings.views, seed)
        examples = DatasetExamples(self._batches, request, self._batches.fetch(request))
        turn = Turn(examples.batch, examples.count, rows=rows, draws=IN_EVAL, take=take)
        share = Share(indices, np.arange(len(indices)))
        return Part(examples, share, 0, is_last=False, script=one_turn(turn), rehearsed=False, thorough=False)

    def _gradient_losses(
        self, scores: CanaryScores, tape: Recording, tensors: ModelTensors, chosen: np.ndarray
    ) -> Tensor:
        numbers = torch.from_numpy(chosen).repeat_interleave(self._settings.views)
        return scores.gradient_losses(tape, tensors.trained, numbers, LENGTH * self._mechanism.sensitivity)
