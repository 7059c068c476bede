# SPDX-License-Identifier: Apache-2.0
"""Tests the anchor subspace: orthonormal, spanned by the anchors, group by group, computed without side effects."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import rows_of_one_graph
from parts import Calls
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_privacy as tp
from torch_privacy.mechanisms.gep import anchors as _anchors
from torch_privacy.mechanisms.gep.basis import Columns, balanced_groups, groups_by_prefix, quotas
from torch_privacy.mechanisms.gep.orthonormal import CountSketch, RandomStart, orthonormal_combinations, orthonormalize
from torch_privacy.ops.dense import Rows


def generator():
    return torch.Generator().manual_seed(0)


def cnn(dtype=torch.float32):
    """Returns a CNN with layers of 160, 32, 1160 and 330 parameters."""
    layers = [nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)).to(dtype)


def images(m=60, dtype=torch.float32):
    return torch.randn(m, 1, 8, 8, dtype=dtype)


def explicit(basis):
    """Returns all directions as rows over all parameters, in the model's order."""
    rows = []
    shapes = {name: shape for columns in basis.columns.values() for name, shape in columns.shapes.items()}
    for group, zeros in basis.zeros().items():
        for direction in torch.eye(len(zeros), dtype=zeros.dtype):
            part = basis.expand({group: direction})
            rows.append(torch.cat([part.get(n, zeros.new_zeros(s)).flatten() for n, s in shapes.items()]))
    return torch.stack(rows)


def anchors(subspace, model, basis_seed=0):
    """Returns the basis and its anchor gradients G in float64, by a label function that records the batches."""
    seen = []

    def noted(batch, outputs, generator):
        seen.append((batch, subspace.labels(batch, outputs, generator)))
        return seen[-1][1]

    basis = tp.AnchorSubspace(
        subspace.auxiliary, subspace.num_basis, subspace.groups, power_iterations=1, labels=noted
    ).basis(model, seed=basis_seed)
    double = copy.deepcopy(model).double()
    rows = [rows_of_one_graph(F.cross_entropy(double(x.double()), y, reduction="none"), double) for (x,), y in seen]
    return basis, torch.cat(rows)


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_directions_are_orthonormal_and_zero_outside_of_their_group(dtype, iterations):
    subspace = tp.AnchorSubspace(images(dtype=dtype), 40, ["0", "1", "3", "7"], power_iterations=iterations)
    basis = subspace.basis(cnn(dtype))
    v = explicit(basis)
    assert v.dtype == dtype
    assert len(v) == 40 == sum(basis.num_directions.values())
    torch.testing.assert_close(v @ v.T, torch.eye(40, dtype=dtype), rtol=0, atol=1e-5)
    for group, names in basis.groups.items():
        part = basis.expand({group: torch.ones(basis.num_directions[group], dtype=dtype)})
        assert set(part) == set(names)


def test_one_iteration_spans_the_anchors():
    """If there are as many directions as anchors, they span all of them, for every random start."""
    model = cnn(torch.float64)
    basis, g = anchors(tp.AnchorSubspace(images(12, torch.float64), 36, ["0", "1", "3", "7"]), model)
    sizes = [sum(shape.numel() for shape in columns.shapes.values()) for columns in basis.columns.values()]
    directions, count = explicit(basis).split(list(basis.num_directions.values())), 0
    for part, group, v in zip(g.split(sizes, 1), basis.groups, directions, strict=True):
        v, count = v[:, count : count + part.shape[1]], count + part.shape[1]
        span = torch.linalg.matrix_rank(part)
        assert len(v) <= span
        if len(v) == span:
            torch.testing.assert_close(part @ v.T @ v, part, rtol=1e-6, atol=1e-8)
        else:  # the best subspace leaves out the smaller singular values; power iteration leaves out a little more
            best = torch.linalg.svdvals(part)[len(v) :].square().sum()
            assert best <= (part - part @ v.T @ v).square().sum() < 3 * best + 1e-9, group


def test_more_iterations_come_closer_to_the_leading_directions(monkeypatch):
    """The result is the same whether gradients are kept or recomputed."""
    model, x = cnn(torch.float64), images(60, torch.float64)
    labels = lambda batch, outputs, generator: torch.zeros(len(outputs), dtype=torch.int64)  # noqa: E731
    rows = rows_of_one_graph(F.cross_entropy(model(x), labels(x, x, None), reduction="none"), model)
    left = []
    for iterations in (1, 2, 4):
        v = explicit(tp.AnchorSubspace(x, 12, 1, power_iterations=iterations, labels=labels).basis(model))
        left.append(float((rows - rows @ v.T @ v).norm()))
    best = float(torch.linalg.svdvals(rows)[12:].norm())
    assert best <= left[2] < left[1] < left[0]
    assert left[2] < 1.05 * best
    monkeypatch.setattr(_anchors, "KEPT_BYTES", 0)
    again = explicit(tp.AnchorSubspace(x, 12, 1, power_iterations=4, labels=labels).basis(model))
    torch.testing.assert_close(again.T @ again, v.T @ v, rtol=1e-9, atol=1e-10)  # the same space


@pytest.mark.parametrize(("rows_kept", "forwards"), [(1682, 1), (1681, 3), (522, 3), (0, 3)])
def test_gradients_of_small_groups_are_kept_as_far_as_they_fit(monkeypatch, rows_kept, forwards):
    """The model runs again only if the gradients of some group, of 160, 32, 1160 or 330 entries, were not kept."""
    x, made, counter = images(20, torch.float64), [], itertools.count()  # a list would be put back with the model
    labels = lambda batch, outputs, generator: torch.zeros(len(outputs), dtype=torch.int64)  # noqa: E731
    subspace = tp.AnchorSubspace(x, 12, ["0", "1", "3", "7"], power_iterations=3, labels=labels)
    model = cnn(torch.float64)
    expected = explicit(subspace.basis(model))
    model.register_forward_hook(lambda *_: [next(counter)].clear())
    restricted = tp.Jacobian.restricted
    monkeypatch.setattr(_anchors, "KEPT_BYTES", 20 * 8 * rows_kept)
    monkeypatch.setattr(tp.Jacobian, "restricted", lambda self, names: made.append(names) or restricted(self, names))
    found = explicit(subspace.basis(model))
    torch.testing.assert_close(found.T @ found, expected.T @ expected, rtol=1e-9, atol=1e-10)  # the same space
    assert next(counter) == forwards
    again = {1682: 0, 1681: 1, 522: 1, 0: 4}[rows_kept]  # groups recomputed in every further iteration
    assert len(made) == 4 + 2 * again


def test_augmentation_depends_only_on_the_key_of_the_basis():
    drawn = []

    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return 30

        def __getitem__(self, number):
            drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
            return torch.full((4,), sum(drawn[-1])) + torch.arange(4) * number

    model, subspace = nn.Linear(4, 3), tp.AnchorSubspace(Augmented(), 3, 1)
    first = explicit(subspace.basis(model))
    torch.rand(3), np.random.rand(3), random.random()
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(explicit(subspace.basis(model)), first)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    subspace.basis(model, seed=1)
    assert drawn[:30] == drawn[30:60]
    old, new = ({number for numbers in part for number in numbers} for part in (drawn[:30], drawn[60:]))
    assert not old & new


def test_autocast_around_it_does_not_make_the_basis_coarse():
    torch.set_default_dtype(torch.float32)
    model, x = cnn(), images(40)
    for iterations in (0, 1, 2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v = explicit(tp.AnchorSubspace(x, 12, 2, power_iterations=iterations).basis(model)).double()
        torch.testing.assert_close(v @ v.T, torch.eye(len(v)).double(), rtol=0, atol=1e-5)


def test_without_iterations_directions_are_random_and_independent_of_the_anchors():
    """k of p random directions contain the share k/p of a vector's squared norm on average."""
    model = cnn(torch.float64)
    first, second = (
        explicit(
            tp.AnchorSubspace(images(m, torch.float64), 100, ["0", "1", "3", "7"], power_iterations=0).basis(model)
        )
        for m in (20, 30)
    )
    assert torch.equal(first, second)
    other = explicit(tp.AnchorSubspace(images(20, torch.float64), 100, 1, power_iterations=0).basis(model, seed=1))
    assert (first[:1] @ other.T).norm() < 0.9
    vectors = F.normalize(torch.randn(200, other.shape[1]))
    assert (vectors @ other.T).square().sum(1).mean() == pytest.approx(100 / other.shape[1], rel=0.1)


def test_a_sketched_start_is_as_good_as_a_dense_normal_one():
    """Compares the part of a Jacobian with known spectrum outside of the basis with its singular values."""
    u, v = (torch.linalg.qr(torch.randn(size, 60))[0] for size in (200, 4000))
    spectrum = torch.logspace(0, -2, 60)
    g = u * spectrum @ v.T
    b = RandomStart(4000, 20, generator(), g).coordinates((g[:, :1500], g[:, 1500:])).T @ g
    basis = orthonormalize({"": b}, generator())[""].matrix()
    normal = orthonormalize({"": (g @ torch.randn(4000, 20)).T @ g}, generator())[""].matrix()
    left, by_normal, best = (
        (g - g @ basis.T @ basis).norm(),
        (g - g @ normal.T @ normal).norm(),
        spectrum[20:].norm(),
    )
    assert best <= left < 1.3 * by_normal
    assert left < 2 * best


@pytest.mark.parametrize("decades", [0, 3, 5])
def test_orthonormalize_keeps_badly_conditioned_directions(decades):
    torch.set_default_dtype(torch.float32)
    u = torch.linalg.qr(torch.randn(9000, 30).double())[0]
    mixed = torch.linalg.qr(torch.randn(30, 30).double())[0] * torch.logspace(0, -decades, 30).double() @ u.T
    v = orthonormalize({"": 1e-12 * mixed.float()}, generator())[""].matrix()
    torch.testing.assert_close(v @ v.T, torch.eye(30), rtol=0, atol=2e-6)
    assert (v.double() @ u).norm() ** 2 == pytest.approx(30, abs=0.05)


@pytest.mark.parametrize("decades", [0, 1, 2])
def test_combinations_of_rows_in_chunks_are_orthonormal_and_span_those_of_the_whole_product(decades):
    torch.set_default_dtype(torch.float32)
    u, v = (torch.linalg.qr(torch.randn(size, 30).double())[0] for size in (80, 9000))
    g = (1e-6 * (u * torch.logspace(0, -decades, 30).double()) @ v.T).float()
    rows = [(part[:, :100], part[:, 100:]) for part in g.split(32)]
    start = {"": RandomStart(9000, 30, generator(), g)}
    found = orthonormal_combinations({"": rows}, start, generator())[""].matrix()
    torch.testing.assert_close(found @ found.T, torch.eye(30), rtol=0, atol=2e-6)
    assert (found.double() @ v).norm() ** 2 == pytest.approx(30, abs=0.05)


def test_combinations_of_zeros_have_no_direction():
    rows = [(torch.zeros(5, 3), torch.zeros(5, 40))]
    start = RandomStart(43, 4, generator(), rows[0][0])
    assert orthonormal_combinations({"": rows}, {"": start}, generator())[""].matrix().shape == (0, 43)


def test_directions_that_their_sketch_misjudges_become_orthonormal_as_well():
    """The sketch of the first vector is nearly zero, so the first pass scales it far too long."""
    torch.set_default_dtype(torch.float32)
    vectors = torch.randn(5, 400)
    sketch = CountSketch(400, 5, generator(), vectors)
    signs = sketch(torch.eye(400)).sum(1)
    missed = torch.randn(400)
    missed[320:] -= signs[320:] * sketch(missed[None])[0]  # the last term of each sum cancels the others
    vectors[0] = missed + 0.03 * torch.randn(400)
    assert sketch(vectors[:1]).norm() < 0.1 * vectors[0].norm()
    span = torch.linalg.qr(vectors.double().T)[0].T
    v = orthonormalize({"": vectors}, generator())[""].matrix()
    torch.testing.assert_close(v @ v.T, torch.eye(5), rtol=0, atol=2e-6)
    torch.testing.assert_close((v.double() @ span.T).norm() ** 2, torch.tensor(5.0).double(), rtol=0, atol=1e-5)


def test_columns_keep_the_memory_order_of_rows():
    """Rows of convolutions have channels last in memory; a product copies neither them nor the directions."""
    rows = {"a": torch.randn(5, 4, 2, 3, 6).permute(0, 1, 4, 2, 3), "b": torch.randn(5, 7), "c": torch.randn(5)}
    columns = Columns.of(rows)
    flat = columns.flat(rows)
    assert [part.shape for part in flat] == [(5, 144), (5, 7), (5, 1)]
    assert flat[0].data_ptr() == rows["a"].data_ptr()
    for name, part in columns.split(torch.cat(flat, 1)).items():
        assert torch.equal(part, rows[name])
    v = columns.split(torch.randn(3, 152))["a"]
    for directions in (v, v.contiguous(), v.expand(8, 3, 4, 6, 2, 3).flatten(0, 1)):  # fewer than rows, and more
        expected = rows["a"].flatten(1) @ directions.flatten(1).T
        torch.testing.assert_close(Rows(rows["a"]).project(directions), expected)


def test_deficient_anchors_give_fewer_directions_and_never_nan():
    torch.set_default_dtype(torch.float32)
    model = cnn()
    same = images(1).expand(30, -1, -1, -1).contiguous()
    zeros = lambda batch, outputs, generator: torch.zeros(len(outputs), dtype=torch.int64)  # noqa: E731
    basis = tp.AnchorSubspace(same, 20, 2, labels=zeros).basis(model)
    assert set(basis.num_directions.values()) == {1}
    still = tp.AnchorSubspace(same, 20, 2, loss=lambda outputs, labels: 0 * outputs.sum(1)).basis(model)
    assert set(still.num_directions.values()) == {0}
    bad = images(30)
    bad[3] = torch.inf
    left_out = tp.AnchorSubspace(bad, 20, 2).basis(model)
    assert explicit(left_out).isfinite().all()
    assert len(explicit(left_out)) == 20


def test_groups_are_independent_of_each_other():
    """An unreached layer has no directions, and the others have the same as without it."""
    torch.manual_seed(1)
    alone = Calls(lambda m, x: m.a(x), a=nn.Linear(4, 3))
    both = Calls(lambda m, x: m.a(x), a=copy.deepcopy(alone.a), b=nn.Linear(5, 2))
    x = torch.randn(30, 4)
    basis = tp.AnchorSubspace(x, 12, ["a", "b"]).basis(both)
    assert basis.num_directions == {"a": 6, "b": 0}
    v = basis.directions["a"].matrix()
    other = tp.AnchorSubspace(x, 6, ["a"]).basis(alone).directions["a"].matrix()
    torch.testing.assert_close(v.T @ v, other.T @ other, rtol=1e-6, atol=1e-8)


def test_chunks_make_no_difference_with_given_labels():
    labels = torch.randint(10, (50,))
    data, model = TensorDataset(images(50, torch.float64), labels), cnn(torch.float64)
    true = lambda batch, outputs, generator: batch[1]  # noqa: E731
    first, second = (
        explicit(tp.AnchorSubspace(data, 20, 3, labels=true, chunk_size=size).basis(model)) for size in (7, 64)
    )
    torch.testing.assert_close(first, second, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("wrap", [lambda x: (x, x + 1), lambda x: {"a": x, "b": x + 1}], ids=["tuple", "mapping"])
def test_inputs_may_be_several(wrap):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.layer(a * b)

    items = [(wrap(x), 0) for x in torch.randn(20, 4)]
    assert tp.AnchorSubspace(items, 5, 1).basis(Sum()).num_directions == {"layer.weight ... layer.bias": 5}


def test_some_anchors_are_drawn_anew_with_new_labels():
    seen = []

    def noted(batch, outputs, generator):
        seen.append((batch[0][:, 0].tolist(), torch.randint(10, (len(outputs),), generator=generator)))
        return seen[-1][1]

    subspace = tp.AnchorSubspace(torch.randn(40, 4), 6, 1, num_anchors=20, labels=noted)
    model = nn.Linear(4, 10)
    for seed in (0, 0, 1):
        subspace.basis(model, seed=seed)
    (first, labels), (again, same), (other, new) = seen
    assert len(first) == 20
    assert first == again != other
    assert torch.equal(labels, same)
    assert not torch.equal(labels, new)


def test_computing_a_basis_has_no_side_effects():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.Dropout(0.5), nn.Linear(8, 3))
    model[0].weight.grad = torch.ones(8, 4)
    subspace = tp.AnchorSubspace(torch.randn(20, 4), 6, 2, power_iterations=2)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = subspace.basis(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))
    assert model[3].weight.grad is None
    torch.rand(7)
    assert torch.equal(explicit(subspace.basis(model)), explicit(first))  # dropout depends only on the key


def test_quotas_follow_the_roots_of_the_sizes():
    sizes = {"stem": 464, "first": 14016, "second": 51072, "third": 203520, "head": 650}
    assert quotas(500, sizes) == {"stem": 13, "first": 70, "second": 134, "third": 268, "head": 15}
    assert quotas(10, {"a": 2, "b": 100}) == {"a": 1, "b": 9}
    assert quotas(50, {"a": 2, "b": 100}) == {"a": 2, "b": 48}  # no more than parameters
    assert quotas(500, {"a": 2, "b": 100}) == {"a": 2, "b": 100}


def test_automatic_groups_are_balanced_runs_of_parameters():
    groups = balanced_groups({"a": 50, "b": 40, "c": 10, "d": 60, "e": 1}, 3)
    assert list(groups.values()) == [("a",), ("b", "c"), ("d", "e")]
    assert len(balanced_groups({"a": 5}, 4)) == 1


def test_prefixes_that_do_not_fit_are_refused():
    sizes = {"conv.weight": 4, "head.weight": 3}
    assert groups_by_prefix(sizes, ["head", ""]) == {"head": ("head.weight",), "": ("conv.weight",)}
    with pytest.raises(ValueError, match=r"Matched by none: \['head.weight'\]; matching none: \['hea'\]"):
        groups_by_prefix(sizes, ["conv", "hea"])
    with pytest.raises(ValueError, match="num_basis=1 is less than the number of groups, 2"):
        tp.AnchorSubspace(torch.randn(5, 4), 1, ["0", "1"]).basis(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"num_anchors=6 must be at most 5"):
        tp.AnchorSubspace(torch.randn(5, 4), 1, num_anchors=6)
    with pytest.raises(ValueError, match=r"num_basis=0 must be an integer of at least 1"):
        tp.AnchorSubspace(torch.randn(5, 4), 0)
    with pytest.raises(tp.Refused, match="auxiliary is empty"):
        tp.AnchorSubspace(torch.randn(0, 4), 1)
    for auxiliary in (torch.tensor(1.0), torch.eye(3).to_sparse()):
        with pytest.raises(tp.Refused, match="must be a dense tensor with examples first"):
            tp.AnchorSubspace(auxiliary, 1)
    for auxiliary in (None, DataLoader([1, 2])):
        with pytest.raises(tp.Refused, match=r"^auxiliary "):
            tp.AnchorSubspace(auxiliary, 1)
    for groups in ("0", 2.0, [0, 2], {"0": 1}, np.int64(2)):
        with pytest.raises(ValueError, match=r"groups=.* must be a number of groups or a list of prefixes"):
            tp.AnchorSubspace(torch.randn(5, 4), 1, groups)
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        tp.AnchorSubspace(torch.randn(5, 4), 1).basis(nn.Linear(4, 3).requires_grad_(False))


@pytest.mark.parametrize(
    "new", [lambda: nn.Linear(4, 1), lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)), lambda: nn.RNN(4, 3)]
)
def test_random_labels_for_outputs_without_classes_are_refused(new):
    with pytest.raises(tp.Refused, match=r"at least 2 classes; the model's have .* Pass labels= and loss="):
        tp.AnchorSubspace(torch.randn(5, 4), 1, 1).basis(new())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, _: y.mean()[None], r"on the auxiliary data: loss returned 1 losses for 5 examples"),
        (lambda y, _: y.mean(), r"on the auxiliary data: losses of shape \(\)"),
    ],
    ids=["one", "scalar"],
)
def test_a_loss_that_is_not_one_for_each_example_is_refused(loss, message):
    with pytest.raises(tp.Refused, match=message):
        tp.AnchorSubspace(torch.randn(5, 4), 2, 1, loss=loss).basis(nn.Linear(4, 3))


class Counts(nn.Linear):
    """Counts its examples in a buffer."""

    def forward(self, input):
        self.seen += len(input)
        return super().forward(input)


def test_buffers_changed_by_the_auxiliary_data_are_restored():
    model = Counts(4, 3)
    model.register_buffer("seen", torch.zeros(()))
    tp.AnchorSubspace(torch.randn(5, 4), 2, 1).basis(model)
    assert model.seen == 0


class Learns(nn.Linear):
    """Moves a frozen parameter toward its inputs."""

    def forward(self, input):
        with torch.no_grad():
            self.code.lerp_(input.mean(0), 0.1)
        return super().forward(input)


def test_a_forward_that_writes_into_a_parameter_is_refused():
    model = Learns(4, 3)
    model.code = nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(tp.Refused, match=r"on the auxiliary data: .*the forward changed 'code'"):
        tp.AnchorSubspace(torch.randn(5, 4), 2, 1).basis(model)


def test_an_error_of_the_model_says_that_it_was_on_the_auxiliary_data():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        tp.AnchorSubspace(torch.randn(5, 3), 2, 1).basis(nn.Linear(4, 3))
    assert "on the auxiliary data" in raised.value.__notes__[0]


@pytest.mark.parametrize("power_iterations", [0, 1])
def test_properties_of_gradients_are_those_of_explicit_rows(power_iterations):
    model, x, y = cnn(torch.float64), images(25, torch.float64), torch.randint(10, (25,))
    basis = tp.AnchorSubspace(
        images(40, torch.float64), 12, ["0", "1", "3", "7"], power_iterations=power_iterations
    ).basis(model)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    jacobian = tape.jacobian(losses)
    whole, left = basis.stable_ranks(jacobian), basis.stable_ranks(jacobian, residuals=True)
    errors, energy = basis.projection_errors(jacobian), basis.captured_energy(jacobian)
    assert list(whole) == list(left) == list(errors) == list(energy) == ["0", "1", "3", "7"]
    v, shapes = explicit(basis).double(), {name: p.shape for name, p in model.named_parameters()}
    ends = np.cumsum([0, *(shape.numel() for shape in shapes.values())])
    columns = dict(zip(shapes, itertools.pairwise(ends.tolist()), strict=True))
    rows = torch.cat([part.flatten(1) for part in jacobian.rows().values()], 1)
    for group, names in basis.groups.items():
        inside = torch.cat([torch.arange(*columns[name]) for name in names])
        g = rows[:, inside]
        mine = v[:, inside][v[:, inside].norm(dim=1) > 0.5]
        residuals, mean = g - g @ mine.T @ mine, g.mean(0)
        for found, matrix in ((whole[group], g), (left[group], residuals)):
            values = torch.linalg.svdvals(matrix)
            assert found == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-4)
        assert errors[group] == pytest.approx(float((mean - mean @ mine.T @ mine).norm() / mean.norm()), rel=1e-4)
        assert energy[group] == pytest.approx(float((g @ mine.T).square().sum() / g.square().sum()), rel=1e-4)


def test_properties_of_nothing_are_zero():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(6, 3)
    basis = tp.AnchorSubspace(torch.randn(60, 3), 22, ["0", "1"]).basis(model)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x), torch.randint(2, (6,)), reduction="none")
    jacobian = tape.jacobian(losses)
    assert basis.stable_ranks(jacobian, residuals=True) == {"0": 0, "1": 0}  # the subspace has all that gradients span
    assert all(error < 1e-3 for error in basis.projection_errors(jacobian).values())
    assert list(basis.captured_energy(jacobian).values()) == pytest.approx([1, 1], abs=1e-5)
    with tp.record(model) as tape:
        losses = 0 * F.cross_entropy(model(x), torch.randint(2, (6,)), reduction="none")
    nothing = tape.jacobian(losses)
    zeros = {"0": 0, "1": 0}
    assert basis.stable_ranks(nothing) == basis.projection_errors(nothing) == basis.captured_energy(nothing) == zeros


@pytest.mark.parametrize("call", ["stable_ranks", "projection_errors", "captured_energy"])
def test_properties_of_other_gradients_are_refused(call):
    model, other = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    basis = tp.AnchorSubspace(torch.randn(9, 3), 4).basis(model)
    for trained, count, match in ((other, 5, "names and shapes must be equal"), (model, 0, "of no example")):
        with tp.record(trained) as tape:
            losses = F.cross_entropy(trained(torch.randn(count, 3)), torch.randint(4, (count,)), reduction="none")
        with pytest.raises(ValueError, match=match):
            getattr(basis, call)(tape.jacobian(losses))
