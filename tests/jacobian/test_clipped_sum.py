# SPDX-License-Identifier: Apache-2.0
"""Compares the clipped sum, computed during the backward and under a memory budget, with explicit rows."""

from functools import partial

import pytest
import torch
from cases import CASES, losses_of
from oracle import flat, one_backward_per_example
from parts import trained

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import PROOFS, Layouts, Merging
from torch_privacy.jacobian.rows.plan import MemoryBudget
from torch_privacy.jacobian.rows.streamed_sum import SumByBackward
from torch_privacy.jacobian.tape import Tape

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

LEAST, MOST = 1e-9, 100  # budgets: keep what needs the least memory, or what is fastest


def clipped_sum(model, x, layouts, groups, clip, **settings):
    tape = Tape(trained(model), (*model.buffers(),), layouts, len(x))
    tape.note_inputs(x)
    with tape:
        losses = losses_of(model, x)
    return tape.clipped_sum(losses, groups, clip, **settings)


def clip_to(clip_norm):
    def clip(jacobian, group):
        return jacobian.weighted_sum(tp.Flat(clip_norm).factors(jacobian.squared_norms().sqrt()))

    return clip


def sums_after_measuring(case, groups_of, clip, **settings):
    """Returns the clipped sum of the first batch, and that of a batch with known layouts."""
    model, x = CASES[case]()
    groups, layouts = groups_of(model), Layouts()
    first = clipped_sum(model, x, layouts, groups, clip, **settings)
    for _ in range(PROOFS):
        last = clipped_sum(model, x, layouts, groups, clip, **settings)
    return model, x, first, last


def one_group(model):
    return {"all": tuple(trained(model))}


@pytest.mark.oracle
@pytest.mark.parametrize("budget", [LEAST, MOST])
@pytest.mark.parametrize("case", CASES)
def test_clipped_sum_equals_that_of_the_rows(case, budget, monkeypatch):
    if budget == LEAST:
        monkeypatch.setattr("torch_privacy.jacobian.rows.plan.PORTION_BYTES", 1)  # measured in several portions
        monkeypatch.setattr(MemoryBudget, "wants_second_backward", True)
    model, x, first, last = sums_after_measuring(case, one_group, clip_to(1.0), memory_budget=budget)
    rows = one_backward_per_example(model, x, losses_of)
    expected = tp.Flat(1.0).factors(rows.norm(dim=1)) @ rows
    scale = rows.norm(dim=1).clamp(max=1).sum().item()
    torch.testing.assert_close(flat(last, 0), expected, rtol=1e-9, atol=1e-9 * scale)
    assert all(torch.equal(first[name], last[name]) for name in first), "a resumed run would not repeat its releases"


@pytest.mark.parametrize("case", CASES)
def test_groups_are_clipped_separately(case):
    def each(model):
        return {name: (name,) for name in trained(model)}

    model, x, _, last = sums_after_measuring(case, each, clip_to(0.5))
    rows = one_backward_per_example(model, x, losses_of)
    parts = rows.split([p.numel() for p in trained(model).values()], dim=1)
    expected = torch.cat([tp.Flat(0.5).factors(part.norm(dim=1)) @ part for part in parts])
    last = {name: last[name] for name in trained(model)}
    torch.testing.assert_close(flat(last, 0), expected, rtol=1e-9, atol=1e-9 * len(x))


@pytest.mark.parametrize("case", CASES)
def test_merged_examples_are_clipped_by_their_mean(case):
    n = len(CASES[case]()[1])
    merging = Merging(torch.arange(n) % 3 * 2, 5)  # groups 1 and 3 stay empty
    model, x, _, last = sums_after_measuring(case, one_group, clip_to(1.0), merging=merging)
    rows = one_backward_per_example(model, x, losses_of)
    means = torch.stack([rows[k::3].mean(0) for k in range(min(n, 3))]) if n else rows
    expected = tp.Flat(1.0).factors(means.norm(dim=1)) @ means
    torch.testing.assert_close(flat(last, 0), expected, rtol=1e-9, atol=1e-9 * max(n, 1))


@pytest.mark.parametrize("case", CASES)
def test_views_of_one_example_are_clipped_by_their_mean(case):
    n = len(CASES[case]()[1])
    count = next((k for k in range(n - 1, 0, -1) if n % k == 0), 1)  # number of examples, each with n / count views
    model, x, _, last = sums_after_measuring(case, one_group, clip_to(1.0), merging=Merging.views(count, n // count))
    rows = one_backward_per_example(model, x, losses_of)
    means = rows.view(count, n // count, -1).mean(1) if n else rows
    expected = tp.Flat(1.0).factors(means.norm(dim=1)) @ means
    torch.testing.assert_close(flat(last, 0), expected, rtol=1e-9, atol=1e-9 * max(n, 1))


@pytest.mark.parametrize("wrong", [False, True])
def test_known_layouts_get_spot_checks(wrong, monkeypatch):
    (model, x), layouts, measured = CASES["linear, flattened time first"](), Layouts(), []
    for _ in range(PROOFS):
        clipped_sum(model, x, layouts, one_group(model), clip_to(1.0))
    (known,) = layouts._on_path.values()
    if wrong:
        known.kinds = [(dim, "after" if order == "before" else "before") for dim, order in known.kinds]
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: True)
    measure = Layouts.measure
    monkeypatch.setattr(Layouts, "measure", lambda *args: measured.append(1) or measure(*args))
    total = clipped_sum(model, x, layouts, one_group(model), clip_to(1.0))
    rows = one_backward_per_example(model, x, losses_of)
    torch.testing.assert_close(flat(total, 0), tp.Flat(1.0).factors(rows.norm(dim=1)) @ rows)
    assert bool(measured) == wrong


@pytest.mark.parametrize("bad", [False, True])
def test_second_backward_if_nothing_is_kept(bad, monkeypatch):
    """A second backward gives the sum after the norms; the rows give it if some are left out."""
    monkeypatch.setattr(MemoryBudget, "wants_second_backward", True)
    model, x = CASES["linear, one position"]()
    dropped, layouts = [], Layouts()

    def clip(jacobian, group):
        dropped.append([block.dropped for block in jacobian._blocks])
        norms = jacobian.squared_norms().sqrt()
        kept = norms.isfinite().nonzero().flatten()
        jacobian = jacobian if len(kept) == len(x) else jacobian.select(kept)
        return jacobian.weighted_sum(tp.Flat(1.0).factors(norms[kept]))

    if bad:
        x[1] = torch.inf
    for _ in range(PROOFS + 1):
        total = clipped_sum(model, x, layouts, one_group(model), clip, memory_budget=LEAST)
    rows = one_backward_per_example(model, x, losses_of)
    rows = rows[torch.arange(len(x)) != 1] if bad else rows
    torch.testing.assert_close(flat(total, 0), tp.Flat(1.0).factors(rows.norm(dim=1)) @ rows)
    assert any(map(any, dropped))
    assert any(dropped[-1]) != bad


@pytest.mark.parametrize("case", CASES)
def test_batches_of_one_determine_layouts_of_such_batches_only(case, monkeypatch):
    model, x = CASES[case]()
    one, layouts, sizes, measure = x[:1], Layouts(), [], Layouts.measure
    monkeypatch.setattr(Layouts, "spot_check_is_due", lambda self: False)
    monkeypatch.setattr(Layouts, "guess", lambda *args: None)
    monkeypatch.setattr(Layouts, "measure", lambda *args: sizes.append(args[2].n) or measure(*args))
    sums = [flat(clipped_sum(model, one, layouts, one_group(model), clip_to(1.0)), 0) for _ in range(PROOFS + 1)]
    rows = one_backward_per_example(model, one, losses_of)
    torch.testing.assert_close(sums[0], tp.Flat(1.0).factors(rows.norm(dim=1)) @ rows, rtol=1e-9, atol=1e-9)
    assert torch.equal(sums[0], sums[-1])
    looks = len(sums) if case == "irregular: sorted by expert" else PROOFS  # one of the experts gets no token
    clipped_sum(model, x, layouts, one_group(model), clip_to(1.0))
    assert sizes == [1] * looks + [len(x)] * (len(x) > 1)


def test_coupled_examples_are_refused_also_after_batches_of_one():
    model, layouts = torch.nn.Linear(3, 2), Layouts()
    for n in (1, 1, 1, 4):
        x = torch.randn(n, 3)
        with Tape(trained(model), (), layouts, n) as tape:
            h = model(x)
            losses = (h / (1 + h.square().sum(0))).sum(1)
        if n == 1:
            tape.clipped_sum(losses, one_group(model), clip_to(1.0))
    with pytest.raises(tp.Refused, match="the 4 examples of the batch cannot be separated"):
        tape.clipped_sum(losses, one_group(model), clip_to(1.0))


@pytest.mark.parametrize("autocast", [False, True])
def test_no_second_backward_in_half_precision(autocast, monkeypatch):
    monkeypatch.setattr(MemoryBudget, "wants_second_backward", True)
    monkeypatch.setattr(SumByBackward, "__call__", None)  # a call would fail
    dtype, layouts = torch.float32 if autocast else torch.bfloat16, Layouts()
    model = torch.nn.Linear(3, 2, dtype=dtype)
    for _ in range(PROOFS + 1):
        x = torch.randn(4, 3, dtype=dtype)
        with Tape(trained(model), (), layouts, 4) as tape, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = model(x).float().square().sum(1)
        assert tape.clipped_sum(losses, one_group(model), clip_to(1.0))


def with_nan(x):
    return torch.cat([torch.full((1, 3), torch.nan), x])


def too_long(x):
    """Returns examples with rows of an infinite norm, which prove the layouts, so that these are not measured again."""
    return torch.finfo(x.dtype).max ** 0.6 * x


@pytest.mark.every_case
@pytest.mark.parametrize("first", [with_nan, too_long])
@pytest.mark.parametrize("budget", [LEAST, MOST])
def test_rows_are_checked_in_a_later_batch_if_the_first_ones_have_rows_that_are_not_finite(first, budget, monkeypatch):
    monkeypatch.setattr(MemoryBudget, "wants_second_backward", budget == LEAST)
    model, x, layouts = torch.nn.Linear(3, 4), torch.randn(5, 3), Layouts()
    model.weight.register_hook(lambda g: 2 * g)
    of_batch = partial(clipped_sum, model, layouts=layouts, groups=one_group(model), clip=clip_to(1.0))
    for _ in range(PROOFS):
        of_batch(first(x), memory_budget=budget)
    with pytest.raises(tp.Refused, match="do not add up to the native gradient"):
        of_batch(x, memory_budget=budget)
