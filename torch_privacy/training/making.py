# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of a training from its arguments, its mechanism included, and lets the ranks agree on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from .. import privacy
from ..mechanisms.base import ClippedSum, Mechanism
from ..mechanisms.clipping import MicroBatches, check_rule
from ..mechanisms.estimated_norms import Sketched
from ..mechanisms.estimated_norms.mechanism import SketchedSum
from ..mechanisms.gep import BGEP, GEP
from ..mechanisms.gep.mechanism import EmbeddedSum
from ..model_check.requirements import TensorsOf, check_model
from ..privacy.budget_runs import Reservation
from ..runs.folder import RunFolder
from ..sampling.collate_check import CollateCheck
from ..sampling.examples import Examples
from ..sampling.item_check import item_check
from ..sampling.shared_examples import share_examples
from ..support.model_state import attribute_tensors
from ..support.validate import Refused
from .agreement import check_ranks
from .bound_data import reserve
from .bystanders import OtherOptimizers
from .loop_checks import without_accelerate
from .loop_watch import LoopWatch
from .machine import Machine
from .own_noise import check_law
from .placement import Placement, Ranked
from .rehearsals import Rehearsals
from .resuming import Resuming
from .run_files import RunFiles, open_files
from .run_settings import settings_of
from .sampling import WHERE, StepPlan
from .settings import TrainingSettings, check_scheduler, open_ledger
from .state import Setup, State, while_alive
from .statement import Account

AGREED = "test_seed", "target_epsilon", "delta", "budget", "microbatch_size", "assume_independent"


@dataclass(frozen=True)
class Own:
    """Holds what the user trains, and with what; see `PrivateTraining` for each."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    after_update: Callable[[Any], Any] | None


def make_setup(
    placement: Placement,
    own: Own,
    examples: Examples,
    settings: TrainingSettings,
    callbacks: tuple[str, ...],
    run_folder: Path | str | RunFolder | None,
) -> tuple[Setup, RunFiles | None]:
    """Checks the arguments; returns what the training is made of, and its run folder, if it has one."""
    optimizer, scheduler = without_accelerate(own.optimizer, own.scheduler)
    ranks, inner, batches = placement.ranks, placement.model, examples.batches()
    if ranks.size > 1 and examples.canaries is not None:
        raise Refused(f"PrivateTraining: an audit works in one process, and there are {ranks.size}. Leave it out.")
    check_model(inner, optimizer)
    check_scheduler(scheduler)
    tensors_of = TensorsOf(inner, optimizer, attribute_tensors(inner), placement.of_optimizer)
    trained = tensors_of().trained
    placement.check(settings)
    mechanism = new_mechanism(settings, trained, batches.dataset)
    settings = settings.with_noise(mechanism)
    plan = settings.plan(mechanism)
    path = open_files(run_folder if ranks.is_first else None)
    of_ledger = run_folder.path if isinstance(run_folder, RunFolder) else run_folder
    ledger, files = open_ledger(of_ledger if ranks.is_first else None, settings), None
    try:
        if path is not None:
            files = RunFiles(path, settings, ranks)
            resumed = settings.for_resuming(mechanism, trained)
            written = settings_of(own.model, optimizer, scheduler, batches.dataset, trained, settings, resumed)
            files.begin(written, len(ledger) - len(settings.prior_releases))
        reservation = reserve_plan(settings, plan, ledger, batches.dataset, examples, is_first=ranks.is_first)
        account = Account(settings, plan, ledger, ranks.size, reservation, shows_owners=examples.shows_owners)
    except BaseException:
        ledger.close()
        raise
    setup = Setup(
        given=own.model,
        model=inner,
        optimizer=optimizer,
        scheduler=scheduler,
        after_update=own.after_update,
        batches=batches,
        examples=examples,
        placement=placement,
        settings=settings,
        plan=plan,
        mechanism=mechanism,
        tensors_of=tensors_of,
        ledger=ledger,
        account=account,
        callbacks=callbacks,
    )
    return setup, files


def reserve_plan(
    settings: TrainingSettings,
    plan: StepPlan,
    ledger: privacy.Ledger,
    dataset: Dataset,
    examples: Examples,
    *,
    is_first: bool,
) -> Reservation | None:
    """Reserves the price of all steps in the budget of the data, if there is one, for the run of the ledger.

    Releases before the first step that the budget has already are not drawn again.
    """
    budget = settings.budget
    if not isinstance(budget, privacy.DataBudget):
        if ledger.run:
            raise Refused(
                f"PrivateTraining: the run in {str(ledger.path)!r} draws from a budget of the data, as {ledger.run}, "
                "and budget= is missing, so that nothing says whether its steps are still reserved. Pass "
                "tp.Examples(dataset, budget=tp.Budget.open(PATH))."
            )
        return None
    releases = [*settings.prior_events, *plan.releases]
    if not is_first:
        return Reservation(budget, "", tuple(releases))
    if ledger.path is None:
        raise Refused(
            "PrivateTraining: budget= belongs to a data set, so the training needs run_folder=: if it is killed, the "
            "ledger there says what it has released."
        )
    if not ledger.run:
        raise Refused(
            f"PrivateTraining: the run in {str(ledger.path.parent)!r} was begun without a budget of the data. Resume "
            "it without budget=, or begin a new run."
        )
    prior = [(release.event, 1) for release in budget.unknown(settings.prior_releases)]
    canaries, owners = examples.canaries, settings.owners
    found = reserve(
        budget,
        [*prior, *plan.releases],
        f"{'audit' if canaries else 'training'} in {ledger.path.parent.absolute()}",
        dataset if canaries is None else canaries.examples,
        num_owners=None if owners is None else owners.count,
        run=ledger.run,
        ledger=ledger.path,
    )
    return replace(found, reserved=tuple(releases))


def agree(setup: Setup, state: State, files: RunFiles | None, resuming: Resuming) -> RunFiles | None:
    """Refuses ranks that differ in settings, weights or data; copies the ledger of rank 0 to the others.

    Returns this rank's run folder, which all ranks have if rank 0 has one.
    """
    placement, ranks = setup.placement, setup.placement.ranks
    if ranks.size > 1 and isinstance(placement, Ranked):
        machine = Machine.here(state.tensors.trained.values()).state()
        recorded = setup.settings.recorded()
        own = {name: recorded[name] for name in AGREED} | {"callbacks": [*setup.callbacks]}
        shared = own | machine | setup.for_resuming(state.tensors)
        check_ranks(ranks, placement, setup.optimizer, setup.batches, shared)
        resuming.copy_ledger()
    if ranks.from_first(files is not None) and files is None:
        return RunFiles(None, setup.settings, ranks)
    return files


def make_rehearsals(setup: Setup, state: State, training: Any) -> Rehearsals:
    """Returns the rehearsals of a training; its own objects are not variables of the user's loop."""
    settings, batches = setup.settings, setup.batches
    assumed, owners = settings.assume_independent is not None, settings.owners
    known = [setup.given, setup.optimizer, setup.scheduler, batches.dataset, setup.canaries, setup.examples]
    watch = LoopWatch(
        setup.model,
        while_alive(training, lambda alive: [alive, *known], []),
        setup.optimizer,
        OtherOptimizers(setup.optimizer, while_alive(training, lambda alive: alive._runs.present_turn(), None)),
    )
    items = None if assumed else item_check(batches.dataset, None if owners is None else owners.numbers)
    collate = None if assumed or batches.collate_fn is None else CollateCheck(batches)
    steps, epoch = setup.account.steps_allowed, 1 / settings.sampling_probability
    return Rehearsals(setup.model, state.releases.draws, assumed, steps, epoch, watch, items, collate)


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
