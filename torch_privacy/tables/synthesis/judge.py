# SPDX-License-Identifier: Apache-2.0
"""Compares synthetic rows with real ones, exactly: for the owner of the data, as no epsilon covers it."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ... import privacy
from ...mechanisms.clipping import Flat
from ...privacy.audit import Audit, audit_scores
from ...sampling.examples import Examples
from ...support import random_state
from ...training import MovingAverage, PrivateTraining
from ...training.audit import audit as audit_training
from ...training.sampling import Poisson
from ..cells import read_cells
from ..defaults import defaults
from ..encode import Encoded, Encoder
from ..model import losses, new_model
from ..scores import scores_of_classes, scores_of_numbers
from . import plan
from .cells import Codes, ColumnGrid
from .chain import marginal
from .marginals import Marginals
from .network_training import NetworkTraining
from .run import GeneratorRun
from .synthesizer import Synthesizer

if TYPE_CHECKING:
    from pandas import DataFrame

EPOCHS, BATCH, RATE = 10, 512, 0.005  # of models without privacy


@dataclass(frozen=True)
class Judgement:
    """Holds what synthetic rows keep of the real rows they were learnt from; it is exact, so it is for the owner.

    Args:
        one_way: column -> total variation distance of its values between synthetic and real rows, in [0, 1].
        two_way: (column, column) -> the same of a pair of columns.
        sampling: the mean distance of pairs between held-out and training rows: what chance alone makes.
        lost: column -> its categories that real rows have, and synthetic ones have not, with their numbers of rows.
        scores: test scores on held-out real rows, by what the model was trained on; {} without a target.
        measure: of the scores: "accuracy", or "RMSE".
        areas: AUC of the same models; {} if the target is a number, or if all held-out rows are of one class.
        num_test: number of held-out rows that are scored.
        errors: of "accuracy" and "AUC", or "RMSE": the standard error of each score, by what the model was trained on.
    """

    one_way: Mapping[str, float]
    two_way: Mapping[tuple[str, str], float]
    sampling: float
    lost: Mapping[str, Mapping[str, int]]
    scores: Mapping[str, float]
    measure: str
    areas: Mapping[str, float]
    num_test: int
    errors: Mapping[str, Mapping[str, float]]


def judge(
    synthesizer: Synthesizer, train: DataFrame, test: DataFrame, *, private: GeneratorRun | None = None, seed: int = 0
) -> Judgement:
    """Judges synthetic rows, as many as there are training rows.

    Args:
        synthesizer: made from the training rows.
        train: the real rows that it was made from.
        test: real rows that were held out.
        private: the run, to train a private classifier directly on its rows with the same epsilon; None for none. It
            spends this epsilon once more, so its score is for the owner alone.
        seed: of the rows and of the models.
    """
    grid, rows = synthesizer.grid, synthesizer.draw(len(train), seed)
    real, drawn, held_out = grid.encode(train), grid.encode(rows), grid.encode(test)
    names, places = grid.names, range(len(grid.sizes))
    two_way = {(names[i], names[j]): distance(real, drawn, (i, j), grid) for i, j in itertools.combinations(places, 2)}
    chance = [distance(real, held_out, pair, grid) for pair in itertools.combinations(places, 2)]
    scored = {}, "", {}, 0, {}
    if grid.schema.target in names:
        scored = _scores(grid, train, test, rows, private, seed)
    return Judgement(
        {names[i]: distance(real, drawn, (i,), grid) for i in places},
        two_way,
        float(np.mean(chance)) if chance else 0.0,
        _lost(grid, train, rows),
        *scored,
    )


def distance(first: Codes, second: Codes, columns: Sequence[int], grid: ColumnGrid) -> float:
    """Returns the total variation distance between two tables in some columns, ``½ Σ |p - q|``."""
    p, q = (marginal(codes, columns, grid.sizes) / len(codes) for codes in (first, second))
    return float(np.abs(p - q).sum() / 2)


def _lost(grid: ColumnGrid, train: DataFrame, rows: DataFrame) -> dict[str, dict[str, int]]:
    found = {}
    for column in grid.columns:
        if column.kind != "category":
            continue
        cells, kept = read_cells(train[column.name], grid.schema.rules), set(rows[column.name])
        counts = np.bincount(cells.codes[cells.codes >= 0], minlength=len(cells.values)).tolist()
        lost = {text: count for text, count in zip(cells.values, counts, strict=True) if count and text not in kept}
        if lost:
            found[column.name] = dict(sorted(lost.items(), key=lambda item: -item[1]))
    return found


def _scores(
    grid: ColumnGrid, train: DataFrame, test: DataFrame, rows: DataFrame, private: GeneratorRun | None, seed: int
) -> tuple[dict[str, float], str, dict[str, float], int, dict[str, dict[str, float]]]:
    """Returns scores of the same model, trained on synthetic rows, on real ones with privacy, and without."""
    encoder = Encoder(grid.schema)
    real, held_out = encoder.encode(train), encoder.encode(test)
    known = held_out.has_target
    if not known.any():
        return {}, "", {}, 0, {}
    is_class = grid.schema.task == "classification"
    measure = "accuracy" if is_class else "RMSE"
    found: dict[str, dict[str, float]] = {measure: {}, "AUC": {}}
    errors: dict[str, dict[str, float]] = {measure: {}, "AUC": {}}

    def score(name: str, outputs: Tensor) -> None:
        targets = _targets(held_out)[known]
        if is_class:
            probabilities = outputs.double().softmax(1).numpy()
            scored = scores_of_classes(probabilities, targets.numpy(), encoder.schema.classes)
        else:
            scored = scores_of_numbers(*(encoder.target_scale * one.numpy() for one in (outputs.clamp(-1, 1), targets)))
        for one in scored["measures"]:
            if one["name"] in found:
                found[one["name"]][name], errors[one["name"]][name] = one["value"], one["error"]

    def outputs_of(model: Any) -> Tensor:
        with torch.no_grad():
            return model(held_out.inputs[known])

    drawn = encoder.encode(rows.reindex(columns=train.columns, fill_value=""))  # ignored columns are empty
    score("synthetic rows", outputs_of(_trained(encoder, drawn, seed)))
    if private is not None:
        score("real rows, with the same epsilon", outputs_of(_privately(encoder, real, private, seed)))
    score("real rows, without privacy", outputs_of(_trained(encoder, real, seed)))
    targets, n = _targets(real)[real.has_target], int(known.sum())
    shares = targets.bincount(minlength=len(encoder.schema.classes)).log() if is_class else targets.mean()
    score("nothing: always the same guess", shares.expand(n, *shares.shape))
    return found[measure], measure, found["AUC"], n, errors


def _targets(encoded: Encoded) -> Tensor:
    assert encoded.targets is not None
    return encoded.targets


def _trained(encoder: Encoder, encoded: Encoded, seed: int) -> Any:
    """Returns a model that is trained without privacy."""
    with random_state.seeded(seed):
        model = new_model(encoder.schema).float()
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        inputs, targets = encoded.inputs, _targets(encoded)
        for _ in range(EPOCHS):
            for part in torch.randperm(len(inputs)).split(BATCH):
                optimizer.zero_grad()
                losses(model(inputs[part]), targets[part]).mean().backward()
                optimizer.step()
    return model.eval()


def _privately(encoder: Encoder, encoded: Encoded, run: GeneratorRun, seed: int) -> Any:
    """Returns a model that is trained with the run's epsilon, the learning of the schema included."""
    settings = run.settings
    classes = len(encoder.schema.classes) or math.inf
    found = defaults(run.source.num_units, settings.epsilon, settings.delta, classes=classes)
    with random_state.seeded(seed):
        model = new_model(encoder.schema).float()
    optimizer = found.new_optimizer(model)
    average = MovingAverage(model, optimizer, found.average)
    training = PrivateTraining(
        model,
        optimizer,
        Examples(encoded.dataset(), **run.source.of_owners),
        expected_batch_size=found.expected_batch_size,
        num_steps=found.num_steps,
        sampling=Poisson(),
        clipping=Flat(found.clip_norm),
        target_epsilon=settings.epsilon,
        delta=settings.delta,
        prior_releases=run.prior,
    )
    for inputs, targets in training:
        training.step(losses(model(inputs), targets))
    return average.model.eval()


def audit(run: GeneratorRun, count: int, *, significance: float = 0.05) -> Audit:
    """Audits the generator once: it is made again, from the real rows and ``count`` canary rows.

    A fair coin decides of each canary, a row of random values, whether it is in. Scores are what an attacker makes of
    all noisy counts who knows all other rows but the canaries; of a network, how far training has lowered the row's
    loss. This spends the run's epsilon once more: its result is for the owner alone.
    """
    grid, rng = run.grid, np.random.default_rng(secrets.randbits(128))
    canaries = np.stack([rng.integers(size, size=count) for size in grid.sizes], 1)
    if run.settings.generator == "network":
        return _audit_of_network(run, canaries, significance)
    is_in = rng.random(count) < 0.5
    codes, public = np.concatenate([run.codes, canaries[is_in]]), run.public
    if public.total is not None:
        public = replace(public, total=public.total + count)  # who is out counts, too, and adds nothing
    made = Marginals(codes, np.zeros((len(codes), public.num_numeric), bool), public, secrets.token_bytes(32))
    for _ in public.releases:
        made.make()
    scores = made.released.scores(canaries, run.codes)
    profile = privacy.compose(plan.counted(public.releases))
    return audit_scores(
        scores[is_in], scores[~is_in], profile, significance=significance, delta=run.settings.delta, notes=[OF_OWNER]
    )


OF_OWNER = "The audit spends the epsilon once more, on the same rows: its numbers are for the owner of the data alone."


def _audit_of_network(run: GeneratorRun, canaries: Codes, significance: float) -> Audit:
    def train(dataset: Any) -> PrivateTraining:
        data = Examples(dataset, **run.source.of_owners)  # each canary is a person of its own
        settings = {"seed": run.settings.seed, "noise_multiplier": run.scale, "data": data}
        made = NetworkTraining(run.codes, run.grid, run.order, run.plan.training, **settings)
        for (codes,) in made.training:  # an audit observes the batches of this loop alone
            made.training.step(made.network(codes))
        return made.training

    real, others = (TensorDataset(torch.from_numpy(codes)) for codes in (run.codes, canaries))
    return audit_training(train, real, others, score="loss", significance=significance, delta=run.settings.delta)
