# SPDX-License-Identifier: Apache-2.0
"""Tests that a training with owners protects whole persons: sampling, rows, sums, statements, refusals."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from json_schema import violations
from oracle import one_backward_per_example
from ranked import VIEWS, case, difference, of_pair, start, whole_weights
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from trainings import (
    RULES,
    ZERO_OUT,
    clipped,
    cross_entropy,
    cross_entropy_of_pair,
    data,
    network,
    network_parameters,
    noise_of,
    parameters_of,
    private_training,
    train,
    training_of,
)

import torch_privacy as tp
from torch_privacy import privacy
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.runs.folder import RunFolder
from torch_privacy.sampling.owners import Owners, OwnerSampler, owners_of
from torch_privacy.sampling.samplers import PoissonSampler
from torch_privacy.training.draws import _cuts
from torch_privacy.training.release import Releases

SIZES = [1, 9, 2, 5, 3, 1, 7, 4, 6, 2]  # of ten owners, 40 examples in all
IDS = np.random.default_rng(0).permutation(np.repeat([f"c{i}" for i in range(10)], SIZES))
OWNERS: dict[str, Any] = {"owners": IDS, "per_owner": 3, "owner_name": "customer"}
OWNED: dict[str, Any] = {"examples": OWNERS, "expected_batch_size": 5}


def changed(settings: dict[str, Any]) -> dict[str, Any]:
    return OWNED | settings | {"examples": OWNERS | settings.get("examples", {})}


def owned(**settings: Any) -> tp.PrivateTraining:
    return training_of(**changed(settings))


def sampler_of(training: tp.PrivateTraining) -> OwnerSampler:
    key = bytes.fromhex(training.state_dict()["sampler_key"])
    return owner_sampler(training.settings.owners, training.settings.sampling_probability, key)


def owner_sampler(owners: Owners, q: float, key: bytes) -> OwnerSampler:
    return OwnerSampler(owners, PoissonSampler(owners.count, q, key=key))


def rows_by_owner(model: nn.Module, dataset: TensorDataset, sampler: OwnerSampler, step: int) -> torch.Tensor:
    """Returns the mean gradient (owners drawn, p) of each owner's drawn examples, by one backward per example."""
    x, y = dataset[sampler.indices(step)]
    examples = list(zip(x.split(1), y.split(1), strict=True))
    rows = one_backward_per_example(copy.deepcopy(model), x, cross_entropy_of_pair, examples)
    units = torch.from_numpy(sampler.units(step))
    return torch.stack([rows[units == k].mean(0) for k in units.unique()])


def sum_without_noise(
    training: tp.PrivateTraining, before: torch.Tensor, step: int, sensitivity: float
) -> torch.Tensor:
    """Returns the clipped sum of a step of plain SGD at learning rate 1."""
    moved = (before - parameters_of(training)) * training.settings.expected_batch_size
    return moved - sensitivity * PRICED_ROUNDING * noise_of(training, step)[: len(moved)]


# The sum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"performance": tp.Performance(microbatch_size=4)}, {"examples": {"views": 2}}],
    ids=["whole", "parts", "views"],
)
@pytest.mark.parametrize("rule", ["flat", "per layer", "groups", "automatic"])
def test_each_owner_is_one_row_the_mean_of_what_was_drawn(rule, settings):
    clipping, expected, sensitivity = RULES[rule]
    training = owned(clipping=clipping, num_steps=3, **settings)
    sampler, before = sampler_of(training), network_parameters()
    for x, y in training:
        step, model = training.step_count, copy.deepcopy(training.model)
        losses = cross_entropy(training.model, x, y)
        if training.step(losses.view(-1, 2) if "examples" in settings else losses):
            rows = rows_by_owner(model, data(), sampler, step)
            found = sum_without_noise(training, before, step, sensitivity)
            torch.testing.assert_close(found, expected(rows, None), rtol=1e-9, atol=1e-9)
            before = parameters_of(training)
    assert training.step_count == 3


def test_an_adaptive_rule_counts_owners():
    training = owned(clipping=tp.Adaptive(0.5, count_noise_stddev=4.0), num_steps=1)
    rows = rows_by_owner(training.model, data(), sampler_of(training), 0)
    train(training)
    count = float((rows.norm(dim=1) <= 0.5).double().sum() - len(rows) / 2)
    noisy = count + 4.0 * PRICED_ROUNDING * float(noise_of(training, 0)[-1])
    expected = tp.Adaptive(0.5, count_noise_stddev=4.0).updated(noisy, 5)
    assert training.clipping.clip_norm == pytest.approx(expected.clip_norm, rel=1e-4)


def outputs_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum(1)  # linear in x, so that the mean gradient is the gradient at the mean


def subspace() -> tp.AnchorSubspace:
    return tp.AnchorSubspace(torch.randn(20, 3, generator=torch.Generator().manual_seed(7)), 4)


AS_MEANS = {
    "GEP": lambda: {"clipping": tp.GEP(subspace(), tp.Flat(0.3), tp.Flat(0.2), 0.5)},
    "BGEP": lambda: {"clipping": tp.BGEP(subspace(), tp.Flat(0.3)), "performance": tp.Performance(microbatch_size=4)},
    "workers": lambda: {"examples": {"num_workers": 1}},
}


@pytest.mark.parametrize("name", AS_MEANS)
def test_owners_train_as_their_means_would(name):
    settings = AS_MEANS[name]()
    x, names = data().tensors[0], list(dict.fromkeys(IDS))
    means = torch.stack([x[torch.from_numpy(IDS == name)].mean(0) for name in names])
    weights = []
    for dataset, owners in ((x, {"examples": {"owners": IDS, "per_owner": 9}}), (means, {})):
        torch.manual_seed(1)
        training = training_of(
            nn.Linear(3, 2), TensorDataset(dataset), expected_batch_size=5, num_steps=3, **settings | owners
        )
        for (batch,) in training:
            training.step(outputs_of(training.model, batch))
        weights.append(parameters_of(training))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-9)


def test_an_owner_with_a_gradient_that_is_not_finite_is_left_out_as_a_whole():
    x, y = data().tensors
    x = x.clone()
    x[np.flatnonzero(IDS == "c3")[0], 0] = torch.inf
    training = owned(dataset=TensorDataset(x, y), expected_batch_size=10, num_steps=1, examples={"per_owner": 5})
    before = network_parameters()
    train(training)
    assert training.num_non_finite == 5
    sampler = sampler_of(training)
    kept = rows_by_owner(network(), data(), sampler, 0)[np.arange(10) != list(dict.fromkeys(IDS)).index("c3")]
    found = sum_without_noise(training, before, 0, 0.5)
    torch.testing.assert_close(found, clipped(kept, 0.5), rtol=1e-9, atol=1e-9)


# Sensitivity: U1 ---------------------------------------------------------------------------------------------------


def summed(dataset: Dataset, ids: Any, **settings: Any) -> torch.Tensor:
    """Returns the sum of a step in which all owners join, without noise."""
    count = len(set(ids))
    training = owned(dataset=dataset, examples={"owners": ids}, expected_batch_size=count, num_steps=1, **settings)
    train(training)
    return sum_without_noise(training, network_parameters(), 0, 0.5)


@pytest.mark.parametrize("gone", ["c1", "c5", "c9"])
def test_removing_an_owner_moves_the_sum_by_at_most_the_clip_norm(gone):
    kept = np.flatnonzero(IDS != gone)
    last = np.concatenate([kept, np.flatnonzero(IDS == gone)])  # the others keep their places and so their choices
    everyone = summed(Subset(data(), last.tolist()), IDS[last])
    moved = (everyone - summed(Subset(data(), kept.tolist()), IDS[kept])).norm()
    assert 0.1 < moved <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("settings", [{}, {"performance": tp.Performance(microbatch_size=4)}], ids=["whole", "parts"])
@pytest.mark.parametrize("size", [1, 4, 30])
def test_replacing_an_owner_by_anything_moves_the_sum_by_at_most_twice_the_clip_norm(size, settings):
    """With the same key, also where the new owner has another number of examples and huge gradients."""
    x, y = data().tensors
    kept = IDS != "c1"
    new_x = torch.cat([x[kept], 1e3 * torch.randn(size, 3)])
    new_y, new_ids = torch.cat([y[kept], torch.ones(size, dtype=y.dtype)]), np.append(IDS[kept], ["c1"] * size)
    last = np.concatenate([np.flatnonzero(kept), np.flatnonzero(~kept)])
    before = summed(Subset(data(), last.tolist()), IDS[last], **settings)
    moved = (before - summed(TensorDataset(new_x, new_y), new_ids, **settings)).norm()
    assert 0.1 < moved <= 2 * 0.5 * (1 + 1e-6)


# Sampling: U6 ------------------------------------------------------------------------------------------------------


def test_owners_join_independently_whatever_their_size_and_examples_are_chosen_uniformly():
    numbers = np.repeat(np.arange(4), [1, 3, 5, 40])
    sampler, steps = owner_sampler(Owners(numbers, 4, 3), 0.3, bytes(32)), 3000
    joined, chosen = np.zeros((steps, 4), bool), Counter()
    for step in range(steps):
        indices = sampler.indices(step)
        assert len(set(indices.tolist())) == len(indices)
        owners, counts = np.unique(numbers[indices], return_counts=True)
        assert (counts == np.minimum([1, 3, 5, 40], 3)[owners]).all()
        joined[step, owners] = True
        chosen[tuple(indices[numbers[indices] == 2])] += 1
    error = (0.3 * 0.7 / steps) ** 0.5
    assert (np.abs(joined.mean(0) - 0.3) < 5 * error).all()
    assert np.abs(np.corrcoef(joined.T)[np.triu_indices(4, 1)]).max() < 5 / steps**0.5
    del chosen[()]
    assert len(chosen) == 10  # all subsets of 3 of 5 examples
    total = sum(chosen.values())
    assert max(abs(count / total - 0.1) for count in chosen.values()) < 5 * (0.09 / total) ** 0.5


def test_the_choice_for_an_owner_does_not_depend_on_the_others():
    one, other = np.repeat(np.arange(3), [2, 50, 20]), np.repeat(np.arange(3), [9, 50, 1])
    for step in range(20):
        drawn = [
            owner_sampler(Owners(n, 3, 4), 1.0, b"k" * 32).indices(step) - np.flatnonzero(n == 1)[0]
            for n in (one, other)
        ]
        of_second = [part[(part >= 0) & (part < 50)] for part in drawn]
        assert of_second[0].tolist() == of_second[1].tolist()


# Cuts: U4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_batches_are_cut_between_owners(number, at_once):
    for sizes in ([4] * 7, [1], [9, 1, 1, 1, 1], [1, 1, 1, 1, 9], np.random.default_rng(1).integers(1, 8, 40)):
        owners = np.repeat(np.arange(len(sizes)), sizes)
        parts = [
            [owners[a:b].tolist() for a, b in pairwise(_cuts(owners, number, rank, at_once))] for rank in range(number)
        ]
        assert len({len(of_rank) for of_rank in parts}) == 1
        assert [owner for of_rank in parts for part in of_rank for owner in part] == owners.tolist()
        of_each = [[len(set(part)) for part in of_rank] for of_rank in parts]
        assert sum(map(sum, of_each)) == len(sizes)
        assert max(map(sum, of_each)) - min(map(sum, of_each)) <= 1
        if at_once is not None:
            assert max(map(max, of_each)) <= at_once


def test_who_shares_a_microbatch_does_not_depend_on_the_examples_of_one_owner():
    """A layer that is skipped at random for a whole microbatch makes their gradients one random number."""
    own = np.arange(30)
    shared = []
    for of_first in (1, 4):
        ids = np.append(np.zeros(of_first, int), own[1:])
        dataset = TensorDataset(torch.arange(len(ids))[:, None] * 1.0, torch.zeros(len(ids)).long())
        settings = {"owners": ids, "per_owner": 4}
        training = training_of(
            dataset=dataset, examples=settings, expected_batch_size=30, performance=tp.Performance(microbatch_size=8)
        )
        shared.append([set(ids[share.indices].tolist()) for share in training._state.releases.draws.parts(0)])
    assert shared[0] == shared[1]
    assert max(map(len, shared[0])) == 2


def test_microbatches_of_three_never_divide_owners_of_four():
    ids, sizes = [i // 4 for i in range(40)], []
    training = owned(
        examples={"owners": ids, "per_owner": 4}, performance=tp.Performance(microbatch_size=3), num_steps=2
    )
    for x, y in training:
        training.step(cross_entropy(training.model, x, y))
        if not training.rehearsing:
            sizes.append(len(x))
    assert set(sizes) == {4}
    assert sum(sizes) == sum(len(sampler_of(training).indices(step)) for step in range(2))


# Several ranks -----------------------------------------------------------------------------------------------------

OF_OWNERS = case(examples=OWNERS, expected_batch_size=5, num_steps=4)
RANKED = [
    ("layers", {}),
    ("ddp", {"performance": tp.Performance(microbatch_size=4)}),
    ("ddp", {"expected_batch_size": 0.5, "num_steps": 6}),
]


def on_rank(rank: int | None, how: str | None, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list]:
    """Returns the weights, and the examples that this rank got in each step."""
    training, seen = start(OF_OWNERS, how, "sgd", **settings), []
    for batch in training:
        step = training.step_count
        training.step(of_pair(training.model, batch))
        if not training.rehearsing and not training.stands_in:
            seen.append((step, batch[0][:, 0].tolist()))
    return whole_weights(training.model), seen


@pytest.mark.thorough
@VIEWS
@pytest.mark.parametrize(("how", "settings"), RANKED, ids=["whole", "parts", "few"])
def test_two_ranks_train_as_one_process_and_divide_no_owner(ranks2, how, settings):
    expected, _ = on_rank(None, None, settings)
    found = ranks2.run(on_rank, how, settings)
    for weights, _ in found:
        assert difference(weights, expected) <= 1e-9
    owner_of = dict(zip(data().tensors[0][:, 0].tolist(), IDS, strict=True))
    owners = [{(step, owner_of[x]) for step, xs in seen for x in xs} for _, seen in found]
    assert not owners[0] & owners[1]


def with_own_owners(rank: int) -> str:
    try:
        start(OF_OWNERS, "ddp", examples=OWNERS | {"owners": np.roll(IDS, rank)})
    except tp.Refused as error:
        return str(error)
    return ""


def test_ranks_with_other_owners_are_refused(ranks2):
    assert all("owners" in message for message in ranks2.run(with_own_owners))


# Resuming ----------------------------------------------------------------------------------------------------------


def test_a_resumed_training_draws_the_same_owners_and_examples():
    whole, first, second = (owned() for _ in range(3))
    batches = train(whole)
    seen = train(first, steps=3)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert seen + train(second) == batches
    assert torch.equal(parameters_of(second), parameters_of(whole))


@pytest.mark.parametrize(
    "other",
    [
        {"examples": {"owners": np.roll(IDS, 1)}},
        {"examples": {"per_owner": 4}},
        {"examples": {"owner_name": "patient"}},
        {"examples": {"owners": None, "per_owner": None, "owner_name": None}},
    ],
)
def test_a_state_with_other_owners_is_refused_both_ways(other):
    for ours, theirs in ((OWNED, changed(other)), (changed(other), OWNED)):
        with pytest.raises(tp.Refused, match=r"load_state_dict: owners=.*began with"):
            training_of(**ours).load_state_dict(training_of(**theirs).state_dict())


def test_no_id_is_in_a_state_statement_or_ledger(tmp_path):
    ids = [f"secret-{i}" for i in IDS]
    training = owned(examples={"owners": ids}, run_folder=tmp_path, delta=1e-3)
    train(training, steps=2)
    told = repr((training.state_dict(), training.statement(), training.settings, training.spent()))
    told += (tmp_path / "ledger.jsonl").read_text()
    assert "secret-" not in told


# What is printed: U2, U3, U8 ---------------------------------------------------------------------------------------


def test_the_printed_epsilon_and_the_statement_name_the_unit():
    training = training_of(**OWNED | {"delta": 0.005})
    train(training)
    spent, statement = training.spent(), training.statement()
    assert "(zero out one customer with at most 3 examples, Poisson sampling)" in str(spent)
    steps = [(training.event, 6)]
    assert training.event == privacy.SubsampledGaussian(1.0, 0.5, ZERO_OUT, unit="customer")
    assert spent.epsilon == privacy.compose(steps).epsilon(0.005)
    assert training.profile().statement(0.005).endswith("(zero out one customer, Poisson sampling)")
    assert statement["unit"] == "one customer, at most 3 of its examples in a step"
    assert (statement["owner"], statement["num_owners"], statement["examples_per_owner"]) == ("customer", 10, 3)
    assert "num_examples" not in statement
    assert "num_owners" in statement["treated_as_public"]
    assert statement["releases"][0]["event"]["unit"] == "customer"
    assert not violations(privacy.statement_schema(), statement)
    with pytest.raises(ValueError, match="protects one customer with all of its examples"):
        training.spent(examples_per_person=3)


def in_folder(folder: Path, **settings: Any) -> tp.PrivateTraining:
    """Returns a training with keys from the operating system."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = {"num_steps": 3, "clipping": tp.Flat(0.5), "noise_multiplier": 3.0, "delta": 0.005, "run_folder": folder}
    return private_training(model, optimizer, data(), **plain | changed(settings))


@pytest.mark.thorough
def test_a_run_folder_names_the_unit_and_not_the_number_of_examples(tmp_path):
    folder = tmp_path / "run"
    train(in_folder(folder))
    page, card = (folder / "report.html").read_text(), tp.model_card(folder)
    for text in (page, card):
        assert "10 customers" in text
        assert "one customer, at most 3 of its examples in a step" in text
        assert "Protected is one customer" in text
        assert "zero out one customer" in text
        assert "several examples in the data is protected less" not in text
    files = "".join((folder / name).read_text() for name in ("settings.json", "privacy.json", "results.json"))
    assert not {"num_examples": 40}.items() & json.loads((folder / "settings.json").read_text()).items()
    assert all(f'"num_examples": {count}' not in files for count in (40, 39))
    assert len(in_folder(folder).ledger) == 3
    with pytest.raises(tp.Refused, match="per_owner: 4 here, 3 there"):
        in_folder(folder, examples={"per_owner": 4})


def test_delta_is_compared_with_one_over_the_owners():
    with pytest.raises(ValueError, match=r"must lie in \(0, 0\.1\).*the 10 customers"):
        owned(delta=0.1)
    with pytest.warns(UserWarning, match="everything about some customer"):
        owned(delta=0.05)
    with pytest.raises(ValueError, match="at most 10 owners"):
        owned(expected_batch_size=11)


def test_a_target_epsilon_is_calibrated_for_owners():
    training = owned(target_epsilon=2.0, noise_multiplier=None, delta=0.001, num_steps=3)
    assert training.settings.noise_multiplier == privacy.calibrate(2.0, 0.001, sampling_probability=0.5, num_steps=3)


# Refusals ----------------------------------------------------------------------------------------------------------

WRONG = {
    "another number of ids": ({"examples": {"owners": IDS[:-1]}}, "39 ids, and the data set 40 examples"),
    "none": ({"examples": {"owners": [None, *IDS[1:]]}}, "example 0 has no owner"),
    "not a number": ({"examples": {"owners": np.append(np.arange(39.0), np.nan)}}, "example 39 has no owner"),
    "missing in pandas": ({"examples": {"owners": pd.Series([*IDS[:-1], pd.NA])}}, "example 39 has no owner"),
    "no date": ({"examples": {"owners": [pd.NaT, *IDS[1:]]}}, "example 0 has no owner"),
    "two owners": (
        {"examples": {"owners": [["a", "b"], *IDS[1:]]}},
        "example 0 has its owners in a list",
    ),
    "pairs of owners": ({"examples": {"owners": [("a", "b"), *IDS[1:]]}}, "example 0 has its owners in a list"),
    "two columns": ({"examples": {"owners": torch.eye(40)[:, :2]}}, "example 0 has its owners in a list"),
    "public owners in rows": (
        {"examples": {"owners": [("a", "b"), *IDS[1:]], "public_owners": True, "per_owner": 3}},
        "Take per_owner=1; or tp.at_most",
    ),
    "an empty list": ({"examples": {"owners": [[], *IDS[1:]], "public_owners": True}}, "example 0 has no owner"),
    "lists in a list": ({"examples": {"owners": [[("a", "b")], *IDS[1:]], "public_owners": True}}, "join them into"),
    "no column": ({"examples": {"owners": "customer"}}, "names a column, but items of TensorDataset are no mappings"),
    "a number": ({"examples": {"owners": 7}}, "owners of type int must be one id for each example"),
    "no size": ({"examples": {"per_owner": None}}, "needs per_owner="),
    "a size of zero": ({"examples": {"per_owner": 0}}, "per_owner=0 must be an integer of at least 1"),
    "half an example": ({"examples": {"per_owner": 1.5}}, "per_owner=1.5 must be an integer"),
    "no owners": ({"examples": {"owners": None}}, "per_owner=3 needs owners="),
    "a name alone": ({"examples": {"owners": None, "per_owner": None}}, "owner_name='customer' needs owners="),
    "no name": ({"examples": {"owner_name": " "}}, "owner_name=' ' must say in words"),
    "micro-batches": ({"clipping": tp.MicroBatches(0.5, 2)}, "MicroBatches.*Take Flat"),
    "estimated norms": ({"clipping": tp.Sketched(32, clip_norm=0.5)}, "needs exact norms of means.*take per_owner=1"),
    "prior releases": (
        {"prior_releases": [privacy.Release(privacy.Gaussian(5.0), "f")]},
        "protects one example, and this training protects one customer",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_owners_cannot_mean_is_refused(name):
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        owned(**settings)


def test_prior_releases_of_the_same_unit_are_part_of_epsilon():
    prior = privacy.Release(privacy.Gaussian(5.0, unit="customer"), "f")
    training = owned(prior_releases=[prior], delta=0.001)
    train(training)
    assert training.spent().epsilon == privacy.compose([(prior.event, 1), (training.event, 6)]).epsilon(0.001)
    with pytest.raises(tp.Refused, match="protects one customer, and this training protects one example"):
        training_of(prior_releases=[prior])


def test_one_example_of_each_owner_allows_estimated_norms():
    training = owned(clipping=tp.Sketched(32, clip_norm=0.5), examples={"per_owner": 1}, num_steps=1, delta=0.001)
    train(training)
    assert "one customer with at most 1 example," in str(training.spent())


# Ids ---------------------------------------------------------------------------------------------------------------


class Table(Dataset):
    """Rows as dictionaries."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": i, "user_id": "abab"[i]}


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "a", "b", "c"],
        [7, 3, 7, 1],
        [7, 3.0, 7.0, True],
        np.array([7, 3, 7, 1], np.uint8),
        np.array([0.5, 0.25, 0.5, 1]),
        np.array(["b", "a", "b", "c"]),
        np.array(["b", 1, "b", b"c"], object),
        torch.tensor([7, 3, 7, 1]),
        pd.Series(["b", "a", "b", "c"]),
        pd.Series(["b", "a", "b", "c"], dtype="category"),
        pd.Series(pd.to_datetime(["2001-01-01", "2000-01-01", "2001-01-01", "2002-01-01"])),
        pa.array(["b", "a", "b", "c"]),
        (i for i in "babc"),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_of_any_kind_are_numbered_by_their_first_examples(ids):
    owners = owners_of("here", ids, range(4), 2)
    assert owners.numbers.tolist() == [0, 1, 0, 2]
    assert (owners.count, owners.in_words) == (3, "owner with at most 2 examples")


def test_a_column_names_the_owners():
    table = datasets.Dataset.from_dict({"x": [0, 1, 2, 3], "user_id": list("abab")})
    for dataset in (Table(), table, table.with_format("torch", columns=["x"])):
        owners = owners_of("here", "user_id", dataset, 2)
        assert (owners.numbers.tolist(), owners.name) == ([0, 1, 0, 1], "user")
    with pytest.raises(tp.Refused, match="'customer' is no column of the data set, which has x, user_id"):
        owners_of("here", "customer", table, 2)
    with pytest.raises(tp.Refused, match="'customer' is no key of the items, which have x, user_id"):
        owners_of("here", "customer", Table(), 2)


# Rehearsals --------------------------------------------------------------------------------------------------------


def of_owner(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean input of each example's owner within the batch."""
    same = (ids[:, None] == ids[None]).to(x)
    return same @ x / same.sum(1, keepdim=True)


def coupled_training(mix: Any, **settings: Any) -> tp.PrivateTraining:
    numbers = torch.tensor([int(name[1:]) for name in IDS])
    training = owned(dataset=TensorDataset(*data().tensors, numbers), num_steps=4, **settings)
    for x, y, ids in training:
        losses = cross_entropy(training.model, x, y)
        training.step(losses * (1 + mix(x, ids)[:, 0].square()))
    return training


def test_a_loss_may_depend_on_the_owner_s_other_examples_drawn():
    assert coupled_training(of_owner).step_count == 4


@pytest.mark.parametrize(
    "mix",
    [lambda x, ids: x.mean(0, keepdim=True).expand_as(x), lambda x, ids: x.cumsum(0), lambda x, ids: x * len(x)],
    ids=["mean", "cumulative", "count"],
)
@pytest.mark.parametrize("settings", [{}, {"performance": tp.Performance(microbatch_size=9)}], ids=["whole", "parts"])
def test_a_loss_that_depends_on_other_owners_is_refused(mix, settings):
    with pytest.raises(tp.Refused, match="examples of a batch depend on each other"):
        coupled_training(mix, **settings)


class ScaledByCount(torch.autograd.Function):
    """Leaves the loss as it is; its gradient depends on the size of the batch."""

    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor) -> torch.Tensor:
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * len(gradient) ** 0.5


def test_a_gradient_that_depends_on_other_owners_is_refused():
    training = owned(num_steps=3, expected_batch_size=8)
    with pytest.raises(tp.Refused, match="the norm of the gradient of row"):
        train(training, losses=lambda model, x, y: ScaledByCount.apply(cross_entropy(model, x, y)))


# Audits: U9 --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("canaries", ["records", "gradients"])
def test_canaries_are_owners(canaries):
    """Without noise to speak of, the attack recognizes owners, so that a training with owners can be audited."""
    n, made = 40, []
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(n, 30, generator=generator), torch.randint(40, (n,), generator=generator))
    more = [(torch.randn(30, generator=generator), torch.tensor(i % 40)) for i in range(30)]

    def trained(with_canaries: Dataset) -> tp.PrivateTraining:
        torch.manual_seed(0)
        model = nn.Linear(30, 40)
        training = tp.PrivateTraining(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            tp.Examples(with_canaries, owners=IDS, per_owner=3),
            expected_batch_size=20,
            num_steps=3,
            clipping=tp.Flat(1.0),
            noise_multiplier=0.3,
            test_seed=7,
        )
        for x, y in training:
            training.step(F.cross_entropy(model(x), y, reduction="none"))
        made.append(training)
        return training

    found = tp.audit(trained, dataset, more if canaries == "records" else tp.GradientCanaries(30), test_seed=1)
    settings = made[0].settings
    assert (settings.owners.count, settings.num_units) == (40, 40)
    assert settings.sampling_probability == 0.5
    assert found.outcome.num_correct >= 0.9 * found.outcome.num_guesses


# A cap for example-level training: U7 ------------------------------------------------------------------------------


def test_at_most_keeps_so_many_examples_of_each_owner():
    capped = tp.at_most(data(), IDS, 3)
    assert isinstance(capped, Subset)
    counts = Counter(IDS[capped.indices])
    assert counts == {f"c{i}": min(size, 3) for i, size in enumerate(SIZES)}
    assert sorted(capped.indices) == capped.indices
    assert len({tuple(tp.at_most(data(), IDS, 3).indices) for _ in range(5)}) > 1
    assert tp.at_most(data(), IDS, 3, seed=1).indices == tp.at_most(data(), list(IDS), 3, seed=1).indices
    assert tp.at_most(data(), IDS, 3, seed=1).indices != tp.at_most(data(), IDS, 3, seed=2).indices


def test_at_most_chooses_uniformly_and_for_each_owner_alone():
    chosen = Counter(tuple(tp.at_most(range(5), [0] * 5, 2, seed=seed).indices) for seed in range(2000))
    assert len(chosen) == 10
    assert max(abs(count - 200) for count in chosen.values()) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    for gone in ("c0", "c1", "c9"):
        kept = np.flatnonzero(IDS != gone)
        fewer = kept[tp.at_most(Subset(data(), kept.tolist()), IDS[kept], 3, seed=5).indices]
        everyone = np.array(tp.at_most(data(), IDS, 3, seed=5).indices)
        assert fewer.tolist() == everyone[IDS[everyone] != gone].tolist()


def test_example_level_training_is_priced_for_persons():
    training = training_of(dataset=tp.at_most(data(), IDS, 3, seed=1), num_steps=4, delta=1e-3, expected_batch_size=2)
    train(training)
    q = training.settings.sampling_probability
    group = privacy.compose([(privacy.SubsampledGroup(1.0, q, 3), 4)])
    spent = training.spent(examples_per_person=3)
    assert spent.epsilon == group.epsilon(1e-3)
    assert "(zero out one person with at most 3 examples, Poisson sampling)" in str(spent)
    assert spent.epsilon.low > training.spent().epsilon.high
    with pytest.raises(ValueError, match="group_size=0 must be an integer of at least 1"):
        training.spent(examples_per_person=0)
    estimated = training_of(clipping=tp.Sketched(32, clip_norm=0.5), num_steps=1, delta=1e-3)
    with pytest.raises(ValueError, match="SubsampledJL has no known price for a person"):
        estimated.spent(examples_per_person=2)


def test_units_are_those_of_the_sampler_in_every_part():
    """The parts of a step have all of its examples, each with the row of its owner."""
    training = owned(performance=tp.Performance(microbatch_size=5), num_steps=2)
    sampler = sampler_of(training)
    releases = training._state.releases
    assert isinstance(releases, Releases)
    shares = releases.draws.parts(0)
    assert np.concatenate([share.indices for share in shares]).tolist() == sampler.indices(0).tolist()
    for share in shares:
        names = IDS[share.indices]
        assert share.units is not None
        assert len(set(zip(share.units, names, strict=True))) == len(set(names)) == share.units.max() + 1


@pytest.mark.thorough
def test_a_run_folder_counts_owners_and_nowhere_examples(tmp_path):
    ids = [f"c{k % 61}" for k in range(1237)]
    data = TensorDataset(torch.randn(1237, 4), torch.arange(1237) % 3)
    model = nn.Linear(4, 3)
    training = tp.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        tp.Examples(data, owners=ids, per_owner=3, owner_name="customer"),
        expected_batch_size=20, epochs=1, delta=1e-3, clipping=tp.Flat(1.0), noise_multiplier=1.0,
        run_folder=tmp_path / "run",
    )  # fmt: skip
    for x, y in training:
        training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
    folder = RunFolder(tmp_path / "run")
    results = folder.read_results()
    assert (results["num_examples"], results["num_owners"], results["examples_per_owner"]) == (61, 61, 3)
    page = folder.report.read_text()
    assert "trained on 61 customers" in page
    assert "one customer, at most 3 of its examples in a step" in page
    for path in folder.path.iterdir():
        if path.suffix in (".json", ".jsonl", ".csv", ".html"):
            assert not re.search(r"1,?237", path.read_text()), path
    statement = folder.read_statement()
    key = folder.fingerprint_key
    assert tp.matches_fingerprint(statement, data, key)
    changed = TensorDataset(data.tensors[0] + 1, data.tensors[1])
    assert not tp.matches_fingerprint(statement, changed, key)
    assert "61 customers" in tp.model_card(folder.path)
