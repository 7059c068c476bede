# SPDX-License-Identifier: Apache-2.0
"""Compares rows, norms and sums of tensor-parallel models on two ranks with one backward per example on one process."""

import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_models import CASES, DEEP, MEASURED_ANEW, REFUSED, losses_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

import torch_privacy as tp
from torch_privacy.jacobian.layouts import find
from torch_privacy.jacobian.layouts.fit import CandidateLayouts
from torch_privacy.jacobian.layouts.predict import Prediction
from torch_privacy.support.notes import NOTES

SIZES = (5, 3, 5, 6, 5)


def make(case, dtype=torch.float64):
    """Returns the distributed model, the same on one process, and what makes batches."""
    model_of, distribute, batch_of, *_ = {**CASES, **DEEP, **MEASURED_ANEW, **REFUSED}[case]
    torch.manual_seed(1)
    alone = model_of().to(dtype)  # rounded as the model
    torch.manual_seed(1)
    model = model_of().to(dtype)
    alone.double()
    distribute(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

    def batch(n):
        x = batch_of(n)
        return x.to(dtype) if x.is_floating_point() else x

    return model, alone, batch


def whole(parts, model):
    """Returns tensors by name, put together from the ranks' parts."""
    found = {}
    for name, p in model.named_parameters():
        if name in parts:
            found[name] = parts[name]
            if isinstance(p, DTensor):
                spread = DTensor.from_local(parts[name], p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                found[name] = spread.full_tensor()
    return found


def rows_alone(model, x):
    """Returns name -> (n, *shape), one backward per example on one process."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [torch.autograd.grad(losses_of(model, part).sum(), [*trained.values()]) for part in x.split(1)]
    return dict(zip(trained, map(torch.stack, zip(*rows, strict=True)), strict=True))


def norms_of(rows):
    return sum(part.double().flatten(1).square().sum(1) for part in rows.values())


def without_spot_checks(rank, function, *arguments):
    """Returns what a function returns on this rank, with no settled batch measured again."""
    with spot_checks():
        return function(rank, *arguments)


@contextmanager
def spot_checks(one_in=2**40):
    """Measures one settled batch in this many again; by default none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "SPOT_CHECK", one_in)
        yield patch


def check_case(rank, case, dtype):
    """Compares norms and weighted sums on five batches; returns the norms."""
    model, alone, batch = make(case, dtype)
    found = []
    for n in SIZES:
        x = batch(n)
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        jacobian = tape.jacobian(losses, verify=True)
        rows, c = rows_alone(alone, x.double() if x.is_floating_point() else x), torch.rand(n)
        norms = norms_of(rows)
        loose = 1e-5 if dtype is torch.float32 else 1e-12
        torch.testing.assert_close(jacobian.squared_norms().double(), norms, rtol=loose, atol=0)
        loose = {"rtol": loose, "atol": loose * norms.sqrt().sum().item()}
        sums = whole(jacobian.weighted_sum(c.to(dtype)), model)
        assert {*sums} == {*rows}
        for name, of_name in rows.items():
            torch.testing.assert_close(sums[name].double(), torch.tensordot(c, of_name, 1), **loose)
        found.append(jacobian.squared_norms())
    assert tape.measured == (case in MEASURED_ANEW)
    return found


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float64) for case in (*CASES, *MEASURED_ANEW)),
        *((case, torch.float32) for case in ("perceptron", "tied", "replicated norm", "adapters")),
    ],
)
def test_norms_and_sums_are_those_of_one_process(ranks2, case, dtype):
    first, second = ranks2.run(without_spot_checks, check_case, case, dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def clipped(model, x, rule, names, budget=1.2):
    """Returns the clipped sums as a training asks for them, the factors, and whether layouts were measured."""
    factors = {}

    def clip(jacobian, group):
        factors[group] = rule.factors(jacobian.squared_norms().sqrt(), group)
        return jacobian.weighted_sum(factors[group])

    with tp.record(model) as tape:
        losses = losses_of(model, x)
    return tape.clipped_sum(losses, rule.groups(names), clip, memory_budget=budget), factors, tape.measured


def check_clipped(rank, case, groups, budget):
    """Compares the clipped sums of five batches; returns all factors."""
    model, alone, batch = make(case)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    rule = tp.Flat(0.5) if groups == "flat" else tp.PerLayer(0.5)
    rule = rule.bind(names)
    found, measured = [], False
    for n in SIZES:
        x = batch(n)
        sums, factors, measured = clipped(model, x, rule, names, budget)
        rows = rows_alone(alone, x)
        assert {*sums} == {*rows}
        sums = whole(sums, model)
        for label, some in rule.groups(names).items():
            expected = rule.factors(norms_of({name: rows[name] for name in some}).sqrt(), label)
            torch.testing.assert_close(factors[label], expected, rtol=1e-9, atol=1e-12)
            for name in some:
                torch.testing.assert_close(sums[name], torch.tensordot(expected, rows[name], 1), rtol=1e-9, atol=1e-11)
        found.append(factors)
    assert not measured
    return found


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("budget", [1.2, 1e-9], ids=["usual", "least"])
@pytest.mark.parametrize("groups", ["flat", "layers"])
@pytest.mark.parametrize("case", ["perceptron", "uneven shards", "tied", "adapters"])
def test_clipped_sums_are_those_of_one_process(ranks2, case, groups, budget):
    first, second = ranks2.run(without_spot_checks, check_clipped, case, groups, budget)
    for mine, others in zip(first, second, strict=True):
        assert all(torch.equal(mine[label], others[label]) for label in mine)


def differ(rank, how):
    """Lets the ranks decide differently by themselves, and compares norms and clipped sums of seven batches."""
    model, alone, batch = make("dead units" if how == "dead units" else "deep")
    names = [name for name, _ in model.named_parameters()]
    rule = tp.Flat(0.5).bind(names)
    measured = []
    for k in range(7):
        if k == 4 and how == "forgets" and rank == 1:
            NOTES.forget(model)
        with spot_checks(1 if how == "spot checks" else 2**40) as patch:
            if how == "unsure" and rank == 1:
                patch.setattr(CandidateLayouts, "is_sure", lambda *_: False)
                patch.setattr(Prediction, "conclude", against(Prediction.conclude))
            if how == "against" and rank == 0:
                patch.setattr(Prediction, "conclude", against(Prediction.conclude))
            x = batch(5)
            budget = 1.2 if how != "budgets" else 1e-9 if rank == 0 else 100
            sums, factors, was_measured = clipped(model, x, rule, names, budget)
            measured.append(was_measured)
        rows = rows_alone(alone, x)
        expected = rule.factors(norms_of(rows).sqrt())
        torch.testing.assert_close(factors["all"], expected, rtol=1e-9, atol=1e-12)
        for name, of_name in whole(sums, model).items():
            torch.testing.assert_close(of_name, torch.tensordot(expected, rows[name], 1), rtol=1e-9, atol=1e-11)
    return measured


def against(conclude):
    """Returns a conclusion that disagrees on this rank, whatever the others find."""

    def concluded(prediction):
        prediction._failed = True
        conclude(prediction)

    return concluded


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["forgets", "spot checks", "unsure", "against", "budgets", "dead units"])
def test_ranks_that_find_different_things_make_the_same_backwards(ranks2, how):
    first, second = ranks2.run(differ, how)
    assert first == second


def refused(rank, case):
    """Records a batch and asks for its rows."""
    model, _, batch = make(case)
    with tp.record(model) as tape:
        losses = losses_of(model, batch(5))
    tape.jacobian(losses)


@pytest.mark.parametrize("case", REFUSED)
def test_positions_on_several_ranks_are_refused(ranks2, case):
    assert re.search(REFUSED[case][-1], ranks2.refusal(refused, case))


def behind_small_weights(rank):
    """Asks for the rows of four batches in which those of the norm are nearly zero, and of another one."""
    model, _, batch = make("norm of heads")
    last = model[2].weight.detach().clone()
    for k in range(5):
        with torch.no_grad():
            model[2].weight.copy_(last * (1 if k == 4 else 1e-7))
        with tp.record(model) as tape:
            losses = losses_of(model, batch(5))
        tape.jacobian(losses)


def test_rows_of_each_batch_are_compared(ranks2):
    assert "'1.scale' have other norms" in ranks2.refusal(without_spot_checks, behind_small_weights)


def split_positions(rank):
    """Records a model that is not distributed itself, in which attention would be split."""
    model, x = nn.Linear(6, 3), torch.randn(5, 4, 6)
    with (
        context_parallel(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]),
        tp.record(model) as tape,
    ):
        losses = losses_of(model, x)
        tape.jacobian(losses)


def test_context_parallelism_is_refused(ranks2):
    text = ranks2.refusal(split_positions)
    assert re.search("of the rows of 'bias', 'weight' only a term.*without context_parallel", text)


def other_examples(rank):
    """Gives every rank a batch of its own."""
    model, _, batch = make("perceptron")
    torch.manual_seed(rank)
    with tp.record(model) as tape:
        losses = losses_of(model, batch(5))
    tape.jacobian(losses)


def test_what_norms_of_parts_cannot_give_is_refused(ranks2):
    assert "with different inputs" in ranks2.refusal(other_examples)


def ask(rank, case):
    """Returns the number of collectives of each question about settled rows, and compares projections."""
    model, alone, batch = make(case)
    for _ in range(4):
        x = batch(5)
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        jacobian = tape.jacobian(losses)
    assert not tape.measured
    rows = rows_alone(alone, x)
    directions = {name: torch.randn(3, *part.shape[1:]) for name, part in rows.items()}
    expected = sum(rows[name].flatten(1) @ v.flatten(1).mT for name, v in directions.items())
    parts = {name: torch.stack([part_of(p, v) for v in directions[name]]) for name, p in model.named_parameters()}
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object"):
            patch.setattr(dist, name, counted(getattr(dist, name), sizes))
        norms = jacobian.squared_norms()
        of_norms, projections = [*sizes], jacobian.project(parts)
        of_projections = sizes[len(of_norms) :]
        jacobian.weighted_sum(norms)
    torch.testing.assert_close(projections, expected, rtol=1e-10, atol=1e-12)
    return of_norms, of_projections, sizes


def counted(collective, sizes):
    """Returns a collective that also notes the length of its tensor."""

    def noted(t, *args, **more):
        sizes.append(len(t))
        return collective(t, *args, **more)

    return noted


def part_of(p, whole):
    """Returns this rank's part of a tensor that is placed as a parameter."""
    if not isinstance(p, DTensor):
        return whole
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("case", ["perceptron", "tied", "replicated norm"])
def test_each_question_takes_one_all_reduce(ranks2, case):
    for of_norms, of_projections, all_sizes in ranks2.run(without_spot_checks, ask, case):
        assert (of_norms, of_projections) == ([5], [5])
        assert all_sizes == [5, 5]
