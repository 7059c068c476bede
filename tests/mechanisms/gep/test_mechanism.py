# SPDX-License-Identifier: Apache-2.0
"""Tests gradient embedding perturbation: the release of a step, its sensitivity and price, resumed runs, refusals."""

import copy
import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from oracle import flat, recorded_jacobian
from parts import Calls, losses_of, own_batches
from torch import nn
from torch.utils.data import Subset, TensorDataset
from trainings import N, cross_entropy, data, network, parameters_of, rows_of, train, training_of

import torch_privacy as tp
from torch_privacy.mechanisms.base import PRICED_ROUNDING
from torch_privacy.mechanisms.gep.basis import Basis, Columns
from torch_privacy.mechanisms.gep.mechanism import EmbeddedSum
from torch_privacy.mechanisms.gep.orthonormal import OrthonormalBasis
from torch_privacy.privacy import NeighboringRelation, SubsampledBlocks, SubsampledGaussian, SubsampledGEP, compose

FLAT = tp.Flat(0.3), tp.Flat(0.2)
GROUPS = tp.Groups({"0": 0.3, "2": 0.1}), tp.Groups({"0": 0.2, "2": 0.15})


def subspace(num_basis=6, groups=("0", "2"), **settings):
    auxiliary = torch.randn(30, 3, generator=torch.Generator().manual_seed(7))
    return tp.AnchorSubspace(auxiliary, num_basis, list(groups), **settings)


def gep(embedding=FLAT[0], residual=FLAT[1], share=0.5, keeps=False, **settings):
    return tp.GEP(subspace(**settings), embedding, residual, share, keeps)


def gep_training(clipping=None, **settings):
    """Returns a training of ``network()``: group "0" has columns 0-15 of its parameters, group "2" 16-25."""
    return training_of(clipping=clipping or gep(), **settings)


def directions(training):
    """Returns the basis of the current step as a matrix (k, 26)."""
    return torch.block_diag(*(group.matrix() for group in training._setup.mechanism.basis.directions.values()))


def noise_of(training, step):
    """Returns the noise of a step for stddevs of 1: for the embedding, and for the residual if there is one."""
    zeros = {f"embedding in {group}": torch.zeros(k) for group, k in training._setup.mechanism.anchors.quotas.items()}
    count = sum(map(len, zeros.values()))
    if isinstance(training.settings.clipping, tp.GEP):
        zeros |= {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
    training._state.releases.noise.add_to(step, zeros, stddev=PRICED_ROUNDING)
    both = torch.cat([z.flatten() for z in zeros.values()])
    return both[:count], both[count:]


def without_noise(training):
    training._state.releases.noise.add_to = lambda *_: None
    return training


def drawing(training, indices):
    """Makes all batches of these examples."""
    draws = training._state.releases.draws
    draws.indices = draws.records = lambda step: indices


def clipped(rows, bound):
    return rows * (bound / rows.norm(dim=1)).clamp(max=1).nan_to_num(1)[:, None]


def released(training, rows, v, step):
    """Returns the gradient times the batch size by its formula, with explicit residuals, for `FLAT` or `GROUPS`."""
    w, r = rows @ v.T, rows - rows @ v.T @ v
    setting, (z, y) = training.settings.clipping, noise_of(training, step)
    if isinstance(setting.embedding_clipping, tp.Groups):
        k = sum(count for group, count in training._setup.mechanism.anchors.quotas.items() if group.startswith("0"))
        w, r = (
            torch.cat([clipped(part, bound) for part, bound in zip(parts.split(sizes, 1), bounds, strict=True)], 1)
            for parts, sizes, bounds in ((w, [k, len(v) - k], [0.3, 0.1]), (r, [16, 10], [0.2, 0.15]))
        )
        s1, s2 = math.hypot(0.3, 0.1), math.hypot(0.2, 0.15)
    else:
        w, r, s1, s2 = clipped(w, 0.3), clipped(r, 0.2), 0.3, 0.2
    share = setting.embedding_share
    w = w.sum(0) + s1 / math.sqrt(2 * share) * z
    r = r.sum(0) + s2 / math.sqrt(2 - 2 * share) * y
    return w @ v + r - (0 if setting.keeps_residual_noise else r @ v.T @ v)


FINER = ("0.weight", "0.bias", "2")  # finer groups than those of the rules


@pytest.mark.parametrize("rules", [FLAT, GROUPS], ids=["flat", "groups"])
@pytest.mark.parametrize(
    ("share", "size", "groups", "keeps"),
    [(0.5, None, ("0", "2"), False), (0.2, 3, ("0", "2"), True), (0.5, None, FINER, False)],
)
def test_step_releases_clipped_embeddings_and_residuals_plus_noise(rules, share, size, groups, keeps):
    training = gep_training(
        gep(*rules, share, keeps, groups=groups), performance=tp.Performance(microbatch_size=size), num_steps=4
    )
    rows = []
    for x, y in own_batches(training, cross_entropy):
        step, before, v = training.step_count, parameters_of(training).clone(), directions(training)
        rows.append(rows_of(training, x, y))
        if training.step(cross_entropy(training.model, x, y)):
            expected = before - released(training, torch.cat(rows), v, step) / 8
            torch.testing.assert_close(parameters_of(training), expected, rtol=1e-7, atol=1e-7)  # the basis is float32
            rows = []
        elif training.rehearsing:  # it ran new code, and comes again
            rows.pop()
    assert training.step_count == 4


def test_embedding_alone_is_released_without_the_residuals():
    training = gep_training(tp.BGEP(subspace(), tp.Flat(0.3)), num_steps=3)
    assert training.event == SubsampledGaussian(1.0, 8 / N, NeighboringRelation.REPLACE_SPECIAL)
    for x, y in own_batches(training, cross_entropy):
        step, before, v = training.step_count, parameters_of(training).clone(), directions(training)
        rows = rows_of(training, x, y)
        training.step(cross_entropy(training.model, x, y))
        expected = before - (clipped(rows @ v.T, 0.3).sum(0) + 0.3 * noise_of(training, step)[0]) @ v / 8
        torch.testing.assert_close(parameters_of(training), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [tp.GEP, tp.BGEP])
def test_gradient_without_clipping_and_noise_is_the_native_one(kind):
    wide = [tp.Flat(1e6)] * (2 if kind is tp.GEP else 1)
    training = without_noise(gep_training(kind(subspace(), *wide), expected_batch_size=N, num_steps=1))
    for x, y in own_batches(training, cross_entropy):
        before, v, rows = parameters_of(training).clone(), directions(training), rows_of(training, x, y)
        training.step(cross_entropy(training.model, x, y))
        residual = (rows - rows @ v.T @ v).mean(0)
        bias = 0 if kind is tp.GEP else residual
        assert residual.norm() > 1e-3
        torch.testing.assert_close(before - parameters_of(training), rows.mean(0) - bias, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_every_model_that_the_tape_accepts_is_embedded_and_recombined(case):
    model, x = CASES[case]()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    jacobian = recorded_jacobian(model, x, losses_of)
    rows = flat(jacobian.rows(), 1)
    mechanism = EmbeddedSum(gep(tp.Flat(1e6), tp.Flat(1e6), num_basis=4, groups=[""]), trained, 1.0)
    shapes = {name: p.shape for name, p in trained.items()}
    v = torch.linalg.qr(torch.randn(rows.shape[1], min(3, rows.shape[1])))[0].T.contiguous()
    mechanism.basis = Basis({"": Columns(shapes)}, {"": OrthonormalBasis(v, torch.eye(len(v)))})
    summation = mechanism.summation(None, len(x))
    sums = mechanism.complete(summation(jacobian, "all"), trained)
    scale = rows.abs().sum() + 1
    torch.testing.assert_close(sums["embedding in "], (rows @ v.T).sum(0), rtol=1e-8, atol=1e-9 * scale)
    gradient = flat(mechanism.gradient(sums), 0)
    torch.testing.assert_close(gradient, rows.sum(0), rtol=1e-8, atol=1e-9 * scale)


def adversarial(v):
    """Returns gradients in float32: inside the subspace, outside, mixtures, huge ones, and zero."""
    span = torch.nn.functional.normalize(torch.randn(40, len(v)) @ v)
    off = torch.randn(40, v.shape[1])
    off = torch.nn.functional.normalize(off - off @ v.T @ v)
    lengths = torch.logspace(-3, 5, 40)[:, None]
    mixtures = [lengths * (span + t * off) for t in (0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1, 10)]
    return torch.cat([*mixtures, lengths * off, torch.zeros(1, v.shape[1]), 1e30 * span[:3]])


def test_one_example_moves_both_sums_by_at_most_the_bounds_in_float32():
    """The gradient of ``w·x`` is x, so any gradient is possible. Norms are computed in float64 with the same basis."""
    torch.set_default_dtype(torch.float32)
    model = Calls(lambda m, x: x @ m.w, w=torch.zeros(20_000))
    auxiliary = torch.randn(60, 30) @ torch.randn(30, 20_000)
    setting = tp.GEP(tp.AnchorSubspace(auxiliary, 40, loss=lambda y, _: y, labels=lambda *_: None), *FLAT)
    mechanism = EmbeddedSum(setting, {"w": model.w}, 1.0)
    mechanism.basis = basis = setting.subspace.basis(model)
    (group,) = basis.groups
    v = basis.directions[group].matrix()
    assert len(v) == 30
    worst = 0.0
    for x in adversarial(v).split(1):
        jacobian = recorded_jacobian(model, x, lambda model, x: model(x))
        sums = mechanism.complete(mechanism.summation(None, 1)(jacobian, "all"), {"w": model.w})
        w, r = sums[f"embedding in {group}"].double().norm() / 0.3, sums["w"].double().norm() / 0.2
        assert max(w, r) <= 1 + 1e-5, (x.norm(), w, r)
        worst = max(worst, float(torch.hypot(w, r)))
    assert 1.41 < worst <= math.sqrt(2) * (1 + 1e-5)


@pytest.mark.parametrize("left_out", [0, 7])
def test_one_example_moves_the_release_by_at_most_root_two_bounds(left_out):
    """All examples join, and there is no noise."""
    sums = []
    for dataset in (data(), Subset(data(), [i for i in range(N) if i != left_out])):
        training = without_noise(
            gep_training(gep(tp.Flat(0.03), tp.Flat(0.02)), dataset=dataset, expected_batch_size=len(dataset))
        )
        for x, y in own_batches(training, cross_entropy):
            v, before = directions(training), parameters_of(training).clone()
            training.step(cross_entropy(training.model, x, y))
            moved = (before - parameters_of(training)) * len(dataset)
            sums.append(torch.cat([moved @ v.T / 0.03, (moved - moved @ v.T @ v) / 0.02]))
            break
    assert 1 < (sums[0] - sums[1]).norm() <= math.sqrt(2) * (1 + 1e-5)


@pytest.mark.thorough
def test_empty_batches_release_noise_alone_with_its_two_deviations():
    """The residual's noise inside the subspace is removed."""
    training = gep_training(expected_batch_size=8, num_steps=300, noise_multiplier=2.0)
    drawing(training, np.zeros(0, np.int64))
    released, begin = [], training._setup.mechanism.gradient

    def noted(release):
        v = directions(training)
        gradient = begin(release)
        g = 8 * torch.cat([part.flatten() for part in gradient.values()])
        released.append((g @ v.T, g - g @ v.T @ v))
        return gradient

    training._setup.mechanism.gradient = noted
    assert list(training) == []
    w, r = (torch.stack(part) for part in zip(*released, strict=True))
    assert len(w) == 300
    assert training.ledger.events == [(SubsampledGEP(2.0, 8 / N, NeighboringRelation.REPLACE_SPECIAL), 300)]
    assert w.std() == pytest.approx(2.0 * 0.3, rel=0.06)  # 1,800 numbers
    assert r.square().sum(1).mean().sqrt() == pytest.approx(2.0 * 0.2 * math.sqrt(26 - 6), rel=0.04)


@pytest.mark.thorough
def test_price_is_that_of_one_gaussian_for_every_share():
    q, steps = 8 / N, 6
    one = compose([(SubsampledGaussian(1 / math.sqrt(2), q), steps)]).epsilon(1e-3)
    two = compose([(SubsampledGaussian(1.0, q), 2 * steps)]).epsilon(1e-3)
    for share in (0.5, 0.2, None):
        training = gep_training(gep(share=share), delta=1e-3)
        train(training)
        (event, count), *others = training.ledger.events
        assert count == steps
        assert not others
        assert isinstance(event, SubsampledGEP if share == 0.5 else SubsampledBlocks)
        assert training.spent().epsilon.high == pytest.approx(one.high, rel=1e-4)
        assert abs(training.spent().epsilon.high - two.high) > 0.01
    target = gep_training(noise_multiplier=None, target_epsilon=2.0, delta=1e-3)
    train(target)
    assert 1.98 < target.spent().epsilon.high <= 2.0


def test_default_share_has_the_least_noise():
    k, p, s1, s2 = 6, 26, 0.3, 0.2

    def energy(share):
        return k * s1**2 / (2 * share) + (p - k) * s2**2 / (2 - 2 * share)

    training = gep_training(gep(share=None))
    share = training.statement()["clipping"]["embedding_share"]
    assert all(energy(share) <= energy(share * factor) for factor in (0.9, 0.99, 1.01, 1.1))


STOPS = {"equal": gep, "share": lambda: gep(share=0.3), "alone": lambda: tp.BGEP(subspace(num_anchors=20))}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("kind", STOPS)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind):
    whole = gep_training(STOPS[kind]())
    train(whole)
    stopped = gep_training(STOPS[kind]())
    train(stopped, steps=3)
    state = copy.deepcopy((stopped.state_dict(), stopped.model.state_dict()))
    train(stopped, steps=5)  # the run continues after its last checkpoint, and is killed
    torch.rand(5)
    again = gep_training(STOPS[kind]())
    again.load_state_dict(state[0])
    again.model.load_state_dict(state[1])
    train(again)
    assert torch.equal(parameters_of(again), parameters_of(whole))
    assert again.ledger.state_dict() == whole.ledger.state_dict()


def test_state_of_other_auxiliary_data_or_perturbation_is_refused():
    state = gep_training().state_dict()
    other = tp.AnchorSubspace(torch.randn(30, 3), 6, ["0", "2"])
    with pytest.raises(tp.Refused, match="auxiliary="):
        gep_training(tp.GEP(other, *FLAT)).load_state_dict(state)
    with pytest.raises(tp.Refused, match="perturbation="):
        gep_training(gep(share=0.2)).load_state_dict(state)
    with pytest.raises(tp.Refused, match="keeps_residual_noise="):
        gep_training(gep(keeps=True)).load_state_dict(state)
    with pytest.raises(tp.Refused, match="clipping="):
        training_of().load_state_dict(state)


def test_a_small_memory_budget_changes_nothing():
    trainings = [gep_training(performance=tp.Performance(memory_budget=budget)) for budget in (1e-6, 100)]
    for training in trainings:
        train(training)
    torch.testing.assert_close(*map(parameters_of, trainings))


def test_labels_are_drawn_afresh_in_every_step():
    seen = []

    def noted(batch, outputs, generator):
        seen.append(torch.randint(2, (len(outputs),), generator=generator))
        return seen[-1]

    train(gep_training(gep(labels=noted)))
    assert len(seen) == 6
    assert len({tuple(labels.tolist()) for labels in seen}) == 6


def test_a_restarted_step_has_the_same_basis_and_schedulers_continue():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    training = gep_training(model=model, optimizer=optimizer, scheduler=scheduler)
    next(iter(training))
    first = directions(training)
    for x, y in training:  # rehearsals exchange ``first``, a variable of the loop
        assert training.step_count or training.rehearsing or torch.equal(directions(training), first)
        training.step(cross_entropy(model, x, y))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_basis_leaves_random_state_buffers_and_recording_alone():
    def model():
        torch.manual_seed(1)
        layers = [nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.4), nn.Linear(4, 2)]
        return nn.Sequential(*layers)

    states = []
    for settings in ({"clipping": gep(groups=["0", "1", "3"])}, {}):
        torch.manual_seed(2)
        training = training_of(model=model(), **settings)
        train(training)
        states.append(torch.get_rng_state())
        assert torch.equal(training.model[1].running_mean, torch.zeros(4))
        assert all(p.grad is None for p in training.model.parameters())
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", [tp.GEP, tp.BGEP])
def test_gradients_that_are_not_finite_are_left_out_and_counted(kind):
    all_examples = data()
    all_examples.tensors[0][5] = torch.inf
    others = Subset(data(), [i for i in range(N) if i != 5])
    rules = FLAT if kind is tp.GEP else FLAT[:1]
    trainings = [
        without_noise(gep_training(kind(subspace(), *rules), dataset=dataset, expected_batch_size=39, num_steps=1))
        for dataset in (all_examples, others)
    ]
    for training in trainings:
        drawing(training, np.arange(training.settings.num_examples))
        train(training)
    torch.testing.assert_close(*map(parameters_of, trainings))
    assert [training.num_non_finite for training in trainings] == [1, 0]


def test_half_precision_and_autocast_train():
    torch.set_default_dtype(torch.float32)
    x = torch.randn(60, 3)
    dataset = TensorDataset(x.bfloat16(), torch.randint(2, (60,)))
    model = network().bfloat16()
    setting = tp.GEP(tp.AnchorSubspace(x.bfloat16(), 6, ["0", "2"]), *FLAT)
    training = gep_training(setting, model=model, dataset=dataset)
    train(training, losses=lambda m, x, y: F.cross_entropy(m(x).float(), y, reduction="none"))
    assert training.step_count == 6
    assert parameters_of(training).isfinite().all()


def test_rows_in_half_precision_are_projected_as_rounded():
    """Otherwise the residual's norm, a difference of squares, would have the rounding error of half precision."""
    torch.set_default_dtype(torch.float32)
    model = Calls(lambda m, x: F.linear(x, m.w.sin() * m.w), w=torch.randn(4, 30).bfloat16())
    jacobian = recorded_jacobian(model, torch.randn(9, 30).bfloat16(), losses_of)
    rows, v = flat(jacobian.rows(), 1).float(), torch.randn(5, 120)
    torch.testing.assert_close(jacobian.project({"w": v.view(5, 4, 30)}).float(), rows @ v.T, rtol=1e-2, atol=1e-2)
    inside = Basis({"": Columns({"w": torch.Size((4, 30))})}, {"": OrthonormalBasis(v, torch.eye(5))}).embed(
        jacobian, ""
    )
    torch.testing.assert_close(inside.double(), rows.double() @ v.double().T, rtol=1e-5, atol=1e-5)


def test_statement_lists_what_is_released_and_what_is_treated_as_public():
    training = gep_training()
    statement = training.statement()
    assert statement["clipping"]["rule"] == "GEP"
    assert statement["sensitivity"] == pytest.approx(math.sqrt(2))
    assert [part["sensitivity"] for part in statement["clipping"]["released"].values()] == [0.3, 0.2]
    assert statement["clipping"]["subspace"]["num_anchors"] == 30
    assert any("auxiliary data" in what for what in statement["treated_as_public"])
    for word in ("GEP", "embedding and residual", "30 public auxiliary examples", "'0'"):
        assert word in training.explain()
    assert "embedding alone" in gep_training(tp.BGEP(subspace())).explain()


PRIVATE = {
    "the data set": lambda dataset: dataset,
    "its tensor": lambda dataset: dataset.tensors[0],
    "a part of the tensor": lambda dataset: dataset.tensors[0][5:8],
    "a subset": lambda dataset: Subset(dataset, [3, 9]),
    "a copy": lambda dataset: dataset.tensors[0][5:8].clone(),
    "a copy by numpy": lambda dataset: TensorDataset(torch.from_numpy(dataset.tensors[0].numpy().copy())),
    "a subset of a subset of its tensors": lambda dataset: Subset(
        Subset(TensorDataset(*dataset.tensors), [9, 1, 4]), [2]
    ),
}


def private_as_auxiliary(part, dataset=None):
    dataset = data() if dataset is None else dataset
    return gep_training(tp.GEP(tp.AnchorSubspace(part(dataset), 6, 1), *FLAT), dataset=dataset)


REFUSED = {
    "adaptive": (lambda: gep(tp.Adaptive(1.0)), "embedding_clipping=Adaptive.*releases or groups more"),
    "micro-batches": (lambda: gep(residual=tp.MicroBatches(1.0, 4)), "residual_clipping=MicroBatches"),
    "torn group": (lambda: gep_training(gep(*GROUPS, groups=[""])), "group '' has parameters of several groups"),
    "neither": (lambda: training_of(clipping=None), "clipping=None must be a clipping rule"),
    "another": (lambda: training_of(clipping=0.5), "clipping=0.5 must be a clipping rule"),
    "share": (lambda: gep(share=1.0), r"embedding_share=1.0 must lie in \(0, 1\)"),
    "no subspace": (lambda: tp.BGEP(torch.randn(5, 3)), "subspace of type Tensor given; must be an AnchorSubspace"),
    **{
        f"private data as auxiliary, {what}": (partial(private_as_auxiliary, of), "hold private examples")
        for what, of in PRIVATE.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_without_a_price_are_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_public_and_private_parts_of_one_dataset_are_distinguished():
    whole = data()
    public, private = Subset(whole, range(7)), Subset(whole, range(7, N))
    for part in (public, whole.tensors[0][:7], Subset(TensorDataset(*whole.tensors), range(7))):
        setting = tp.GEP(tp.AnchorSubspace(part, 6, 1), *FLAT)
        gep_training(setting, dataset=private, expected_batch_size=4)
    with pytest.raises(tp.Refused, match="hold private examples"):
        gep_training(tp.GEP(tp.AnchorSubspace(Subset(whole, range(8)), 6, 1), *FLAT), dataset=private)


@pytest.mark.parametrize("kind", [tp.GEP, tp.BGEP])
def test_anchors_without_any_gradient_are_refused_and_nothing_is_spent(kind):
    training = gep_training(kind(subspace(loss=lambda outputs, labels: 0 * outputs.sum(1))))
    with pytest.raises(tp.Refused, match="every anchor gradient is zero or not finite"):
        train(training)
    assert training.ledger.events == []


def test_perturbation_cannot_be_changed_during_training():
    training = gep_training()
    train(training, steps=1)
    with pytest.raises(AttributeError, match=r"PrivateTraining.clipping cannot be set"):
        training.clipping = gep(share=0.3)
    with pytest.raises(AttributeError, match="cannot assign"):
        training.settings.clipping = gep(share=0.3)


@pytest.mark.thorough
def test_basis_may_be_computed_between_a_batch_and_its_step():
    expected, training = gep_training(), gep_training()
    train(expected)
    for x, y in training:
        losses = cross_entropy(training.model, x, y)
        training.settings.clipping.subspace.basis(training.model)
        training.step(losses)
    assert torch.equal(parameters_of(training), parameters_of(expected))


@pytest.mark.parametrize("iterations", [0, 1])
def test_in_a_loop_under_autocast_only_the_forward_is_rounded(iterations):
    torch.set_default_dtype(torch.float32)
    training = without_noise(gep_training(gep(power_iterations=iterations)))
    off = partial(torch.autocast, "cpu", enabled=False)

    def in_float32(model, x, y):
        with off():
            return cross_entropy(model, x.float(), y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x, y in own_batches(training, in_float32):
            x, before = x.float(), parameters_of(training).double()
            with off():
                v, rows = directions(training).double(), rows_of(training, x, y).double()
                losses = in_float32(training.model, x, y)
                torch.testing.assert_close(v @ v.T, torch.eye(len(v)).double(), rtol=0, atol=1e-5)
            training.step(losses)
            with off():
                w = rows @ v.T
                expected = clipped(w, 0.3).sum(0) @ v + clipped(rows - w @ v, 0.2).sum(0)
                torch.testing.assert_close(parameters_of(training).double(), before - expected / 8, rtol=0, atol=1e-5)


class Mixed(nn.Module):
    """Computes ``w·x`` in one dtype, times a scalar parameter of another dtype."""

    def __init__(self, weight, scale):
        super().__init__()
        self.w, self.s = nn.Parameter(torch.zeros(400, dtype=weight)), nn.Parameter(torch.ones(1, dtype=scale))

    def forward(self, x):
        return (x.to(self.w.dtype) @ self.w).to(self.s.dtype) * self.s


TYPES = torch.float32, torch.float64


@pytest.mark.parametrize("losses", TYPES)
@pytest.mark.parametrize("scale", TYPES)
@pytest.mark.parametrize("weight", TYPES)
def test_short_residuals_stay_within_their_bound_for_all_dtypes(weight, scale, losses):
    """The coarsest dtype on the way determines the rounding error of a residual; every combination trains."""
    v = torch.linalg.qr(torch.randn(400, 20, dtype=torch.float64))[0].T
    off = torch.randn(400, dtype=torch.float64)
    off -= off @ v.T @ v
    worst = 0.0
    for length, share in product((1e2, 1e4, 1e5), (1e-6, 1e-4, 1e-2)):
        anchors = tp.AnchorSubspace(v.clone(), 40, ["w", "s"], loss=lambda y, _: y, labels=lambda *_: None)
        model = Mixed(weight, scale)
        training = without_noise(
            training_of(
                model,
                dataset=TensorDataset((length * (v[3] + share * off / off.norm()))[None]),
                clipping=tp.GEP(anchors, tp.Flat(1.0), tp.Flat(0.1)),
                expected_batch_size=1,
                num_steps=1,
                delta=None,
            )
        )
        for (x,) in training:
            basis = training._setup.mechanism.basis.directions["w"].matrix().double()
            before = model.w.detach().clone()
            training.step(model(x).to(losses))
        g = (before - model.w.detach()).double() / training.optimizer.param_groups[0]["lr"]
        worst = max(worst, float((g - g @ basis.T @ basis).norm() / 0.1))
    assert worst <= 1 + 1e-4


def test_parameters_frozen_during_training_are_refused():
    training = gep_training()
    train(training, steps=1)
    training.model[2].bias.requires_grad_(False)
    with pytest.raises(tp.Refused, match=r"'2\.bias' was frozen or unfrozen"):
        train(training)


def test_parameters_frozen_within_a_step_are_refused_before_its_release():
    def freezing(model, x, y):
        model[2].bias.requires_grad_(training.step_count < 1)
        return cross_entropy(model, x, y)

    training = gep_training()
    with pytest.raises(tp.Refused, match=r"'2\.bias' was frozen or unfrozen"):
        train(training, losses=freezing)
    assert (training.step_count, len(training.ledger)) == (1, 1)
