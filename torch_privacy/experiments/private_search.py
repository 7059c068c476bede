# SPDX-License-Identifier: Apache-2.0
"""Searches an experiment's settings on the private data and records the price of the choice in the ledger.

Every run is an exact private training, ranked by a noisy count of correct predictions on held-out examples. The number
of runs is random and secret, and only the best run is released: the search is one `privacy.Repeated`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from torch_privacy import privacy
from torch_privacy.experiments import load_trainable
from torch_privacy.experiments.fitting import new_training, test_score
from torch_privacy.experiments.search import TRIED, Candidate, trained
from torch_privacy.experiments.task import ACCURACY, Settings, Task, check_numbers, check_settings, number_of_steps
from torch_privacy.mechanisms.noise import Noise
from torch_privacy.privacy.budget_file import new_run
from torch_privacy.privacy.release import new_fingerprint
from torch_privacy.privacy.spent import CHOICE_OF_SETTINGS
from torch_privacy.privacy.summary import attacker_as_json
from torch_privacy.runs.folder import RunFolder
from torch_privacy.support import validate as _check
from torch_privacy.training.bound_data import reserve
from torch_privacy.training.search import search_privately
from torch_privacy.training.weights import has_diverged

HELD_OUT = 0.1  # share of the private training data on which runs are ranked
CALIBRATIONS = 10  # halvings of the range of one run's epsilon
TABLE, SMALLEST_DELTA = 200, 1e-12  # entries of the table for runs of several kinds, and its last delta


class PrivateSearch:
    """A search on the private data, priced as one event.

    Args:
        experiment: its name; it must be scored by accuracy and release nothing but noisy sums of gradients.
        candidates: settings to draw from.
        mean_runs: expected number of runs.
        distribution: of the number of runs, as in `privacy.Repeated`.
        score_noise: standard deviation of the noise on the count of correct predictions, in examples.
        fixed: settings of all candidates; ``target_epsilon`` is for the whole search.
    """

    def __init__(
        self,
        experiment: str,
        candidates: Sequence[Candidate],
        *,
        mean_runs: float,
        distribution: str,
        score_noise: float,
        **fixed: Any,
    ):
        _check.positive("search", score_noise=score_noise)
        self._experiment, self._study = experiment, load_trainable(experiment)
        self._mean_runs, self._distribution, self._score_noise = mean_runs, distribution, score_noise
        self.candidates = [self._study.settings(**{**fixed, **candidate}) for candidate in candidates]
        self._target, self.delta = self.candidates[0].target_epsilon, self.candidates[0].delta
        task = self._checked_task()
        kept = (~_held_out(len(task.train))).nonzero()[0]  # pyright: ignore[reportArgumentType]
        self._kept = len(kept)
        for settings in self.candidates:
            check_numbers(settings)
            check_settings(settings, self._kept)
        given = [settings.noise_multiplier or 0.0 for settings in self.candidates]
        self.noise = given if self._target is None else self._calibrated(self._target)
        self.event = self._event(self.noise)

    def run(self, folder: RunFolder, budget: privacy.DataBudget | None = None) -> dict[str, Any]:
        """Searches; writes the winner's model, the statement of the whole search, and the results into a new folder.

        The ledger has its price before the first run; nothing else is written before the search has ended. Its
        running time shows roughly how many runs were made, so it must be kept from anybody who must not know that
        number: statement and files have the date of the start. Its price is drawn from the ``budget`` of the data, if
        there is one.
        """
        start = datetime.now(UTC)
        if budget is not None:
            budget.check([(self.event, 1)])
        folder.create()
        try:
            ledger = privacy.Ledger(folder.ledger, run="" if budget is None else new_run())
            if budget is not None:
                data, what = self._checked_task().train, f"search in {folder.path.absolute()}"
                reservation = reserve(budget, [(self.event, 1)], what, data, run=ledger.run, ledger=folder.ledger)
                reservation.begin()
                reservation.settle()  # its price does not depend on how it ends
            ledger.record(self.event, 0, new_fingerprint("search"))
            ledger.close()
            with warnings.catch_warnings():  # those of runs that did not win are no release, nor is their number
                warnings.simplefilter("ignore")
                found = search_privately(self._one_run, range(len(self.candidates)), self.event)
            if found is None:
                raise ValueError(
                    "search: the number of runs drawn was 0, which costs as much as any other number: "
                    f"{folder.ledger} has the price. Use --stopping geometric or logarithmic, which make at least one."
                )
            if not found.result:
                raise ValueError(
                    f"search: the weights of every run have diverged, and {folder.ledger} has the price. Try smaller "
                    "learning rates or clip norms."
                )
            results = self._results(found.candidate, found.score)
            folder.write_model(found.result["model"])
            drawn = {} if budget is None else {"data_budget": budget.state.as_json()}
            statement = self._statement(found.result["statement"], results)
            folder.write_json(folder.privacy, statement | {"date": start.isoformat(timespec="seconds")} | drawn)
            settings = asdict(self.candidates[found.candidate])
            folder.write_settings({"experiment": self._experiment, **settings}, folder.write_json)
            folder.write_checked(folder.results, results)
            return results
        finally:
            folder.unlock()
            for path in (*folder.path.iterdir(), folder.path):  # else their dates say how long the search took
                os.utime(path, (start.timestamp(), start.timestamp()))

    def _checked_task(self) -> Task:
        """Returns the first candidate's task; raises a ``ValueError`` if the search cannot price its runs."""
        settings = replace(self.candidates[0], target_epsilon=None, noise_multiplier=1.0)
        check_numbers(settings)
        task = self._study.task(settings)
        if task.score is not ACCURACY:
            raise ValueError(
                f"search: {self._experiment} must be scored by accuracy, so that a noisy count can rank runs."
            )
        training = new_training(settings, task, None)
        if training.settings.prior_releases or not isinstance(training.event, privacy.SubsampledGaussian):
            raise ValueError(
                f"search: the runs of {self._experiment} release more than noisy sums of gradients, which a private "
                "search cannot price. Search on public data: --on public --stand-in DIR."
            )
        return task

    def _one_run(self, number: int) -> tuple[float, dict[str, Any]]:
        """Trains with one candidate; returns its noisy score, and what is released if it wins; none if it diverged."""
        settings = replace(self.candidates[number], target_epsilon=None, noise_multiplier=self.noise[number])
        task = self._study.task(settings)
        held_out = _held_out(len(task.train))  # pyright: ignore[reportArgumentType]
        training = trained(settings, replace(task, train=Subset(task.train, np.flatnonzero(~held_out).tolist())))
        if has_diverged(training.model):
            return -math.inf, {}
        ranked_on = replace(task, test=Subset(task.train, np.flatnonzero(held_out).tolist()))
        right = round(test_score(ranked_on, training.model) * int(held_out.sum()))
        count = {"right": torch.tensor([right], dtype=torch.float32)}
        Noise(None).add_to(0, count, self._score_noise)
        state = {name: tensor.contiguous() for name, tensor in training.model.state_dict().items()}
        released = {"model": safetensors.torch.save(state), "statement": training.statement()}
        return float(count["right"]) / int(held_out.sum()), released

    def _event(self, noise: Sequence[float]) -> privacy.Repeated:
        """Returns the event of the search, given a noise multiplier for every candidate."""
        runs = list(dict.fromkeys(self._steps(*one) for one in zip(self.candidates, noise, strict=True)))
        run = runs[0] if len(runs) == 1 else (worst_of(runs), 1)
        count = privacy.Gaussian(self._score_noise)
        return privacy.Repeated((run, (count, 1)), self._mean_runs, self._distribution)

    def _steps(self, settings: Settings, noise_multiplier: float) -> tuple[privacy.SubsampledGaussian, int]:
        probability = settings.expected_batch_size / self._kept
        event = privacy.SubsampledGaussian(noise_multiplier, probability, privacy.NeighboringRelation.REPLACE_SPECIAL)
        return event, number_of_steps(settings, self._kept)

    def _calibrated(self, target: float) -> list[float]:
        """Returns noise multipliers with which every candidate's run costs the same, and the search the target."""
        low, high, best = 0.0, target, None
        for _ in range(CALIBRATIONS):
            middle = (low + high) / 2
            noise = [self._noise_for(settings, middle) for settings in self.candidates]
            if privacy.compose([(self._event(noise), 1)]).epsilon_high(self.delta) <= target:
                low, best = middle, noise
            else:
                high = middle
        if best is None:
            allowed = (
                f"is too small for {self._mean_runs:g} runs ranked with noise of {self._score_noise:g} examples. Use a "
                "larger target, fewer runs or more noise on the score."
            )
            raise _check.InvalidValue("search", "target_epsilon", target, allowed)
        return best

    def _noise_for(self, settings: Settings, epsilon: float) -> float:
        event, steps = self._steps(settings, 1.0)
        probability = event.sampling_probability
        return privacy.calibrate(epsilon, self.delta, sampling_probability=probability, num_steps=steps)

    def _results(self, number: int, score: float) -> dict[str, Any]:
        settings = self.candidates[number]
        return {
            "experiment": self._experiment,
            "chosen": {name: getattr(settings, name) for name in TRIED},
            "noise_multiplier": self.noise[number],
            "noisy_score": score,
            "num_candidates": len(self.candidates),
            "mean_runs": self._mean_runs,
            "delta": self.delta,
            "epsilon": privacy.compose([(self.event, 1)]).epsilon(self.delta)._asdict(),
        }

    def _statement(self, statement: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        """Returns the winner's statement, with the release of the whole search in place of its own."""
        return statement | {
            "target_epsilon": self._target,
            "epsilon": results["epsilon"],
            "epsilon_of_steps_made": results["epsilon"],
            "attacker": attacker_as_json(privacy.compose([(self.event, 1)])),
            "releases": [{"event": privacy.event_to_dict(self.event), "count": 1}],
            "treated_as_public": [*statement["treated_as_public"], "the candidates of the search"],
            "not_covered": [item for item in statement["not_covered"] if item != CHOICE_OF_SETTINGS],
        }


def worst_of(alternatives: Sequence[tuple[privacy.Event, int]]) -> privacy.KnownProfile:
    """Returns an event that costs at least as much as any of the alternatives: their largest δ(ε), as a table."""
    profiles = [privacy.compose([releases]) for releases in alternatives]
    deltas = np.geomspace(max(profile.delta(0.0).high for profile in profiles), SMALLEST_DELTA, TABLE).tolist()
    table = [(max(profile.epsilon_high(delta) for profile in profiles), delta) for delta in deltas]
    epsilons, deltas = zip(*((epsilon, delta) for epsilon, delta in table if epsilon <= 600), strict=True)
    return privacy.KnownProfile(epsilons, deltas)


def _held_out(num_examples: int) -> NDArray[np.bool_]:
    """Returns a mask of the examples kept for ranking: a public coin for each index, independent of all others."""
    return np.random.default_rng(0).random(num_examples) < HELD_OUT
