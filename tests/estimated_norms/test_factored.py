# SPDX-License-Identifier: Apache-2.0
"""Tests norms estimated on the tape (sketches, floors) against rows: values, distributions, training, refusals."""

import copy
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, losses_of, tied_language_model
from oracle import flat, rows_of_one_graph, rows_or_skip
from parts import Calls, own_batches, tokens, trained
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.estimated_norms.directions import Directions
from torch_privacy.estimated_norms.estimates import Forms
from torch_privacy.estimated_norms.factored import FactoredNorms, sketch
from torch_privacy.estimated_norms.floored import FlooredNorms, norm_bounds
from torch_privacy.jacobian.layout import Layouts
from torch_privacy.jacobian.plan import Budget
from torch_privacy.jacobian.tape import Tape
from torch_privacy.mechanism import PRICED_ROUNDING
from torch_privacy.ops.embedding import Embedding
from torch_privacy.ops.linear import Linear
from torch_privacy.privacy import SubsampledGaussian, SubsampledJL, SubsampledSketch, compose

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
KEY = bytes(range(32))
FACTORED, FLOORED = tp.Sketched(16, kind="factored"), tp.Sketched(4, floor=0.8)


def on_the_tape(model, x, setting, budget=100.0, forms=None, layouts=None):
    """Returns estimated squared norms, a weighted sum, and the forms in which norms were computed."""
    forms, found = forms or Forms(), {}
    make = FactoredNorms if setting.kind == "factored" else FlooredNorms
    estimates = make(setting, Directions(KEY, 0, 0), trained(model), forms)

    def clip(jacobian, group):
        found["squares"] = jacobian.squared_norms()
        return jacobian.weighted_sum(weights(jacobian.num_examples))

    tape = Tape(trained(model), (*model.buffers(),), layouts or Layouts(), len(x), estimates)
    tape.note_inputs(x)
    with tape:
        losses = losses_of(model, x)
    total = tape.clipped_sum(losses, {"all": tuple(trained(model))}, clip, memory_budget=budget)
    return found["squares"], total, forms.known


def weights(n):
    return torch.linspace(0.1, 1, n)


def parts_of(rows, model):
    """Returns the rows by parameter, name -> (n, *shape)."""
    sizes = [p.numel() for p in trained(model).values()]
    parts = zip(trained(model).items(), rows.split(sizes, 1), strict=True)
    return {name: part.view(len(rows), *p.shape) for (name, p), part in parts}


def sketched_squares(rows, model, k, forms):
    """Returns the estimates by their definition: each part of the row as the matrix of its form, times directions."""
    total, names = torch.zeros(len(rows)), list(trained(model))
    for name, part in parts_of(rows, model).items():
        sizes = re.search(r"matrix (\d+) x (\d+)(?: of entries in the order (.*) of (.*))?", forms.get(name, "exact"))
        if sizes is None:
            total += part.reshape(len(rows), -1).square().sum(1)
            continue
        shape = int(sizes[1]), int(sizes[2])
        if sizes[3] is not None:  # reorder the weight's dimensions to those of the matrix
            order = [int(d) for d in re.findall(r"\d+", sizes[3])]
            part = part.reshape(len(rows), *(size for size in part.shape[1:] if size > 1))
            part = part.permute(0, *(1 + order.index(d) for d in range(len(order))))
        part = part.reshape(len(rows), *shape)
        s = Directions(KEY, 0, 0).matrix(names.index(name), (k, max(shape)), part)
        total += (s @ (part if shape[0] > shape[1] else part.mT)).flatten(1).square().sum(1) / k
    return total


@pytest.mark.parametrize("case", CASES)
def test_sketches_agree_with_rows_and_sums_are_exact(case):
    model, x = CASES[case]()
    rows = rows_or_skip(model, x)
    layouts, forms = Layouts(), Forms()
    for budget in (1e-9, 100.0):  # from x and b, or from rows
        squares, total, known = on_the_tape(model, x, tp.Sketched(1, kind="factored"), budget, forms, layouts)
        if "chain" not in case and "transposed parameter" not in case:  # there the matrices are functions of parameters
            torch.testing.assert_close(squares, sketched_squares(rows, model, 1, known), rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(flat(total, 0), weights(len(rows)) @ rows, rtol=1e-7, atol=1e-9)


def test_large_parameters_are_sketched_and_small_ones_are_exact():
    model = Calls(
        lambda m, x: m.conv(m.grouped(m.last(x))).flatten(1) @ m.head,
        last=nn.Conv2d(1, 64, 1), grouped=nn.Conv2d(64, 64, 3, groups=2), conv=nn.Conv2d(64, 40, 3),
        head=torch.randn(40 * 9, 50),
    )  # fmt: skip
    forms = on_the_tape(model, torch.randn(2, 1, 7, 7), FACTORED)[2]
    assert {name for name, form in forms.items() if form != "exact"} == {"grouped.weight", "conv.weight", "head"}


def test_tied_and_reused_weights_have_one_sketch_of_the_sum():
    torch.set_default_dtype(torch.float64)
    model, ids = tied_language_model(), tokens(4, 8)
    squares, _, forms = on_the_tape(model, ids, tp.Sketched(3, kind="factored"))
    assert forms["tokens.weight"] == "sketched as a matrix 7 x 6"
    rows = rows_of_one_graph(losses_of(model, ids), model)
    torch.testing.assert_close(squares, sketched_squares(rows, model, 3, forms))


@pytest.mark.parametrize("case", CASES)
def test_floored_norms_are_the_larger_of_projections_and_bounds(case):
    model, x = CASES[case]()
    rows = rows_or_skip(model, x)
    squares, total, _ = on_the_tape(model, x, tp.Sketched(2, floor=1e-9))
    v = Directions(KEY, 0, 0).draw(range(2), trained(model))
    projected = (rows @ flat(v, 1).mT).square().mean(1)
    torch.testing.assert_close(squares, projected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(flat(total, 0), weights(len(rows)) @ rows, rtol=1e-7, atol=1e-9)
    squares, _, _ = on_the_tape(model, x, tp.Sketched(2, floor=1.0))
    assert (squares >= rows.square().sum(1) * (1 - 1e-9)).all()
    assert (squares >= projected * (1 - 1e-6) - 1e-9).all()


def test_weight_used_twice_is_bounded_by_the_sum_of_its_norms():
    """Two uses with equal rows add up to twice the norm of one; a sum of squares would give √2 times."""
    model = Calls(lambda m, x: m.w(x) + m.w(x), w=nn.Linear(3, 2, bias=False))
    x = torch.randn(5, 3)
    squares, _, _ = on_the_tape(model, x, tp.Sketched(1, floor=1.0))
    lengths = rows_of_one_graph(losses_of(model, x), model).norm(dim=1)
    assert (squares.sqrt() >= lengths * (1 - 1e-12)).all()
    op = Linear(torch.ones(1, 2, 3), torch.ones(1, 2, 4))
    torch.testing.assert_close(norm_bounds(op), op.rows().flatten(1).norm(dim=1))  # tight where terms are aligned


@pytest.mark.parametrize("draw", range(3))
def test_bounds_hold_where_terms_are_aligned_or_cancel(draw):
    """Gradient ascent on the ratio of norm and bound does not exceed 1."""
    torch.manual_seed(draw)
    x, b = torch.randn(1, 4, 3, requires_grad=True), torch.randn(1, 4, 5, requires_grad=True)
    ascent, ratio = torch.optim.Adam([x, b], lr=0.1), torch.zeros(1)
    for _ in range(100):
        op = Linear(x, b)
        ratio = op.rows().norm() / norm_bounds(op)
        ascent.zero_grad()
        (-ratio).sum().backward()
        ascent.step()
    assert 0.99 < ratio.item() <= 1 + 1e-12


def draws_of(op, k, draws):
    """Returns estimates divided by the squared norm of the only row of ``op``, each with fresh directions."""
    rows, columns = op.shape
    left = rows > columns
    s = Directions(KEY, 5, 0).matrix(0, (draws * k, max(rows, columns)), torch.empty(0, dtype=op.dtype))
    squares = sketch(op, s, left)[0].square().sum(1).view(draws, k).mean(1)
    return (squares / op.rows().square().sum()).numpy()


@pytest.mark.parametrize("k", [1, 4])
def test_sketches_of_a_row_of_rank_one_follow_chi_square(k):
    ratio = draws_of(Linear(torch.randn(1, 1, 3), torch.randn(1, 1, 4)), k, 100_000)
    assert stats.kstest(ratio * k, "chi2", args=(k,)).pvalue > 1e-3


@pytest.mark.parametrize("k", [1, 4, 16])
def test_sketches_are_unbiased_and_below_the_chi_square_envelope(k):
    op = Linear(torch.randn(1, 5, 4), torch.randn(1, 5, 3))
    ratio = draws_of(op, k, 100_000)
    w = torch.linalg.svdvals(op.rows()[0]).square()
    w = (w / w.sum()).numpy()
    law = np.random.default_rng(0).chisquare(k, (100_000, len(w))) @ w / k
    assert stats.ks_2samp(ratio, law).pvalue > 1e-3
    assert abs(ratio.mean() - 1) < 5 * math.sqrt(2 * (w**2).sum() / k / 100_000)
    for t in (0.2, 0.5, 0.8, 0.95):  # the priced distribution is below t at least as often
        assert (ratio <= t).mean() <= stats.chi2.cdf(k * t, k) + 5 * math.sqrt(0.25 / 100_000)


def test_an_exact_part_keeps_the_distribution_below_the_envelope():
    k, share = 4, 0.3
    ratio = share + (1 - share) * draws_of(Linear(torch.randn(1, 5, 4), torch.randn(1, 5, 3)), k, 100_000)
    for t in (0.35, 0.5, 0.8, 0.95):
        assert (ratio <= t).mean() <= stats.chi2.cdf(k * t, k)


def language_model(width=40):
    parts = {"tokens": nn.Embedding(60, width), "mix": nn.Linear(width, 60), "norm": nn.LayerNorm(width)}
    return Calls(lambda m, ids: m.mix(m.norm(m.tokens(ids))).mean(1), **parts)


def data(n=40):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(60, (n, 6), generator=generator))


def training_of(model, setting, optimizer=torch.optim.SGD, **settings):
    settings = {"expected_batch_size": 8, "num_steps": 4, "clipping": tp.Flat(0.05), "noise_multiplier": 1.0} | settings
    dataset = settings.pop("dataset", data())
    return tp.PrivateTraining(model, optimizer(model.parameters(), lr=0.1), dataset, jacobian=setting, **settings)


def train(training, steps=None):
    for (x,) in training:
        training.step(losses_of(training.model, x))
        if training.step_count == steps:
            break
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def estimated_by(setting, model, x, directions):
    """Returns rows and squared norms by their definition."""
    rows = rows_of_one_graph(losses_of(model, x), model)
    if setting.kind == "factored":
        k, total = setting.num_projections, rows.square().sum(1)
        weight = parts_of(rows, model)["mix.weight"]
        s = directions.matrix(list(trained(model)).index("mix.weight"), (k, 60), weight)
        return rows, total - weight.square().sum((1, 2)) + (s @ weight).square().sum((1, 2)) / k
    v = directions.draw(range(setting.num_projections), trained(model))
    bounds = parts_of(rows, model)
    lengths = {name: part.flatten(1).norm(dim=1) for name, part in bounds.items()}
    b = (losses_of_positions(model, x)).norm(dim=2)
    lengths["mix.weight"] = (model.norm(model.tokens(x)).detach().norm(dim=2) * b).sum(1)
    squares = torch.stack([*lengths.values()]).square().sum(0)
    return rows, torch.maximum((rows @ flat(v, 1).mT).square().mean(1), setting.floor**2 * squares)


def losses_of_positions(model, x):
    """Returns the gradient of the losses in the output of the linear map, (n, t, e)."""
    y = model.mix(model.norm(model.tokens(x))).detach().requires_grad_()
    z = y.mean(1)
    (z.sin() * torch.linspace(0.5, 1.5, 60)).sum().backward()
    return y.grad


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_one_step_is_the_clipped_sum_by_estimates_plus_noise(setting):
    training = training_of(language_model(), setting, test_seed=5, num_steps=1, microbatch_size=3)
    training.optimizer.param_groups[0]["lr"] = 1.0
    model, total = copy.deepcopy(training.model), 0.0
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    noise = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    training._releases.noise.add_to(0, noise, 0.05 * PRICED_ROUNDING)
    for part, (x,) in enumerate(own_batches(training, losses_of)):
        rows, squares = estimated_by(setting, model, x, Directions(training._releases.noise.key, 0, part))
        total = total + (0.05 / squares.sqrt()).clamp(max=1) @ rows
        training.step(losses_of(training.model, x))
    expected = before - (total + torch.cat([z.flatten() for z in noise.values()])) / 8
    after = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_estimates_do_not_depend_on_the_rest_of_the_batch(setting):
    """They do not depend on the memory budget either, only on the example's row and the directions."""
    model, x = language_model(), data()[:9][0]
    whole = on_the_tape(model, x, setting)[0]
    for some in (slice(0, 1), slice(3, 5), slice(2, 9)):
        for budget in (1e-9, 1.0, 100.0):
            torch.testing.assert_close(on_the_tape(model, x[some], setting, budget)[0], whole[some], rtol=1e-9, atol=0)


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_a_second_backward_gives_the_same_estimates(setting, monkeypatch):
    model, x = language_model(), data()[:9][0]
    squares, total, _ = on_the_tape(model, x, setting)
    monkeypatch.setattr(Budget, "wants_second_backward", True)
    layouts = Layouts()
    for _ in range(3):
        again, sums, _ = on_the_tape(model, x, setting, 1e-9, layouts=layouts)
        torch.testing.assert_close(again, squares)
        torch.testing.assert_close(flat(sums, 0), flat(total, 0))


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_a_resumed_run_repeats_bit_for_bit(setting, microbatch_size):
    initial, settings = language_model(), {"test_seed": 5, "microbatch_size": microbatch_size}
    reference = train(training_of(copy.deepcopy(initial), setting, **settings))
    stopped = training_of(copy.deepcopy(initial), setting, **settings)
    train(stopped, steps=2)
    state = stopped.state_dict()
    resumed = training_of(copy.deepcopy(stopped.model), setting, **settings)
    resumed.load_state_dict(state)
    assert torch.equal(train(resumed), reference)
    assert resumed.explain() == stopped.explain()


def test_directions_are_fresh_in_every_step_and_microbatch(monkeypatch):
    drawn = {}  # without rehearsals, which reuse the directions of their batch

    def matrix(self, *args, right=Directions.matrix, **kwargs):
        found = right(self, *args, **kwargs)
        if not training.rehearsing:
            drawn[training.step_count, training._part.number, args[0]] = found
        return found

    monkeypatch.setattr(Directions, "matrix", matrix)
    training = training_of(language_model(), FACTORED, microbatch_size=3)
    train(training)
    numbers = torch.cat([d.flatten() for d in drawn.values()])
    assert len(drawn) > 4
    assert len(numbers.unique()) > 0.999 * len(numbers)


def test_many_directions_train_like_exact_norms():
    initial, away = language_model(), torch.zeros(2)
    for seed in range(16):
        settings = {"test_seed": seed, "clipping": tp.Flat(0.01)}
        reference = train(training_of(copy.deepcopy(initial), None, **settings))
        for k, setting in enumerate((tp.Sketched(16, kind="factored"), tp.Sketched(23, kind="factored"))):
            away[k] += (train(training_of(copy.deepcopy(initial), setting, **settings)) - reference).norm() / 16
    assert 0 < away[1] < away[0] < 0.01 * reference.norm()
    everything_exact = training_of(copy.deepcopy(initial), tp.Sketched(24, kind="factored"), **settings)
    assert torch.equal(train(everything_exact), reference)  # 60 · 40 = 24 · (60 + 40): as cheap without a sketch


@pytest.mark.parametrize("setting", [FACTORED, tp.Sketched(16), FLOORED, tp.Sketched(64, kind="factored")])
def test_epsilon_is_never_below_that_of_exact_norms(setting):
    training = training_of(language_model(), setting, delta=1e-3)
    train(training)
    exact = compose([(SubsampledGaussian(1.0, 0.2), 4)]).epsilon(1e-3)
    assert training.spent().epsilon.high > exact.high
    assert training.event == replace(
        setting.event(1.0, 0.2), neighboring_relation=training.settings.neighboring_relation
    )


def test_epsilon_converges_to_that_of_exact_norms():
    exact = compose([(SubsampledGaussian(1.0, 0.01), 2000)]).epsilon(1e-5).high
    for event, many in ((SubsampledJL, 1000), (SubsampledSketch, 10_000)):
        away = [compose([(event(1.0, r, 0.01), 2000)]).epsilon(1e-5).high - exact for r in (32, many)]
        assert 0 < away[1] < 0.05
        assert away[1] < away[0] / 8
    floored = compose([(SubsampledJL(1.0, 1000, 0.01, 0.8), 2000)]).epsilon(1e-5).high
    assert 0 < floored - exact < 0.05


def test_few_directions_are_refused_unless_there_is_a_floor():
    with pytest.raises(tp.Refused, match=r"Sketched\(12, kind='factored'\) would cost an epsilon of .* or more"):
        training_of(language_model(), tp.Sketched(12, kind="factored"), delta=1e-3)
    with pytest.raises(tp.Refused, match=r"give Sketched\(12, floor=0.8\)"):
        training_of(language_model(), tp.Sketched(12), delta=1e-3)
    training = training_of(language_model(), tp.Sketched(3, floor=0.8), delta=1e-3)
    train(training)
    assert training.statement()["private"]
    assert "estimates at least 0.8 U" in str(training.spent())
    training = training_of(language_model(), tp.Sketched(3, kind="factored"), delta=1e-3, not_for_release=True)
    train(training)
    assert not training.statement()["private"]


@pytest.mark.parametrize("settings", [{"kind": "else"}, {"floor": 0.0}, {"floor": 1.5}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="Sketched: "):
        tp.Sketched(16, **settings)
    with pytest.raises(ValueError, match="no price with kind='factored'"):
        tp.Sketched(16, kind="factored", floor=0.5)


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_a_form_that_depends_on_the_batch_is_refused(setting):
    """Otherwise one example could change how the norms of all others are estimated."""

    def forward(m, x):
        h = F.linear(x, m.w) if x[:, 0].max() > 2 else (x[:, None] * m.w).sum(2)
        return h.sin()

    model = Calls(forward, w=torch.randn(50, 40))
    x = torch.rand(8, 40)
    layouts, forms = Layouts(), Forms()
    on_the_tape(model, x, setting, forms=forms, layouts=layouts)
    x[3, 0] = 3
    with pytest.raises(tp.Refused, match=r"'w' was .* in earlier batches, and now is"):
        on_the_tape(model, x, setting, forms=forms, layouts=layouts)


def test_a_resumed_run_knows_the_forms_it_began_with():
    training = training_of(language_model(), FACTORED)
    train(training, steps=2)
    state = training.state_dict()
    state["projections"]["mix.weight"] = "exact"
    resumed = training_of(copy.deepcopy(training.model), FACTORED)
    resumed.load_state_dict(state)
    with pytest.raises(tp.Refused, match=r"'mix.weight' was exact in earlier batches"):
        train(resumed)


@pytest.mark.parametrize("changed", ["jacobian", "noise_multiplier", "sampling_probability"])
def test_settings_cannot_be_changed_on_the_way(changed):
    training = training_of(language_model(), FACTORED)
    with pytest.raises(AttributeError, match=f"PrivateTraining.{changed} cannot be set"):
        setattr(training, changed, {"jacobian": tp.Sketched(3)}.get(changed, 0.1))


@pytest.mark.parametrize("setting", [FACTORED, FLOORED, tp.Sketched(16)])
def test_a_run_whose_estimates_changed_is_refused(setting):
    """Nothing is released that the ledger would call something else."""
    training = training_of(language_model(), setting)
    train(training, steps=2)
    training._mechanism._estimator.setting = tp.Sketched(3, kind=setting.kind, floor=setting.floor)
    with pytest.raises(tp.Refused, match="changed since the start"):
        train(training)
    assert training.step_count == 2
    assert [count for _, count in training.ledger.events] == [2]


@pytest.mark.parametrize("other", [tp.Sketched(17, kind="factored"), tp.Sketched(16), tp.Sketched(16, floor=0.9), None])
def test_a_run_cannot_go_on_with_other_estimates(other):
    state = training_of(language_model(), FACTORED).state_dict()
    with pytest.raises(tp.Refused, match="jacobian="):
        training_of(language_model(), other).load_state_dict(state)


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_an_infinite_gradient_leaves_the_example_out(setting):
    model = Calls(lambda m, x: m.f(x), f=nn.Linear(50, 40))
    x = torch.randn(4, 50)
    x[2] = 1e200
    training = training_of(model, setting, dataset=TensorDataset(x), expected_batch_size=4, num_steps=2, test_seed=1)
    for (x,) in training:
        training.step(model(x).square().sum(1))
    assert training.num_non_finite == 2
    assert model.f.weight.isfinite().all()


def test_refusals_by_the_tape_keep_their_message():
    with pytest.raises(tp.Refused, match="cannot be separated"):
        train(training_of(Calls(lambda m, x: m.e(x).sum(1) - m.e(x).mean((0, 1)), e=nn.Embedding(60, 50)), FACTORED))


def test_empty_batches_are_steps_of_noise_alone():
    for setting in (FACTORED, FLOORED):
        training = training_of(
            language_model(), setting, expected_batch_size=0.4, dataset=data(4), num_steps=8, test_seed=2
        )
        train(training)
        assert training.step_count == 8


def test_look_ups_sum_equal_tokens_before_the_norm():
    op = Embedding(torch.zeros(1, 3, dtype=torch.long), torch.randn(1, 3, 4), torch.Size((7, 4)))
    s = torch.randn(2, 7)
    torch.testing.assert_close(sketch(op, s, True), s[:, :1] * op.b.sum(1, keepdim=True))


@pytest.mark.parametrize("setting", [FACTORED, FLOORED])
def test_half_precision_is_summed_in_float32(setting):
    """Norms are estimated from the same rows that are summed, with directions in float32."""
    torch.set_default_dtype(torch.float32)
    model, x = language_model().bfloat16(), data()[:9][0]
    squares = on_the_tape(model, x, setting)[0]
    with tp.record(model) as tape:
        jacobian = tape.jacobian(losses_of(model, x))
    rows = {name: part.double() for name, part in jacobian.rows().items()}
    assert squares.dtype is torch.float32
    if setting is FACTORED:
        s = Directions(KEY, 0, 0).matrix(1, (16, 60), torch.empty(0))
        others = jacobian.squared_norms().double() - rows["mix.weight"].square().sum((1, 2))
        expected = others + (s.double() @ rows["mix.weight"]).square().sum((1, 2)) / 16
        torch.testing.assert_close(squares.double(), expected, rtol=1e-4, atol=0)
    else:
        assert (squares >= FLOORED.floor**2 * jacobian.squared_norms()).all()
