# SPDX-License-Identifier: Apache-2.0
"""Tests of compiled training against the same training by the tape. ``aot_eager`` needs no compiler."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, losses_of
from parts import Calls
from torch import nn
from torch.utils.data import TensorDataset
from trainings import cross_entropy, data, network, parameters_of, train, training_of

import torch_privacy as tp

CPU = {"backend": "aot_eager"}
FEW = [
    "linear, rank 3",
    "linear, flattened time first",
    "linear, changed in place",
    "linear, sliced parameter",
    "tied autoencoder",
    "tied language model",
    "layer norm, used twice",
    "bias by subtraction",
    "position by expand",
    "convolutional network",
    "conv2d, channels last",
    "conv2d, called on two sizes",
    "table of relative positions",
    "scaled in place",
    "frozen part",
    "attention",
    "transformer layer",
    "einsum, one matrix per head",
    "rms norm",
]
FIVE_AT_MOST = "irregular: shuffled"  # its model takes no more examples, and sampled batches may be larger
LEFT_TO_TAPE = {  # case -> a part of the reason
    "matmul, transposed parameter": "in other calls than",
    "linear, weight norm": "in other calls than",
    "long short-term memory": "computed by a scan",
    "matrix with every example's own call": "which dimension holds the examples",
    "by fallback: maximum": "no rule for its rows",
    "irregular: sorted tokens": "the data determine the order",
    "irregular: one expert each": "the data determine the order",
    "embedding bag": "no graph can have",
}


pytestmark = pytest.mark.filterwarnings("ignore:PrivateTraining.*Normalize at least")  # of tiny cases


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def data_of(case, n=40):
    """Returns a case's model and at least n examples."""
    torch.manual_seed(0)
    model, x = CASES[case]()
    parts = [x]
    while sum(map(len, parts)) < n:
        parts.append(CASES[case]()[1])
    return model, TensorDataset(torch.cat(parts))


def trained_case(case, compile):
    model, dataset = data_of(case)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    settings = {"num_steps": 12, "microbatch_size": 6, "compile": compile}
    training = training_of(model, dataset, optimizer, **settings)
    train_pairs(training, lambda model, x: losses_of(model, x))
    return training


def train_pairs(training, losses):
    for batch in training:
        training.step(losses(training.model, *batch))
    return training


def graphs_of(training):
    """Returns the compiled graphs of a training, with its counts."""
    return training._compiled._compiled


def assert_same_weights(training, other, tolerance=1e-6):
    a, b = parameters_of(training), parameters_of(other)
    assert float((a - b).norm()) <= tolerance * float(b.norm())


def assert_replayed(training):
    graphs = graphs_of(training)
    assert graphs.given_up == ""
    assert graphs.num_replayed > 3


def both(losses=cross_entropy, make=network, **settings):
    """Returns a compiled training and one by the tape, after all steps."""
    settings = {"num_steps": 20} | settings
    trainings = [training_of(make(), compile=compile, **settings) for compile in (CPU, False)]
    for training in trainings:
        train_pairs(training, losses)
    return trainings


# K1: the same weights


def assert_case_is_compiled(case):
    compiled = trained_case(case, CPU)
    assert_replayed(compiled)
    assert_same_weights(compiled, trained_case(case, False))


@pytest.mark.parametrize("case", FEW)
def test_compiled_training_has_the_weights_of_the_tape(case):
    assert_case_is_compiled(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in (*FEW, FIVE_AT_MOST)])
def test_training_compiled_or_left_to_the_tape_has_the_weights_of_the_tape(case):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncompiled from here on")
        warnings.filterwarnings("ignore", message="Using padding='same'")  # torch says so once
        compiled = trained_case(case, CPU)
    assert_same_weights(compiled, trained_case(case, False))


@pytest.mark.parametrize("case", LEFT_TO_TAPE)
def test_model_that_no_graph_can_have_is_left_to_the_tape_and_said_once(case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = trained_case(case, CPU)
    said = [str(warning.message) for warning in caught if "runs uncompiled" in str(warning.message)]
    assert len(said) == 1
    assert LEFT_TO_TAPE[case] in said[0]
    assert torch.equal(parameters_of(compiled), parameters_of(trained_case(case, False)))


RULES = {
    "per layer": tp.PerLayer(0.5),
    "each layer": tp.EachLayer(0.3),
    "automatic": tp.Automatic(0.5, gamma=0.1),
    "adaptive": tp.Adaptive(0.5, count_noise_stddev=4.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_compiled_training_has_the_weights_of_the_tape_with_rule(rule):
    compiled, taped = both(clipping=RULES[rule])
    assert_replayed(compiled)
    assert_same_weights(compiled, taped)


def test_compiled_training_averages_views():
    def losses(model, x, y):
        return cross_entropy(model, x, y).view(-1, 2)

    compiled, taped = both(losses, views=2)
    assert_replayed(compiled)
    assert_same_weights(compiled, taped)


def test_compiled_training_has_the_weights_of_the_tape_in_bfloat16():
    def losses(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    compiled, taped = both(losses)
    assert_replayed(compiled)
    assert_same_weights(compiled, taped, tolerance=1e-2)


# K3: few sizes


def test_batches_of_many_sizes_need_three_graphs_at_most():
    compiled, taped = both(num_steps=60)
    graphs = graphs_of(compiled)
    assert len(graphs._plans) <= 3
    assert graphs.num_replayed > 30
    assert_same_weights(compiled, taped)


def test_a_process_compiles_as_many_trainings_as_it_likes():
    """Dynamo counts compilations by code: with one code for all, a process could compile eight graphs."""
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        training = train_pairs(training_of(network(), compile=CPU, num_steps=6), cross_entropy)
        assert graphs_of(training).given_up == ""
        assert graphs_of(training).num_replayed > 0


def test_user_sees_no_padding():
    sizes = []

    def losses(model, x, y):
        out = model(x)
        sizes.append((len(x), len(out)))
        return F.cross_entropy(out, y, reduction="none")

    both(losses)
    assert all(n == m for n, m in sizes)
    assert len(set(sizes)) > 5


def test_padding_has_no_part_in_an_adaptive_count():
    compiled, taped = both(clipping=tp.Adaptive(0.5, count_noise_stddev=4.0))
    assert isinstance(compiled.clipping, tp.Adaptive)
    assert isinstance(taped.clipping, tp.Adaptive)
    assert compiled.clipping.clip_norm == pytest.approx(taped.clipping.clip_norm, rel=1e-6)


# K2: a plan that does not fit


class OtherwiseWhenCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 2)

    def forward(self, x):
        y = self.f(x)
        return y * 2 if torch.compiler.is_compiling() else y


class FrozenNumber(nn.Module):
    """A mean that a compiler freezes would leak one batch into all later ones, and vary no longer."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 2)

    def forward(self, x):
        return self.f(x) * float(x.mean())


class Switched(nn.Module):
    """Takes another path, by another op, after some calls."""

    def __init__(self, after):
        super().__init__()
        self.f, self.g = nn.Linear(3, 2), nn.Linear(3, 2)
        self.after = after
        self.switched = False

    def forward(self, x):
        return self.f(x) + self.g(x).tanh() if self.switched else self.f(x) - self.g(x)


def make(kind, *args):
    def made():
        torch.manual_seed(1)
        return kind(*args)

    return made


def test_model_that_differs_when_compiled_is_left_to_the_tape():
    with pytest.warns(UserWarning, match="returned another output than the model itself"):
        compiled, taped = both(make=make(OtherwiseWhenCompiled))
    assert torch.equal(parameters_of(compiled), parameters_of(taped))


def test_number_read_from_the_batch_is_refused_as_by_the_tape():
    training = training_of(make(FrozenNumber)(), compile=CPU)
    with pytest.raises(tp.Refused, match="depend"):
        train(training)


def test_number_read_from_the_batch_is_never_frozen_without_rehearsals():
    settings = {"assume_independent": "to see the compiler"}
    with pytest.warns(UserWarning, match="runs uncompiled"):
        compiled, taped = both(make=make(FrozenNumber), **settings)
    assert torch.equal(parameters_of(compiled), parameters_of(taped))


def test_model_that_takes_another_path_is_compared_again():
    def losses(model, x, y):
        model.switched = model.steps >= 12
        return cross_entropy(model, x, y)

    trainings = []
    for compile in (CPU, False):
        training = training_of(make(Switched, 8)(), compile=compile, num_steps=24)
        for x, y in training:
            vars(training.model)["steps"] = training.step_count
            training.step(losses(training.model, x, y))
        trainings.append(training)
    assert graphs_of(trainings[0]).num_compared > 1
    assert_same_weights(trainings[0], trainings[1])


def test_every_new_graph_is_compared_with_the_tape():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.f, self.scale = nn.Linear(3, 2), 1.0

        def forward(self, x):
            return self.f(x) * self.scale

    trainings = []
    for compile in (CPU, False):
        training = training_of(make(Scaled)(), compile=compile, num_steps=24, microbatch_size=6)
        for x, y in training:
            vars(training.model)["scale"] = 1.0 if training.step_count < 12 else 2.0
            training.step(cross_entropy(training.model, x, y))
        trainings.append(training)
    assert graphs_of(trainings[0]).num_compared > 1
    assert_replayed(trainings[0])
    assert_same_weights(trainings[0], trainings[1])


def test_one_batch_in_64_is_compared_again(monkeypatch):
    from torch_privacy.training import compiled as module

    monkeypatch.setattr(module, "RARELY", 1)
    compiled, taped = both()
    graphs = graphs_of(compiled)
    assert graphs.num_compared == graphs.num_replayed > 3
    assert_same_weights(compiled, taped)


def test_loss_that_reaches_a_parameter_is_left_to_the_tape():
    def losses(model, x, y):
        late = model[0].weight.square().sum() if trainings[-1].step_count > 6 else 0
        return cross_entropy(model, x, y) + late

    trainings = []
    for options in (CPU, False):
        trainings.append(training_of(compile=options, num_steps=12))
        uncompiled = pytest.warns(UserWarning, match="reach a parameter other than") if options else nullcontext()
        with uncompiled:
            train_pairs(trainings[-1], losses)
    assert graphs_of(trainings[0]).num_replayed > 0
    assert_same_weights(*trainings)


def test_losses_computed_in_a_new_way_are_left_to_the_tape_first():
    def losses(model, x, y):
        losses = cross_entropy(model, x, y)
        return losses * 0.5 if model.late else losses

    trainings = []
    for compile in (CPU, False):
        training = training_of(compile=compile, num_steps=24)
        for x, y in training:
            vars(training.model)["late"] = training.step_count > 10
            training.step(losses(training.model, x, y))
        trainings.append(training)
    assert graphs_of(trainings[0])._num_redone == 1
    assert_replayed(trainings[0])
    assert_same_weights(trainings[0], trainings[1])


def test_losses_in_another_order_are_no_rows_of_others():
    def losses(model, x, y):
        return cross_entropy(model, x, y).flip(0)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncompiled")
        trainings = both(losses, assume_independent="examples are in reverse order")
    assert_same_weights(trainings[0], trainings[1])


def test_output_changed_in_place_is_left_to_the_tape():
    def losses(model, x, y):
        out = model(x)
        return F.cross_entropy(out.mul_(2), y, reduction="none")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncompiled")
        trainings = both(losses)
    assert_same_weights(trainings[0], trainings[1])


def test_model_called_twice_is_left_to_the_tape():
    def losses(model, x, y):
        return cross_entropy(model, x, y) + cross_entropy(model, -x, y)

    with pytest.warns(UserWarning, match="called several times"):
        compiled, taped = both(losses)
    assert torch.equal(parameters_of(compiled), parameters_of(taped))


def test_row_that_is_not_finite_is_left_out():
    x, y = data().tensors
    x = x.clone()
    x[::9] = torch.inf
    compiled, taped = both(dataset=TensorDataset(x, y))
    assert compiled.num_non_finite == taped.num_non_finite > 0
    assert graphs_of(compiled).given_up == ""
    assert_same_weights(compiled, taped)


def test_norm_that_cancels_is_computed_from_its_row():
    def cancels(m, x):
        cancelling = m.f(torch.cat([x, x], 1)) * torch.tensor([1.0, -1.0]).repeat_interleave(x.shape[1])[:, None]
        return torch.cat([cancelling, m.g(x)], 1)

    def made():
        torch.manual_seed(1)
        return Calls(cancels, f=nn.Linear(3, 4), g=nn.Linear(3, 4))

    x = TensorDataset(torch.randn(40, 12, 3, generator=torch.Generator().manual_seed(2)))
    compiled, taped = both(lambda model, x: model(x).flatten(1).sum(1), make=made, dataset=x)
    assert_same_weights(compiled, taped)


# K4: what is compiled already, and what stays ordinary


def test_compiled_model_is_unwrapped():
    model = network()
    training = training_of(torch.compile(model, backend="aot_eager"), compile=CPU, num_steps=20)
    assert training.model is model
    wrapped = torch.compile(model, backend="aot_eager")
    for x, y in training:
        training.step(cross_entropy(wrapped, x, y))
    assert_replayed(training)
    taped = training_of(num_steps=20)
    train(taped)
    assert_same_weights(training, taped)


def test_copies_and_evaluation_are_ordinary_inside_of_the_loop():
    training = training_of(compile=CPU, num_steps=20)
    model, x = training.model, torch.randn(7, 3)
    for batch in training:
        copied = copy.deepcopy(model)
        assert copied._compiled_call_impl is None
        assert pickle.loads(pickle.dumps(copied.state_dict())).keys() == model.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(model(x), copied(x))
        training.step(cross_entropy(model, *batch))
    assert model._compiled_call_impl is None
    assert_replayed(training)


def test_compiled_call_of_the_user_is_restored():
    model = network()
    model.compile(backend="aot_eager")
    before = model._compiled_call_impl
    training = training_of(model, compile=CPU, num_steps=20)
    train(training)
    assert model._compiled_call_impl is before


@pytest.mark.parametrize(
    "settings", [{"clipping": tp.MicroBatches(0.5, 4)}, {"jacobian": tp.Sketched(32)}], ids=["micro-batches", "JL"]
)
def test_compile_is_refused_where_the_tape_is_needed(settings):
    with pytest.raises(tp.Refused, match="compile="):
        training_of(compile=True, **settings)


# Random numbers, memory, graphs


def test_dropout_is_compared_with_equal_masks():
    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    training = training_of(made(), compile=CPU, num_steps=20)
    train(training)
    assert_replayed(training)


def test_probes_take_no_memory():
    training = training_of(compile=CPU, num_steps=12)
    train(training)
    for plan in graphs_of(training)._plans.values():
        assert all(probe.untyped_storage().nbytes() <= 8 for probe in plan.probes)


def test_only_tensors_that_rows_need_leave_the_graph():
    training = training_of(compile=CPU, num_steps=12)
    train(training)
    (plan, *_) = graphs_of(training)._plans.values()
    assert plan.kept == (True, True)


def test_model_over_its_memory_budget_is_left_to_the_tape():
    with pytest.warns(UserWarning, match="exceed memory_budget"):
        compiled, taped = both(memory_budget=200.0)
    assert graphs_of(compiled).num_replayed == 0
    assert_same_weights(compiled, taped)


BY_TORCH = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of Inductor's imports


@BY_TORCH
@pytest.mark.slow
@pytest.mark.parametrize("case", ["linear, rank 3", "convolutional network", "tied language model"])
def test_training_compiled_by_inductor_has_the_weights_of_the_tape(case):
    compiled = trained_case(case, True)
    assert_replayed(compiled)
    assert_same_weights(compiled, trained_case(case, False))


@BY_TORCH
@pytest.mark.slow
def test_dropout_compiled_by_inductor_is_compared_with_equal_masks():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    training = training_of(model, compile=True, num_steps=20)
    train(training)
    assert_replayed(training)
