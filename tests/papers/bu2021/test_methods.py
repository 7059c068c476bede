# SPDX-License-Identifier: Apache-2.0
"""What the JL experiments measure: methods that agree with each other, times, memory, limits."""

import copy
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy_papers.bu2021 import common as jl
from torch_privacy_papers.bu2021 import large as jl_large
from torch_privacy_papers.bu2021 import measure, methods
from torch_privacy_papers.bu2021 import tables as jl_mnist
from torch_privacy_papers.bu2021.methods import TimedProblem

N = 32


def problem(noise_multiplier=1e-6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    data = TensorDataset(torch.randn(N, 5), torch.randint(3, (N,)))
    models = []

    def new_model():
        models.append(copy.deepcopy(model))
        return models[-1]

    optimizer = partial(_sgd, 1.0)
    return TimedProblem(
        new_model, optimizer, data, batch_size=N, clip_norm=0.5, noise_multiplier=noise_multiplier
    ), models


def _sgd(lr, model):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_every_method_makes_the_same_step_where_all_examples_join(monkeypatch):
    task, models = problem()
    monkeypatch.setattr(TimedProblem, "batch", lambda self: self.data.tensors)
    makers = {"vanilla": methods.vanilla, "multiple": methods.multiple, "ours": partial(methods.ours, 0)}
    for maker in makers.values():
        maker(task)()
    ends = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-4, atol=1e-4)


def test_vanilla_is_timed_by_few_backwards():
    assert methods.vanilla_seconds({2: 3.0, 6: 5.0}, 10) == pytest.approx(7.0)


def test_contenders_take_turns():
    calls = []
    seconds = measure.seconds_by_turns({name: partial(calls.append, name) for name in "ab"}, budget=0.0)
    assert calls == ["a", "b"] * 5
    assert set(seconds) == {"a", "b"}


def batches_of_steps():
    """Returns a private step, and the list to which it adds how many batches it took: more than one if rehearsed."""
    task, taken = problem()[0], []
    model = task.new_model()
    training = tp.PrivateTraining(
        model,
        task.new_optimizer(model),
        task.data,
        expected_batch_size=N,
        num_steps=1000,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
    )
    batches = iter(training)

    def step():
        taken.append(0)
        made = training.step_count
        while training.step_count == made:
            x, y = next(batches)
            training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
            taken[-1] += 1

    return step, taken


def test_what_is_timed_is_no_rehearsed_step():
    step, taken = batches_of_steps()
    step()
    assert measure.seconds_by_turns({"ours": step}, 0.0, clock=lambda: sum(taken)) == {"ours": 1}


def test_peak_is_that_of_a_step_that_is_not_rehearsed(monkeypatch):
    step, taken = batches_of_steps()
    for _ in range(20):
        step()
    monkeypatch.setattr(measure, "_peak_of", lambda step: step() or taken[-1])
    assert measure.peak_bytes(step) == 1


def test_trainings_that_are_timed_by_turns_do_not_warn_of_each_other():
    task, _ = problem()
    assert {"non-private", "ours, exact"} <= set(jl.measure_steps(task, list(jl.METHODS)[:5], 0.0, quick=True)[0])


def test_peak_is_what_a_step_holds_at_once():
    def step():
        kept = torch.empty(2**18, dtype=torch.float32)
        for _ in range(3):
            torch.empty(2**20, dtype=torch.float32)
        return kept

    assert measure.peak_bytes(step) == pytest.approx(4 * (2**18 + 2**20), rel=0.01)


def takes(size):
    torch.zeros(size * 2**20, dtype=torch.uint8)


def ends_or_fails(size):
    if size == 64:
        os._exit(1)  # as a system without memory ends a process
    raise ValueError("no matter of memory")


@pytest.mark.thorough
def test_the_largest_size_under_a_limit_is_found():
    for limit, most, expected in ((300, 1000, 200), (1, 1000, 0), (300, 60, 60)):
        assert measure.largest_that_fits(takes, limit=limit * 2**20, most=most, least=100) == expected


@pytest.mark.thorough
def test_a_process_that_ends_finds_nothing_and_other_errors_are_raised():
    assert measure.largest_that_fits(ends_or_fails, limit=2**30, most=1000) == 0
    with pytest.raises(ValueError, match="no matter of memory"):
        measure.largest_that_fits(ends_or_fails, limit=2**30, most=1000, least=65)


def test_a_refusal_for_want_of_memory_counts_as_that(monkeypatch):
    def refused(problem):
        def step():
            raise tp.Refused("enforce fail at alloc_cpu.cpp")

        return step

    monkeypatch.setitem(jl.UNSPLIT, "multiple", refused)
    with pytest.raises(MemoryError, match="alloc"):
        jl._try_size(jl_mnist.ON_MNIST, "multiple", TensorDataset(torch.zeros(2, 1, 28, 28), torch.zeros(2)), 1)


def test_a_method_that_cannot_be_had_has_no_numbers(monkeypatch):
    def missing(problem):
        raise ModuleNotFoundError("opacus")

    monkeypatch.setitem(jl.METHODS, "outer product", missing)
    steps = jl._steps(problem(1.0)[0], list(jl.METHODS), quick=True)
    assert "outer product" not in steps
    assert {"non-private", "vanilla 2", "vanilla 6", "multiple", "ours, exact", "JL(1)", "JL(10)"} <= set(steps)


def test_rows_that_memory_cannot_hold_are_not_begun(monkeypatch):
    task, _ = problem(1.0)
    bytes_of_rows = N * 4 * (5 * 4 + 4 + 4 * 3 + 3)
    monkeypatch.setattr(methods, "memory_bytes", lambda: 2 * bytes_of_rows - 1)
    with pytest.raises(MemoryError, match="rows"):
        methods.outer_product(task)
    assert "outer product" not in jl._steps(task, ["non-private", "outer product"], quick=True)


@pytest.mark.thorough
def test_large_networks_have_the_paper_s_sizes_and_methods():
    comparisons = jl_large.ALEXNET, jl_large.VGG, jl_large.DENSER
    sizes = [sum(p.numel() for p in comparison.new_model().parameters()) for comparison in comparisons]
    assert sizes[:2] == [21_598_922, 32_394_562]
    assert sizes[2] == pytest.approx(17_146_938, rel=1.1e-4)
    assert {comparison.defaults.expected_batch_size for comparison in comparisons} == {64}
    rows = {row.name: row for row in jl_large.rows(quick=False)}
    assert len(rows) == 9 + 9 + 8 + 1  # VGG-13 is trained, too
    assert {"AlexNet, JL(1)", "VGG-13, JL(10)", "17.1 M, JL(30)", "VGG-13, ours, exact"} <= set(rows)
    assert not {"AlexNet, JL(5)", "VGG-13, JL(30)", "17.1 M, JL(1)", "17.1 M, JL(1), double vjp"} & set(rows)
    assert rows["VGG-13, JL(1), double vjp"].paper[jl.RATIO] == pytest.approx(212 / 13)  # of the paper's PyTorch
    assert rows["VGG-13, JL(10)"].paper[jl.RATIO] == pytest.approx(106 / 12)


def test_quick_look_takes_the_narrow_network():
    data = TensorDataset(torch.zeros(1, 1, 28, 28), torch.zeros(1))
    quick, full = (jl_large.ALEXNET.problem(data, quick=quick) for quick in (True, False))
    assert (quick.batch_size, full.batch_size) == (8, 64)
    narrow = sum(p.numel() for p in quick.new_model().parameters())
    assert 20 * narrow < sum(p.numel() for p in full.new_model().parameters())


def test_shorter_trainings_differ_in_rate_and_epochs_and_are_timed_by_their_method():
    rows = {row.name: row for row in jl_mnist.ON_IMDB.trainings(quick=False)}
    exact, projected = (rows[f"trained, {method}, 3 epochs at rate 0.01"] for method in ("exact", "JL(30)"))
    assert exact.settings == {"num_projections": 0, "learning_rate": 0.01, "epochs": 3}
    assert projected.settings == {**exact.settings, "num_projections": 30}
    assert [jl._timed_as(row.name) for row in (exact, projected)] == ["ours, exact", "JL(30)"]
    assert len(jl_mnist.ON_IMDB.trainings(quick=True)) == 2


def test_figures_draw_epsilon_over_time(monkeypatch, tmp_path):
    epochs = np.array([1.0, 2.0])
    course = {
        name: (epochs, np.array([0.8, 0.9]), epsilon)
        for name, epsilon in {
            "trained, exact": np.array([1.0, 2.0]),
            "trained, JL(1)": np.array([1e10, 4e11]),
            "trained, JL(5)": np.array([100.0, np.inf]),
        }.items()
    }
    monkeypatch.setattr(jl, "learning_curves", lambda *_: course)
    runs = {"ours, exact": (7.0, 1), "JL(1)": (9.0, 1), **dict.fromkeys(course, (None, 30))}
    results = {
        "quick": False,
        "seeds": [0],
        "rows": [
            {"row": name, "runs": [{"numbers": {jl.SECONDS: seconds}, "seconds": spent}]}
            for name, (seconds, spent) in runs.items()
        ],
    }
    drawn = jl_mnist.ON_MNIST.figures(results, tmp_path)
    lines = {key: {line.get_label(): line for line in figure.axes[0].lines} for key, figure in drawn.items()}
    assert lines["epsilon"]["trained, JL(1)"].get_ydata().tolist() == [1e10, 4e11]
    np.testing.assert_array_equal(lines["epsilon"]["trained, JL(5)"].get_ydata(), [100.0, np.nan])
    times = {name: line.get_xdata()[-1] for name, line in lines["accuracy-time"].items()}
    assert times == {"trained, exact": 14.0, "trained, JL(1)": 18.0, "trained, JL(5)": 30.0}


def test_time_to_the_goal_is_in_seconds_of_the_method_and_never_guessed():
    comparison = jl_mnist.ON_MNIST
    epochs = {
        "trained, exact": 14.0,
        "trained, JL(30)": None,
        "trained, JL(1)": 2.0,
        "trained, micro-batches of 4": 3.0,
    }
    names = [row.name for row in comparison.trainings(quick=False)]
    trained = {name: {jl.REACHED: epochs[name]} if name in epochs else {} for name in names if name != "trained, JL(5)"}
    measured = {"ours, exact": {jl.SECONDS: 8.0}, "JL(1)": {jl.SECONDS: 10.0}}
    rows = [{"row": name, "runs": [{"numbers": numbers}]} for name, numbers in {**measured, **trained}.items()]
    assert list(comparison.findings({"quick": False, "rows": rows})) == [
        "trained, exact: 95% first after 14 epochs, 112 s at 8.0 s an epoch.",
        "trained, JL(30): never 95% in 15 epochs.",
        "trained, JL(1): 95% first after 2 epochs, 20 s at 10.0 s an epoch.",
        "trained, micro-batches of 4: 95% first after 3 epochs.",
    ]


def test_the_first_epoch_at_the_goal_is_read_from_the_metrics():
    class Run:
        def read_metrics(self):
            scores = [
                ("non-private", 0.99),
                ("private", 0.9),
                ("private", 0.951),
                ("private", 0.949),
                ("private", 0.953),
            ]
            return [SimpleNamespace(training=t, epoch=i + 1.0, test_score=s) for i, (t, s) in enumerate(scores)]

    run: Any = Run()
    assert jl_mnist.ON_MNIST.numbers_of(run) == {jl.REACHED: 3.0}
    assert replace(jl_mnist.ON_MNIST, goal=0.96).numbers_of(run) == {jl.REACHED: None}


def test_micro_batches_are_clipped_by_their_rule():
    comparison = jl_mnist.ON_MNIST
    settings: list[Any] = [comparison.study().settings(**row.settings) for row in comparison.trainings(quick=False)]
    arguments: list[Any] = [jl._arguments(one, nn.Linear(1, 1)) for one in settings[-2:]]
    assert [one["clipping"] for one in arguments] == [tp.MicroBatches(1.5, 4), tp.MicroBatches(1.5, 16)]
    others = [jl._arguments(one, nn.Linear(1, 1)).get("clipping") for one in settings[:-2]]
    assert all(clipping is None or isinstance(clipping, tp.Sketched) for clipping in others)
