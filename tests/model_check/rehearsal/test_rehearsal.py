# SPDX-License-Identifier: Apache-2.0
"""An example's loss and row depend on that example and the model alone; any other program is refused."""

import copy
import random
from collections import UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parts import Calls, losses_of, tokens
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import TensorDataset

import torch_privacy as tp
from torch_privacy.support.draws import AS_DRAWN

N, D, T = 40, 3, 5
DEPEND = r"examples of a batch depend on each other: |cannot be separated"
LOSS = r"the loss of example \d+ of \d+ changed (by|between) "


def of_one_tensor(losses):
    """Returns the tensor of a batch of a ``TensorDataset`` with one tensor, which comes in a list."""
    return lambda model, batch: losses(
        model, batch[0] if isinstance(batch, (list, tuple)) and len(batch) == 1 else batch
    )


@dataclass
class Program:
    """What a user trains: a model, examples, a function of the losses, and a collate_fn."""

    model: nn.Module
    examples: Any
    losses: Callable = field(default_factory=lambda: of_one_tensor(losses_of))
    collate: Callable | None = None
    match: str = DEPEND  # part of the refusal
    step: int = 0  # the step that is refused
    kept: tuple[str, ...] = ()  # names that are not put back
    settings: dict[str, Any] = field(default_factory=dict)
    running: Any = None  # the training

    def training(self, **settings):
        """Returns its private training."""
        chosen = {"expected_batch_size": 8, "num_steps": 6, "clipping": tp.Flat(0.5), "noise_multiplier": 1.0}
        chosen |= {"test_seed": 5} | self.settings | settings
        examples = tp.Examples(self.examples, **{"collate_fn": self.collate} | chosen.pop("examples", {}))
        optimizer = chosen.pop("optimizer", None) or torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.running = tp.PrivateTraining(self.model, optimizer, examples, **chosen)
        return self.running

    def run(self, training):
        """Runs the user's loop."""
        for batch in training:
            training.step(self.losses(training.model, batch))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Returns parameters, buffers and plain attributes as they are now."""
    found: dict[str, Any] = {
        name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    ours = vars(nn.Module()).keys()
    for prefix, module in model.named_modules():
        found |= {f"{prefix}.{key}": copy.deepcopy(v) for key, v in vars(module).items() if key not in ours}
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Returns whether two values are equal to the last bit, including containers of tensors."""
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(found, np.ndarray):
        assert np.array_equal(found, expected)
    elif isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            assert_same(found[key], expected[key])
    elif isinstance(found, (list, tuple, deque)):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    elif not callable(found):
        assert found == expected


def assert_refused(program: Program, **settings: Any) -> None:
    """Asserts that its step is refused by name, releases nothing, and leaves the model as it was before."""
    training = program.training(**settings)
    states = [state_of(training.model)]
    training.optimizer.register_step_post_hook(lambda *_: states.append(state_of(training.model)))
    with pytest.raises(tp.Refused, match=program.match):
        program.run(training)
    assert training.step_count == len(training.ledger) == len(states) - 1 == program.step
    found = state_of(training.model)
    assert_same(*({name: v for name, v in state.items() if name not in program.kept} for state in (found, states[-1])))


def points(*shape):
    """Returns N examples of independent numbers."""
    return TensorDataset(torch.randn(N, *(shape or (D,))))


def labeled(count=2):
    return TensorDataset(torch.randn(N, D), torch.randint(count, (N,)))


def texts():
    """Returns N texts of two to nine tokens, none of them the padding's 0."""
    return [torch.randint(1, 7, (2 + k % 8,)) for k in range(N)]


def linear(forward=lambda m, x: m.f(x), **parts):
    return Calls(forward, f=nn.Linear(D, 4), **parts)


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


# Statistics of several examples, without a gradient


OF_THE_BATCH = {
    "mean": lambda x: x.mean(0),
    "standard deviation": lambda x: x.std(),
    "largest": lambda x: x.amax(),
    "length": lambda x: x.norm(),
    "median": lambda x: x.median(0)[0],
    "quantile": lambda x: x.quantile(0.9),
    "by keyword": lambda x: torch.mean(input=x, dim=0),
    "distances": lambda x: torch.cdist(x, x).mean(1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "normalized": lambda x: F.batch_norm(x, None, None, training=True),
    "einsum": lambda x: torch.einsum("nd,nd->d", x, x),
    "product": lambda x: (x.T @ x).sum(0),
    "written": lambda x: torch.empty_like(x).copy_(x.roll(1, 0)),
    "sign": lambda x: x.sum(0).sign(),
    "rounded": lambda x: (3 * x.mean(0)).round(),
    "place of the largest": lambda x: 1.0 + x.argmax(0),
    "above the mean": lambda x: 1.0 * (x > x.mean(0)),
    "item": lambda x: x.abs().max().item(),
    "list": lambda x: torch.tensor(x.mean(0).tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy().mean(0)),
    "float": lambda x: float(x.norm()),
    "size": lambda x: 1 / float(len(x)),
    "places": lambda x: torch.linspace(1, 2, len(x))[:, None],
}


EACH_ONE_WAY = [  # each statistic in one of the two ways; `make thorough` has the other
    pytest.param(name, detached, marks=[pytest.mark.thorough] * (number % 2 != detached))
    for number, name in enumerate(OF_THE_BATCH)
    for detached in (False, True)
]


def with_statistic(statistic, *, detached):
    def forward(m, x):
        if detached:
            return m.f(x * statistic(x.detach()))
        with torch.no_grad():
            found = statistic(x)
        return m.f((x * found).tanh())

    return linear(forward)


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize(("name", "detached"), EACH_ONE_WAY)
def test_training_refuses_a_forward_with_a_statistic_of_the_batch(name, detached):
    assert_refused(Program(with_statistic(OF_THE_BATCH[name], detached=detached), points()))


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "no_grad"])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_check_finds_a_statistic_of_the_batch(name, detached):
    checkup = tp.check(with_statistic(OF_THE_BATCH[name], detached=detached), losses_of, torch.randn(8, D))
    assert [problem.check for problem in checkup.problems] == ["examples"]


HIDDEN_STATISTICS = {  # of a layer's output
    "largest": lambda h: h.detach().abs().max(),
    "mean": lambda h: h.detach().mean(0),
    "data": lambda h: h.data.mean(0),
    "median": lambda h: h.detach() > h.detach().median(0)[0],
    "nearest": lambda h: torch.cdist(h.detach(), h.detach()).fill_diagonal_(9).amin(1, keepdim=True),
    "above the mean": lambda h: h > h.mean(0),
    "place of the largest": lambda h: 1 + h.argmax(0),
    "sign": lambda h: h.sum(0).sign(),
    "rounded": lambda h: (4 * h.mean(0)).round(),
}


@pytest.mark.parametrize("name", HIDDEN_STATISTICS)
def test_statistics_of_hidden_values_are_refused(name):
    statistic = HIDDEN_STATISTICS[name]
    model = linear(lambda m, x: m.g((h := m.f(x).tanh()) * statistic(h)), g=nn.Linear(4, 2))
    assert_refused(Program(model, points()))


# Integers of other examples


SHIFT = {
    "rolled": lambda x: x.roll(1, 0),
    "turned round": lambda x: x.flip(0),
    "indexed": lambda x: x[torch.arange(len(x)).roll(1)],
    "selected": lambda x: x.index_select(0, torch.arange(len(x)).roll(1)),
    "rolled when flat": lambda x: x.flatten().roll(6).view_as(x),
    "taken apart": lambda x: torch.stack(x.unbind(0)[::-1]),
    "split and joined": lambda x: torch.cat([x[1:], x[:1]]),
    "through a table": lambda x: torch.arange(7).flip(0)[x.roll(1, 0)],
    "mixed": lambda x: (x + x.roll(1, 0)) % 7,
    "chosen": lambda x: torch.where(x > 3, x, x.roll(1, 0)),
    "written": lambda x: torch.cat([x[:, 1:2].roll(1), x[:, 1:]], 1),
    "positions of the neighbor": lambda x: x.gather(1, x.roll(1, 0).clamp(max=4)),
    "largest of the neighbor": lambda x: x.roll(1, 0).amax(1, keepdim=True).expand(-1, T),
    "largest of all": lambda x: (x + x.amax(0)) % 7,
    "in other numbers": lambda x: x.roll(1, 0).float().to(torch.int32).clamp(0, 5).long(),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, torch.arange(len(x)).roll(1)[:, None].expand_as(x), x),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, torch.arange(len(x)).roll(1), x),
    "index_put": lambda x: torch.zeros_like(x).index_put((torch.arange(len(x)).roll(1),), x),
    "masked_scatter": lambda x: torch.zeros_like(x).masked_scatter(torch.ones_like(x).bool(), x.roll(1, 0)),
    "copy_": lambda x: torch.empty_like(x).copy_(x.roll(1, 0)),
    "median": lambda x: x + x.median(0)[0],
    "counts": lambda x: torch.bincount(x.flatten(), minlength=7)[x].clamp(max=19),
    "einsum": lambda x: (x + torch.einsum("nt->t", x)) % 7,
    "pad": lambda x: F.pad(x, (0, 0, 1, 0))[:-1],
    "difference": lambda x: torch.diff(x, dim=0, prepend=x[:1]).abs(),
    "among the first": lambda x: torch.isin(x, x[0]).long(),
    "borders of the first": lambda x: torch.bucketize(x, x[0].sort()[0]),
    "numpy": lambda x: torch.from_numpy(np.roll(x.numpy(), 1, 0)),
    "list": lambda x: torch.tensor([*x.tolist()[1:], x[0].tolist()]),
}
MEETINGS = {
    "embedding": lambda m, ids: F.embedding(ids, m.w),
    "index": lambda m, ids: m.w[ids],
    "one-hot": lambda m, ids: F.one_hot(ids, 20).to(m.w.dtype) @ m.w,
    "bags": lambda m, ids: F.embedding_bag(ids, m.w),
}


def looked_up(change, meeting="embedding"):
    return Calls(lambda m, x: MEETINGS[meeting](m, x) + MEETINGS[meeting](m, change(x)) / 2, w=torch.randn(20, 4))


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("name", SHIFT)
def test_tokens_of_another_example_are_refused(name):
    assert_refused(Program(looked_up(SHIFT[name]), TensorDataset(tokens(N, T))))


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("name", SHIFT)
def test_check_finds_tokens_of_another_example(name, meeting):
    checkup = tp.check(looked_up(SHIFT[name], meeting), losses_of, tokens(8, T))
    assert {problem.check for problem in checkup.problems} & {"examples", "parameters"}


@pytest.mark.parametrize("kind", ["tokens", "numbers"])
def test_losses_that_read_only_the_neighbor_are_refused(kind):
    """The rows are in their regular order, but example i's labels are in row i and its tokens in row i + 1."""
    if kind == "tokens":
        assert_refused(
            Program(Calls(lambda m, x: m.e(x.roll(1, 0)), e=nn.Embedding(7, 4)), TensorDataset(tokens(N, T)))
        )
    else:
        assert_refused(Program(linear(lambda m, x: m.f(x.roll(1, 0))), points()))


def test_a_mask_of_a_parameter_by_a_statistic_of_the_batch_is_refused():
    model = Calls(lambda m, x: x @ torch.where(m.w > x.detach().mean(), m.w, 0), w=torch.randn(D, 4))
    assert_refused(Program(model, points()))


def test_integers_that_numpy_made_of_the_batch_are_refused():
    model = Calls(lambda m, x: x @ m.w[torch.from_numpy(x.numpy().sum(0).argsort())], w=torch.randn(D, 4))
    assert_refused(Program(model, points()))


# Lists, several rows of each example, graphs


def lists(change):
    """Returns a model of lists of examples with several lengths, and its losses."""
    return linear(lambda m, xs: torch.stack([m.f(x).mean(0) for x in change(list(xs))]))


LENGTHS = {
    "of several lengths": [2, 4, 8, 3, 5, 7],
    "of one length": [4],
    "all as long as the batch": [8],
}
OTHERS = {
    "centered": lambda xs: [x - torch.cat(xs).mean(0) for x in xs],
    "rolled": lambda xs: [*xs[1:], xs[0]],
    "longest": lambda xs: [x * max(map(len, xs)) for x in xs],
    "padded": lambda xs: list(pad_sequence(xs, batch_first=True)),
}


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("change", OTHERS)
def test_lists_of_examples_that_read_each_other_are_refused(change, lengths):
    known = LENGTHS[lengths]
    examples = [torch.randn(known[k % len(known)], D) for k in range(N)]
    program = Program(lists(OTHERS[change]), examples, lambda m, xs: m(xs).sin().sum(1), collate=list)
    if len(known) == 1 and change in ("longest", "padded"):  # of equal length, so that nothing changes
        program.run(program.training())
    else:
        assert_refused(program)


SEVERAL = {  # rows (2 n, ..), and the losses of n examples as a function of a layer's output
    "behind each other": lambda y: y.view(-1, 2, *y.shape[1:]).sum(1),
    "all first ones first": lambda y: y.view(2, -1, *y.shape[1:]).sum(0),
}
PAIRS = {"numbers": (nn.Linear, torch.randn), "tokens": (nn.Embedding, tokens)}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("order", SEVERAL)
def test_several_rows_per_example_train_and_couplings_are_refused(order, kind):
    layer, make = PAIRS[kind]

    def collate(items):
        return torch.cat(items) if order == "behind each other" else torch.stack(items, 1).flatten(0, 1)

    def program(change):
        model = Calls(lambda m, x: SEVERAL[order](m.f(change(x)).flatten(1)), f=layer(7, 4))
        return Program(model, list(make(N, 2, 7)), lambda m, x: m(x).sin().sum(1), collate=collate)

    own = program(lambda x: x)
    own.run(own.training())
    assert_refused(program((lambda x: x - x.mean(0)) if kind == "numbers" else (lambda x: x.roll(1, 0))))


def graph(k):
    """Returns nodes and adjacency of one graph."""
    return torch.randn(4, D), torch.rand(4, 4)


@pytest.mark.parametrize("coupled", [False, True])
def test_graphs_with_a_sparse_adjacency_train_unless_an_edge_joins_two(coupled):
    def collate(items):
        edges = torch.block_diag(*(a for _, a in items))
        edges[0, -1] += coupled
        return torch.stack([x for x, _ in items]), edges.to_sparse()

    def losses(m, batch):
        x, edges = batch
        return m.f(torch.sparse.mm(edges, x.flatten(0, 1)).view(x.shape).mean(1)).sin().sum(1)

    program = Program(
        Calls(lambda m, b: losses(m, b), f=nn.Linear(D, 2)), [graph(k) for k in range(N)], collate=collate
    )
    program.losses = lambda m, b: m(b)
    if coupled:
        assert_refused(program)
    else:
        program.run(program.training())


# Couplings outside of the graph: loops, collate_fn, state, code in other languages, code that runs later


def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def scripted():
    function = torch.jit.script(centered)
    return linear(lambda m, x: m.f(function(x)))


class Keeping(nn.Module):
    """Keeps something of each batch, by ``keep(module, x)``, and uses it by ``use(module, x)``."""

    def __init__(self, keep, use=lambda m, x: m.f(x), **attributes):
        super().__init__()
        self.f, self.keep, self.use = nn.Linear(D, 4), keep, use
        for name, value in attributes.items():
            setattr(self, name, value)
        self.register_buffer("center", torch.zeros(D))
        self.register_buffer("large", torch.zeros(2**10, 2**11, dtype=torch.float32))
        self.code = nn.Parameter(torch.zeros(D), requires_grad=False)

    def forward(self, x):
        self.keep(self, x.detach())
        return self.use(self, x)


def keeps_largest(m, x):
    m.largest = max(m.largest, float(x.abs().max()))


def writes_center(m, x):
    m.center.data.lerp_(x.mean(0), 0.1)


def writes_code(m, x):
    m.code.data.lerp_(x.mean(0), 0.1)


def writes_large(m, x):
    m.large.data[3, 5] = x.sum()


def replaces_center(m, x):
    m.center = m.center.lerp(x.mean(0), 0.1)


KEEPING = {  # model, and the name in the refusal
    "an attribute": lambda: (Keeping(keeps_largest, lambda m, x: m.f(x / m.largest), largest=0.0), "'largest'"),
    "a list": lambda: (Keeping(lambda m, x: m.queue.append(x.mean(0)), queue=[]), "'queue'"),
    "a list of fixed length": lambda: (Keeping(lambda m, x: m.queue.append(x[0]), queue=deque(maxlen=2)), "'queue'"),
    "a set": lambda: (Keeping(lambda m, x: m.seen.add(float(x.sum())), seen=set()), "'seen'"),
    "an array": lambda: (Keeping(lambda m, x: np.add(m.sum, x.sum(0), out=m.sum), sum=np.zeros(D)), "'sum'"),
    "a tensor": lambda: (Keeping(lambda m, x: m.sum.add_(x.sum(0)), sum=torch.zeros(D)), "'sum'"),
    "a buffer": lambda: (Keeping(writes_center), "'center'"),
    "a buffer in place of another": lambda: (Keeping(replaces_center), "'center'"),
    "a large buffer": lambda: (Keeping(writes_large), "'large'"),
    "a frozen parameter": lambda: (Keeping(writes_code), "'code'"),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", KEEPING)
def test_state_kept_by_the_forward_is_refused_by_name(name):
    model, named = KEEPING[name]()
    kept = ("code",) if name == "a frozen parameter" else ()  # a second copy of all parameters would cost memory
    assert_refused(Program(model, points(), match=f"the forward changed {named}", kept=kept))


def counts_examples(m, x):
    m.seen += len(x)


@pytest.mark.parametrize("use", [lambda m, x: m.f(x), lambda m, x: m.f(F.dropout(x, 0.2))], ids=["plain", "dropout"])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_count_of_the_examples_seen_is_refused_by_name(is_buffer, use):
    model = Keeping(counts_examples, use, **({} if is_buffer else {"seen": 1}))
    if is_buffer:
        model.register_buffer("seen", torch.ones(()))
    assert_refused(Program(model, points(), match="the forward changed 'seen'"))


def makes_positions(m, x):
    m.places = m.places if len(m.places) > len(x) else torch.arange(len(x))


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_table_that_grows_with_the_batch_may_be_kept_outside_of_the_model_s_file(is_buffer):
    model = Keeping(makes_positions, lambda m, x: m.f(x) + 0 * m.places[: len(x), None])
    places = torch.arange(0)
    if is_buffer:
        model.register_buffer("places", places, persistent=False)
    else:
        model.places = places
    program = Program(model, points())
    program.run(training := program.training())
    assert training.step_count == 6


class WithExtraState(Keeping):
    """Saves the mean of the last batch in its file."""

    def get_extra_state(self):
        return {"last": self.last}

    def set_extra_state(self, state):
        self.last = state["last"]


def test_extra_state_that_takes_in_data_is_refused_though_it_is_never_read():
    model = WithExtraState(lambda m, x: setattr(m, "last", x.mean(0)), last=torch.zeros(D))
    assert_refused(Program(model, points(), match=r"the forward changed '_extra_state', 'last'"))


class WithoutFile(Keeping):
    """Cannot be saved."""

    def get_extra_state(self):
        raise NotImplementedError("this module has no file")


def test_a_module_that_refuses_to_be_saved_trains():
    program = Program(model := WithoutFile(lambda m, x: None), points())
    program.run(program.training())
    with pytest.raises(NotImplementedError):
        model.state_dict()


OVERWRITTEN = {  # state of a batch that is never read before it is written again
    "an attribute": lambda m, x: setattr(m, "last", x.mean(0)),
    "a mapping": lambda m, x: m.seen.update(last=x.sum().item()),
    "a list": lambda m, x: m.seen.update(all=[x.mean(0), x.amax(0)]),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_state_that_is_overwritten_before_it_is_read_may_be_kept(name):
    program = Program(Keeping(OVERWRITTEN[name], seen={}), points())
    training = program.training()
    program.run(training)
    assert training.step_count == 6


def registers_a_hook_once(m, x):
    """Doubles the outputs of ``f`` by a hook of the first forward, as transformers has hooks for hidden states."""
    if not m.has_hook:
        m.f.register_forward_hook(lambda f, args, y: 2 * y)
        m.has_hook = True


def test_hooks_that_the_first_forward_registers_are_registered_once():
    program = Program(Keeping(registers_a_hook_once, has_hook=False), points())
    program.run(program.training())
    assert len(program.model.f._forward_hooks) == 1


class Stopwatch:
    def __init__(self):
        self.total, self.laps = 0.0, []


DURATIONS = {  # what differs from run to run, and is never read
    "a list": lambda m, x: m.times.append(perf_counter()),
    "an attribute": lambda m, x: setattr(m, "last", perf_counter()),
    "a sum": lambda m, x: setattr(m, "last", m.last + perf_counter()),
    "a mapping": lambda m, x: m.seen.setdefault("forward", []).append(perf_counter()),
    "an object": lambda m, x: m.watch.laps.append(perf_counter()),
    "beside the same for every batch": lambda m, x: m.times.append((perf_counter(), len(m.times), "forward")),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", DURATIONS)
def test_durations_that_are_never_read_may_be_kept(name):
    program = Program(Keeping(DURATIONS[name], times=[], seen={}, last=0.0, watch=Stopwatch()), points())
    training = program.training()
    program.run(training)
    assert training.step_count == 6
    assert "as durations do" in training.statement()["independence"]["not_compared"][0]
    assert len(program.model.times) in (0, 6)  # nothing of a rehearsal is left


@pytest.mark.parametrize(
    ("keep", "use"),
    [
        (lambda m, x: m.times.append((perf_counter(), float(x.mean()))), lambda m, x: m.f(x)),
        (lambda m, x: m.times.append(perf_counter()), lambda m, x: m.f(x) * len(m.times)),
        (lambda m, x: None, lambda m, x: [m.f(x * (1 + m.last % 1)), setattr(m, "last", perf_counter())][0]),
    ],
    ids=["beside data", "their number is read", "the last one is read"],
)
def test_durations_beside_data_and_those_that_are_read_are_refused(keep, use):
    assert_refused(Program(Keeping(keep, use, times=[], last=0.0), points(), match="'(times|last)'"))


def test_state_kept_for_the_next_batch_is_refused_by_name():
    def forward(m, x):
        y = m.f(x - m.last)
        m.last = x.mean(0)
        return y

    program = Program(Keeping(lambda m, x: None, forward, last=torch.zeros(D)), points(), match="'last'")
    assert_refused(program)


def test_write_into_a_parameter_of_no_optimizer_is_refused():
    model = Keeping(writes_code)
    model.code.requires_grad_(True)
    optimizer = torch.optim.SGD(model.f.parameters(), lr=0.1)
    program = Program(model, points(), match="the forward changed 'code'", kept=("code",))
    assert_refused(program, optimizer=optimizer)


def largest_in_loop(m, batch):
    m.scale = float(batch[0].abs().max())
    return losses_of(m, batch[0]) / m.scale


def mixed_in_loop(m, batch):
    x, y = batch
    order = torch.randperm(len(x))
    losses = lambda y: F.cross_entropy(m(0.7 * x + 0.3 * x[order]), y, reduction="none")  # noqa: E731
    return 0.7 * losses(y) + 0.3 * losses(y[order])


def mixed_in_collate(items):
    x, y = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def standardized(m, batch):
    x, y = batch
    return cross_entropy(m, ((x - x.mean(0)) / x.std(0), y))


def weighted_by_class(m, batch):
    counts = torch.bincount(batch[1], minlength=2).clamp(min=1)
    return cross_entropy(m, batch) / counts[batch[1]]


def hard_examples(m, batch):
    losses = cross_entropy(m, batch)
    return losses * (losses >= losses.median())


def hardest(m, batch):
    losses = cross_entropy(m, batch)
    return torch.zeros_like(losses).index_copy(0, (top := losses.topk(min(3, len(losses)))).indices, top.values)


def with_negatives(m, batch):
    h = F.normalize(m(batch[0]), dim=1)
    return -(h @ h.detach().T / 0.1).log_softmax(1).diagonal()


LOOPS = {  # losses -> part of the refusal
    "largest kept": (largest_in_loop, "the forward changed 'scale'"),
    "mixup": (mixed_in_loop, r"happens before the model: the inputs of model\(...\) differ"),
    "standardized": (standardized, r"happens before the model: the inputs of model\(...\) differ"),
    "class weights": (weighted_by_class, LOSS),
    "hard examples": (hard_examples, LOSS),
    "hardest": (hardest, LOSS),
    "negatives": (with_negatives, LOSS),
    "divided by the size": (lambda m, b: cross_entropy(m, b) / float(len(b[0])), "divided by the number of examples"),
    "times the size": (lambda m, b: cross_entropy(m, b) * len(b[0]), "divided or multiplied by a number of the whole"),
    "weights by place": (lambda m, b: cross_entropy(m, b) * torch.linspace(1, 2, len(b[0])), LOSS),
    "the first alone": (lambda m, b: cross_entropy(m, b) * (torch.arange(len(b[0])) == 0), LOSS),
    "centered": (lambda m, b: (losses := cross_entropy(m, b)) - losses.mean().item(), LOSS),
    "item": (lambda m, b: cross_entropy(m, b) * b[0].abs().max().item(), LOSS),
    "a condition": (lambda m, b: cross_entropy(m, b) * (1 + int(b[1].sum()) % 2), DEPEND),
}


@pytest.mark.filterwarnings("ignore:std")  # of one example alone
@pytest.mark.parametrize("name", LOOPS)
def test_examples_mixed_in_the_loop_are_refused(name):
    losses, match = LOOPS[name]
    assert_refused(Program(linear(), labeled(4), losses, match=match))


def padded(items):
    return pad_sequence(items, batch_first=True)


def sees_padding():
    return nn.Sequential(nn.Embedding(7, 4), Calls(lambda m, h: m.f(h.mean(1)), f=nn.Linear(4, 2)))


def sees_own_tokens():
    return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), Calls(lambda m, h: m.f(h.sum(1)), f=nn.Linear(4, 2)))


def tokens_of_the_batch(m, ids):
    mask = ids != 0
    losses = F.cross_entropy(m(ids).mT, ids, reduction="none") * mask
    return losses.sum(1) / mask.sum()


def standardized_by_collate(items):
    x = torch.stack(items)
    return x - x.mean(0)


COLLATED = {
    "padding that the model sees": lambda: Program(
        *(sees_padding(), texts(), losses_of, padded), match=LOSS + r".* when the rest was left out"
    ),
    "tokens of the batch": lambda: Program(
        *(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), texts(), tokens_of_the_batch, padded),
        match=r"divided or multiplied by a number of the whole batch",
    ),
    "mixup": lambda: Program(linear(), labeled(), cross_entropy, mixed_in_collate, match="happens before the model"),
    "standardized": lambda: Program(
        *(linear(), list(torch.randn(N, D)), losses_of, standardized_by_collate), match="happens before the model"
    ),
    "sorted": lambda: Program(
        *(linear(), list(torch.randn(N, D)), losses_of, lambda items: torch.stack(sorted(items, key=torch.Tensor.sum))),
        match="same losses come in another order",
    ),
    "sorted by length": lambda: Program(
        *(sees_own_tokens(), texts(), losses_of, lambda items: padded(sorted(items, key=len, reverse=True))),
        match="same losses come in another order",
    ),
    "one center of all": lambda: Program(
        *(linear(lambda m, b: m.f(b[0] - b[1])), list(torch.randn(N, D)), lambda m, b: m(b).sin().sum(1)),
        lambda items: (x := torch.stack(items), x.mean(0)),
    ),
}


@pytest.mark.parametrize("name", COLLATED)
def test_examples_mixed_in_collate_fn_are_refused(name):
    assert_refused(COLLATED[name]())


def route(m, h):
    """Gives each expert the first few of its examples, in the order of the batch; the others skip it."""
    chosen = m.gate(h).argmax(1)
    places = F.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None])[:, 0]
    return h + torch.where((places <= 2)[:, None], m.e(h), 0) * m.gate(h).softmax(1).amax(1, keepdim=True)


def best_of_batch(m, x):
    h = m.f(x)
    score = h.norm(dim=1)
    return h * (score >= score.topk(min(3, len(x))).values.min())[:, None]


def straight_through(m, x):
    y = m.f(x - x.mean(0))
    return y + (m.f(x) - y).detach()


FORWARDS = {
    "scripted": scripted,
    "capacity of experts": lambda: Calls(route, gate=nn.Linear(D, 2), e=nn.Linear(D, D)),
    "best of the batch": lambda: linear(best_of_batch),
    "in the rows alone": lambda: linear(straight_through),
    "rounded": lambda: linear(lambda m, x: m.f(x) * x.sum(0).round().sum()),
    "seeded": lambda: linear(
        lambda m, x: m.f(x + torch.randn(1, generator=torch.Generator().manual_seed(int(1e3 * x.sum().abs()))))
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", FORWARDS)
def test_examples_mixed_in_the_forward_are_refused(name):
    assert_refused(Program(FORWARDS[name](), points()))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5])
def test_a_condition_that_one_example_decides_is_refused_when_it_is_true(number):
    """An example is a mask made only if it is needed: earlier batches and their rehearsals run without it."""
    examples = torch.randn(N, D)
    examples[number] = 20
    model = linear(lambda m, x: m.f(x.flip(1)) if x.abs().max() > 10 else m.f(x))
    program = Program(model, TensorDataset(examples))
    training = program.training(num_steps=20)
    with pytest.raises(tp.Refused, match=DEPEND):
        program.run(training)
    assert not any(number in training._state.releases.draws.indices(step) for step in range(training.step_count))


def test_examples_mixed_in_a_large_tensor_are_refused():
    model = Calls(lambda m, x: m.f((x - x.mean(0)).view(len(x), -1, D)).mean(1), f=nn.Linear(D, 4))
    torch.set_default_dtype(torch.float32)
    examples = TensorDataset(torch.randn(10, D * 2**17))
    assert_refused(Program(model.float(), examples))


DRAWS = {
    "dropout": lambda x: F.dropout(x),
    "a number": lambda x: x + torch.rand(()),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a shape": lambda x: x + torch.randn(x.shape),
    "noise written": lambda x: x + torch.empty_like(x).normal_(),
    "uniform": lambda x: x + torch.rand(x.shape),
    "normal": lambda x: torch.normal(x, torch.ones_like(x)),
    "normal by distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "categories": lambda x: x * torch.distributions.Categorical(logits=x).sample()[:, None],
    "gumbel": lambda x: F.gumbel_softmax(x),
    "whole numbers": lambda x: x * torch.randint(1, 4, (len(x), 1)),
    "a permutation": lambda x: x[:, torch.randperm(D)],
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", DRAWS)
def test_division_by_the_batch_is_refused_under_dropout(name):
    model = linear(lambda m, x: m.f(DRAWS[name](x)))
    honest = Program(model, points())
    honest.run(honest.training())
    coupled = Program(model, points(), lambda m, b: losses_of(m, b[0]) / len(b[0]), match="divided by the number of")
    assert_refused(coupled)


def test_a_clipping_rule_made_of_the_batch_s_median_is_refused():
    class Median(tp.ClippingRule):
        def factors(self, norms, group="all"):
            return (norms.median() / norms).clamp(max=1)

        def sensitivity(self, relation):
            return 1.0

        def statement(self):
            return {"rule": "Median"}

    assert_refused(Program(linear(), points(), match="largest_norm|the clip factor of example"), clipping=Median())


def test_a_running_center_outside_of_the_model_is_refused():
    center = torch.zeros(D)

    def forward(m, x):
        center.lerp_(x.mean(0), 0.1)
        return m.f(x - center)

    assert_refused(Program(linear(forward), points(), match=r"forward changed .*closure.*center"))


def test_a_seed_set_in_the_loop_is_refused():
    def losses(m, batch):
        torch.manual_seed(0)
        return losses_of(m, batch[0])

    assert_refused(Program(linear(), points(), losses, match="torch.manual_seed was called inside of the loop"))


LATER = {  # functions that change at step 5
    "forward": lambda x: x - x.mean(0),
    "item": lambda x: x * x.abs().max().item(),
    "numpy": lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0)),
    "rolled": lambda x: x.roll(1, 0),
}


@pytest.mark.parametrize("name", LATER)
def test_later_branch_of_the_forward_is_refused_when_taken(name):
    model = linear(lambda m, x: m.f(LATER[name](x) if program.running.step_count >= 5 else x))
    program = Program(model, points(), step=5)
    assert_refused(program, num_steps=8)


LOSSES_LATER = {
    "centered": lambda losses: losses - losses.detach().mean(),
    "scaled": lambda losses: losses / losses.detach().mean(),
    "item": lambda losses: losses * losses.max().item(),
    "hard examples": lambda losses: losses * (losses >= losses.median()),
}


@pytest.mark.parametrize("name", LOSSES_LATER)
def test_later_branch_of_the_losses_is_refused_when_taken(name):
    def losses(m, batch):
        plain = cross_entropy(m, batch)
        return LOSSES_LATER[name](plain) if program.running.step_count >= 5 else plain

    program = Program(linear(), labeled(), losses, step=5)
    assert_refused(program, num_steps=8)


LOOP_LATER = {
    "standardized": lambda x: (x - x.mean(0)) / (1 + x.std(0, correction=0)),
    "mixup": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "centered in place": lambda x: x.sub_(x.mean(0)),
    "moved by one": lambda x: x.roll(1, 0),
}


@pytest.mark.parametrize("name", LOOP_LATER)
def test_later_change_of_the_input_in_the_loop_is_refused_when_taken(name):
    def losses(m, batch):
        x, y = batch
        return cross_entropy(m, (LOOP_LATER[name](x) if program.running.step_count >= 5 else x, y))

    program = Program(linear(), labeled(), losses, step=5)
    assert_refused(program, num_steps=8)


def test_later_change_of_targets_in_the_loop_is_refused_when_taken():
    def losses(m, batch):
        x, y = batch
        return cross_entropy(m, (x, y.roll(1) if program.running.step_count >= 5 else y))

    program = Program(linear(), labeled(), losses, step=5)
    assert_refused(program, num_steps=10)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor


Pair = namedtuple("Pair", "x y")
WRAPPED = {  # how collate_fn wraps a tensor, and how the forward unwraps it
    "in a data class": (Batch, lambda b: b.x),
    "in a mapping": (lambda x: UserDict(x=x), lambda b: b["x"]),
    "in a list": (lambda x: [x], lambda b: b[0]),
    "in a named tuple": (lambda x: Pair(x, None), lambda b: b.x),
    "in a list in a mapping": (lambda x: {"x": [0, (x,)]}, lambda b: b["x"][1][0]),
    "asking for its gradient": (lambda x: x.requires_grad_(), lambda b: b),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", WRAPPED)
def test_batches_are_rehearsed_however_they_are_wrapped(kind, centered):
    wrap, unwrap = WRAPPED[kind]
    model = linear(lambda m, b: m.f(unwrap(b) - centered * unwrap(b).mean(0)))
    program = Program(model, list(torch.randn(N, D)), lambda m, b: m(b).sin().sum(1))
    program.collate = lambda items: wrap(torch.stack(items))
    checkup = tp.check(model, program.losses, program.collate(list(torch.randn(8, D))))
    assert bool(checkup.problems) == centered
    if centered:
        assert_refused(program)
    else:
        program.run(program.training())


def test_an_image_without_a_batch_is_refused():
    """Its channels are in the dimension of examples: each loss has a row, but all depend on the whole image."""
    checkup = tp.check(nn.Conv2d(3, 3, 3), losses_of, torch.randn(3, 6, 6))
    assert [problem.check for problem in checkup.problems] == ["examples"]


def test_a_gradient_that_other_examples_turn_is_refused_though_no_sizes_are_equal():
    """No example can take the place of another one, so that a part of the batch alone must show it."""

    def forward(m, batch):
        y = m.f(torch.cat(batch))
        turned = y * torch.sign(y.detach().abs().max() - 3.0)  # by the batch, at the same norm
        y = y.detach() + turned - turned.detach()
        return torch.stack([one.sin().sum() for one in y.split([*map(len, batch)])])

    sizes = [torch.randn(k + 1, D) * (4 if k % 5 == 0 else 0.1) for k in range(N)]
    assert_refused(Program(linear(forward), sizes, lambda m, b: m(b), list, match="the direction of the gradient"))


# Programs that do not mix examples


WITHIN = {  # name -> function of the tokens (n, 5) within each example
    "as they are": lambda x: x,
    "positions rolled": lambda x: x.roll(1, 1),
    "moved and masked": lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1).masked_fill(x == 3, 0),
    "through a table": lambda x: torch.arange(7).flip(0)[x],
    "two in one": lambda x: (x + 7 * x.roll(1, 1)) % 7,
    "chosen by position": lambda x: x.gather(1, x.clamp(max=4)),
    "sorted within": lambda x: x.sort(1).values,
    "time first": lambda x: x.t().contiguous().t(),
    "there and back": lambda x: x.roll(1, 0)[torch.arange(len(x)).roll(-1)],
    "largest": lambda x: x.amax(1, keepdim=True).expand(-1, T),
    "padded": lambda x: F.pad(x, (1, 0))[:, :-1],
    "changed in place": lambda x: x.clone().add_(3).remainder_(7),
    "part overwritten": lambda x: torch.where(x > 3, x, x.flip(1)),
    "difference": lambda x: torch.diff(x, dim=1, prepend=x[:, :1]).abs(),
    "borders": lambda x: torch.bucketize(x, torch.tensor([1, 3, 5])),
    "median": lambda x: x - x + x.median(1, keepdim=True)[0],
    "scatter": lambda x: torch.zeros_like(x).scatter(1, torch.arange(T).flip(0).expand_as(x), x),
    "numpy": lambda x: torch.from_numpy(np.roll(x.numpy(), 1, 1)),
    "list": lambda x: torch.tensor([row[::-1] for row in x.tolist()]),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", WITHIN)
def test_tokens_moved_within_an_example_train(name):
    program = Program(looked_up(WITHIN[name]), TensorDataset(tokens(N, T)))
    program.run(training := program.training())
    assert training.step_count == 6


@pytest.mark.parametrize("meeting", MEETINGS)
@pytest.mark.parametrize("name", WITHIN)
def test_check_passes_tokens_moved_within_an_example(name, meeting):
    assert tp.check(looked_up(WITHIN[name], meeting), losses_of, tokens(8, T)).problems == ()


class LayerDrop(nn.Module):
    """Skips layers at random."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(D, D) for _ in range(3)), nn.Linear(D, 2)

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.7:
                x = x + layer(x).tanh()
        return self.head(x)


class Counting(nn.Module):
    """Warms up by the number of its calls, kept as a buffer and as an attribute."""

    def __init__(self):
        super().__init__()
        self.f, self.calls, self.scales = nn.Linear(D, 4), 0, []
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.scales.append(min(1.0, self.calls / 4))
        return self.f(x) * self.scales[-1] / (1 + self.steps)


def last_token(m, ids):
    h = m.lstm(m.e(ids))[0]
    return m.f(h[torch.arange(len(ids)), (ids != 0).sum(1) - 1])


def last_token_by_gather(m, ids):
    h = m.lstm(m.e(ids))[0]
    last = ((ids != 0).sum(1) - 1)[:, None, None].expand(-1, 1, h.shape[2])
    return m.f(h.gather(1, last)[:, 0])


def packed(m, xs):
    return m.f(m.lstm(pack_sequence(xs, enforce_sorted=False))[1][0][0])


def mean_of_own(m, ids):
    mask = (ids != 0)[:, :, None]
    return m.f((m.e(ids) * mask).sum(1) / mask.sum(1))


def token_model(forward):
    return Calls(forward, e=nn.Embedding(7, 4), lstm=nn.LSTM(4, 4, batch_first=True), f=nn.Linear(4, 2))


def with_positions(m, batch):
    """Returns losses of texts that are padded in the model; the positions are those of the longest one."""
    x = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    own = (x != 0).any(2, keepdim=True)
    return ((m.f(x) + m.p(torch.arange(x.shape[1]).repeat(len(x), 1))).sin() * own).sum((1, 2))


def sorted_with_token(model, x):
    """Sorts the examples, and puts them back; a token is expanded to all of them."""
    order = x[:, 0].argsort()
    y = model.f(torch.lerp(x[order], model.token.expand_as(x), 0.3))
    return y[order.argsort()]


def in_pieces(model, x):
    """Adds a row that is made of pieces of a parameter: for one example it may be the example's own."""
    row = x.new_zeros(1, D)
    row[:, :1] = model.token[:1]
    row[:, 1:] = model.token[1:]
    return model.f(x + row)


def mixture(m, x):
    """Applies each example's best expert, one after the other."""
    p = m.gate(x).softmax(1)
    weight, chosen = p.max(1)
    out = torch.zeros(len(x), 4)
    for k, expert in enumerate(m.experts):
        where = (chosen == k).nonzero().flatten()
        out = out.index_add(0, where, expert(x[where]) * weight[where, None])
    return out


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 4), nn.Linear(2, D)

    def forward(self, x):
        mean, scale = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(scale) * scale.exp()), mean, scale


def evidence(m, batch):
    y, mean, scale = m(batch[0])
    return (y - batch[0]).square().sum(1) + 0.5 * (mean.square() + scale.exp().square() - 2 * scale).sum(1)


def spectral():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, 6)), nn.Tanh(), nn.Linear(6, 2))
    return model.train()


class Crops(torch.utils.data.Dataset):
    """Random crops and a random sign, from torch, numpy and Python."""

    def __init__(self):
        self.x = torch.randn(N, 9)

    def __len__(self):
        return N

    def __getitem__(self, i):
        start = random.randrange(6)
        noise = torch.randn(D) * 0.1
        return self.x[i, start : start + D] * (1 if np.random.rand() < 0.5 else -1) + noise


def some_masked(m, x):
    """Draws as many random places as the example asks for: examples share the random numbers, but no data."""
    mask = torch.ones_like(x)
    if m.training:
        for i, count in enumerate((x[:, 0] > 0).long() + 1):
            mask[i, np.random.randint(D, size=int(count))] = 0
    return m.f(x * mask)


def graphs(items):
    owner = torch.arange(len(items)).repeat_interleave(torch.tensor([len(x) for x in items]))
    return torch.cat(items), owner, len(items)


def of_graphs(m, batch):
    x, owner, n = batch
    return torch.zeros(n, 4).index_add(0, owner, m.f(x).tanh())


def of_sizes(*sizes):
    return [torch.randn(sizes[k % len(sizes)], D) for k in range(N)]


def dropped(p=0.5):
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Dropout(p), nn.Linear(6, 2))


INDEPENDENT = {
    "dropout": lambda: Program(dropped(), labeled(), cross_entropy),
    "places masked at random": lambda: Program(linear(some_masked), points()),
    "layers left out": lambda: Program(LayerDrop(), labeled(), cross_entropy),
    "counts of calls": lambda: Program(Counting(), points()),
    "spectral norm": lambda: Program(spectral(), labeled(), cross_entropy),
    "last token": lambda: Program(token_model(last_token), texts(), losses_of, padded),
    "last token by gather": lambda: Program(token_model(last_token_by_gather), texts(), losses_of, padded),
    "packed": lambda: Program(
        Calls(packed, lstm=nn.LSTM(D, 4), f=nn.Linear(4, 2)), of_sizes(2, 5, 3), lambda m, b: m(b).sin().sum(1), list
    ),
    "mean over the own length": lambda: Program(
        Calls(mean_of_own, e=nn.Embedding(7, 4), f=nn.Linear(4, 2)), texts(), losses_of, padded
    ),
    "numpy": lambda: Program(linear(lambda m, x: m.f(torch.from_numpy(np.tanh(x.numpy())))), points()),
    "items": lambda: Program(linear(lambda m, x: m.f(x * torch.tensor([[r.norm().item()] for r in x]))), points()),
    "random crops": lambda: Program(linear(), Crops(), losses_of),
    "graphs of several sizes": lambda: Program(
        linear(of_graphs), of_sizes(4, 2, 3, 6, 3), lambda m, b: m(b).sin().sum(1), graphs
    ),
    "graphs of one size": lambda: Program(linear(of_graphs), of_sizes(4), lambda m, b: m(b).sin().sum(1), graphs),
    "experts": lambda: Program(
        Calls(mixture, gate=nn.Linear(D, 3), experts=nn.ModuleList(nn.Linear(D, 4) for _ in range(3))), points()
    ),
    "sorted, with a token for all": lambda: Program(
        Calls(sorted_with_token, f=nn.Linear(D, 2), token=nn.Parameter(torch.randn(D))), points()
    ),
    "positions repeated, and no sizes equal": lambda: Program(
        Calls(with_positions, f=nn.Linear(D, 4), p=nn.Embedding(N, 4)),
        [torch.randn(k + 1, D) for k in range(N)],
        lambda m, b: m(b),
        list,
    ),
    "a row in pieces": lambda: Program(
        Calls(in_pieces, f=nn.Linear(D, 2), token=nn.Parameter(torch.randn(D))), points()
    ),
    "logits times ten": lambda: Program(linear(), labeled(), lambda m, b: cross_entropy(lambda x: m(x) * 10, b)),
    "losses times eight": lambda: Program(linear(), labeled(), lambda m, b: 8 * cross_entropy(m, b)),
    "sampled in the forward": lambda: Program(Variational(), points(), evidence),
    "noise in the loop": lambda: Program(
        linear(), labeled(), lambda m, b: cross_entropy(m, (b[0] + 0.1 * torch.randn_like(b[0]), b[1]))
    ),
    "sampled by numpy": lambda: Program(
        linear(lambda m, x: m.f(x + torch.from_numpy(np.random.randn(*x.shape)))), points()
    ),
    "labels by a condition": lambda: Program(
        linear(), labeled(), lambda m, b: torch.where(b[1] > 0, 3 * cross_entropy(m, b), cross_entropy(m, b))
    ),
}


def by_program(*settings):
    """Parametrizes a test by every independent program with each of these settings."""
    pairs = [(name, key) for name in INDEPENDENT for key in settings]
    return pytest.mark.parametrize(("name", "settings"), pairs)


SETTINGS = {
    "as it is": {},
    "microbatches": {"performance": tp.Performance(microbatch_size=3)},
    "microbatches of one": {"performance": tp.Performance(microbatch_size=1)},
    "automatic clipping": {"clipping": tp.Automatic(0.5)},
    "small batches": {"expected_batch_size": 1.5},
}


@pytest.mark.thorough(but=2)
@by_program(*SETTINGS)
def test_independent_examples_train(name, settings):
    program = INDEPENDENT[name]()
    training = program.training(num_steps=10, **SETTINGS[settings])
    program.run(training)
    assert training.step_count == len(training.ledger) == 10


VIEWS = ["dropout", "spectral norm", "counts of calls", "random crops"]


@pytest.mark.parametrize("name", VIEWS)
def test_independent_examples_train_in_several_views(name):
    program = INDEPENDENT[name]()
    losses = program.losses
    program.losses = lambda m, b: losses(m, b).view(-1, 2)
    program.run(training := program.training(examples={"views": 2}, num_steps=10))
    assert training.step_count == 10


def test_independent_examples_train_by_workers():
    program = INDEPENDENT["random crops"]()
    program.run(training := program.training(examples={"num_workers": 2}, num_steps=10))
    assert training.step_count == 10


class OwnGenerator(torch.utils.data.Dataset):
    """Adds noise from the data set's own generator, as some libraries for augmentation do."""

    def __init__(self):
        self.x, self.generator = torch.randn(N, D), np.random.default_rng(0)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i] + torch.from_numpy(self.generator.normal(size=D))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_with_their_own_generator_train(num_workers):
    """A rehearsal uses the same items as the batch, also if workers fetched them. The statement has a note."""
    program = Program(nn.Linear(D, 2), OwnGenerator())
    program.run(training := program.training(examples={"num_workers": num_workers}, num_steps=10))
    assert training.step_count == 10
    (note,) = training.statement()["independence"]["not_compared"]
    assert "other items when they are fetched again" in note


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_that_repeat_have_no_note_in_the_statement(num_workers):
    program = INDEPENDENT["random crops"]()
    program.run(training := program.training(examples={"num_workers": num_workers}))
    assert training.statement()["independence"]["not_compared"] == []


# Rehearsals leave no trace


def trained_state(program, **settings):
    """Returns the state of model and ledger after training."""
    program.run(training := program.training(num_steps=10, **settings))
    return state_of(training.model), training.ledger.state_dict(), training.num_non_finite


@pytest.mark.thorough(but=1)
@by_program("as it is", "microbatches")
def test_rehearsals_leave_the_trained_model_bit_for_bit(name, settings):
    states = []
    for reason in (None, "test"):
        torch.manual_seed(0)
        states.append(trained_state(INDEPENDENT[name](), examples={"assume_independent": reason}, **SETTINGS[settings]))
    assert_same(*states)
    assert states[0][1]


def random_numbers():
    """Returns the numbers that the generators of torch, numpy and Python draw next."""
    return torch.rand(3), np.random.rand(3), [random.random() for _ in range(3)]


def seed_all():
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def draws_of_all(m, batch):
    noise = torch.randn(()) + np.random.rand() + random.random()
    return losses_of(m, batch) * (1 + 0.1 * noise)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2)])
@pytest.mark.parametrize("end", ["finished", "broken off", "failed", "refused"])
def test_the_random_numbers_after_a_loop_are_those_without_it(end, num_workers):
    training = Program(dropped(), Crops()).training(examples={"num_workers": num_workers})
    seed_all()
    try:
        for batch in training:
            losses = draws_of_all(training.model, batch)
            if training.step_count == 2:
                if end == "broken off":
                    break
                if end == "failed":
                    losses = losses.sum()
                if end == "refused" and training.rehearsing:
                    losses = losses * 2
            training.step(losses)
    except tp.Refused:
        assert end in ("failed", "refused")
    assert training.step_count == (6 if end == "finished" else 2)
    found = random_numbers()
    seed_all()
    assert_same(found, random_numbers())


def test_the_random_numbers_between_batches_are_the_users():
    """Outside of batch and step, as in a shuffled evaluation, the user's generators continue as without training."""
    program = Program(dropped(), points())
    training, found = program.training(), []
    seed_all()
    for batch in training:
        if training.step(program.losses(training.model, batch)):
            found.append(random_numbers())
    seed_all()
    assert_same(found, [random_numbers() for _ in range(6)])


def test_random_numbers_are_those_of_the_batch_in_its_rehearsals_too():
    training, drawn = Program(linear(), points()).training(performance=tp.Performance(microbatch_size=4)), {}
    for (x,) in training:
        numbers = random_numbers()
        if training._runs.pending.turn.draws == AS_DRAWN:  # others serve to compare parts of the batch
            drawn.setdefault((training.step_count, training._runs.part.number), []).append(numbers)
        training.step(losses_of(training.model, x))
    assert len(drawn) > 6
    firsts = [numbers[0] for numbers in drawn.values()]
    for numbers in drawn.values():
        for others in numbers:
            assert_same(others, numbers[0])
    assert len({x[0][0].item() for x in firsts}) == len({x[1][0] for x in firsts}) == len({x[2][0] for x in firsts})
    assert len({x[0][0].item() for x in firsts}) == len(firsts)


def test_the_random_numbers_of_a_batch_do_not_depend_on_the_users_seed():
    """Two trainings without a test seed have different keys: the user's seed does not determine dropout masks."""
    drawn = []
    for _ in range(2):
        seed_all()
        training = Program(linear(), points()).training(test_seed=None, expected_batch_size=N)
        next(batches := iter(training))
        drawn.append(random_numbers())
        batches.close()
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert not np.array_equal(drawn[0][1], drawn[1][1])
    assert drawn[0][2] != drawn[1][2]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dropout", "counts of calls", "layers left out"])
def test_rehearsals_are_less_than_a_fifth_of_the_turns_over_300_steps(name):
    program = INDEPENDENT[name]()
    training, turns = program.training(num_steps=300), []
    for batch in training:
        turns.append(training.rehearsing)
        training.step(program.losses(training.model, batch))
    assert training.step_count == 300
    assert 0 < sum(turns) < 0.2 * len(turns)


def test_a_refused_program_can_be_corrected_and_trained():
    """The refused batch leaves no trace: the training equals one that was correct from the start."""
    results = []
    for coupled in (True, False):
        torch.manual_seed(0)
        program = INDEPENDENT["counts of calls"]()
        training = program.training()
        if coupled:
            honest = program.losses
            program.losses = lambda m, b: (losses := honest(m, b)) - losses.mean().item()  # noqa: B023
            with pytest.raises(tp.Refused, match=LOSS):
                program.run(training)
            program.losses = honest
        program.run(training)
        results.append(state_of(training.model))
    assert_same(*results)


def test_a_reason_instead_of_rehearsals_is_in_the_statement():
    program = Program(linear(lambda m, x: m.f(x * x.detach().mean())), points())
    training = program.training(examples={"assume_independent": "tested elsewhere"})
    program.run(training)
    assert training.step_count == 6
    assert "tested elsewhere" in repr(training.statement())


class AlwaysRandom(nn.Module):
    """Random even in eval mode, by a function without a known mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) + 0.1 * torch.empty(len(x), 2).geometric_(0.5)


def flat(items):
    """Returns all values in a row, and where each example begins: the length changes with every batch."""
    return torch.cat(items), torch.tensor([0, *np.cumsum([len(item) for item in items])])


class SumsOfFlat(AlwaysRandom):
    def forward(self, batch):
        values, starts = batch
        return super().forward(torch.stack([p.sum() * torch.ones(3) for p in torch.tensor_split(values, starts[1:-1])]))


def test_the_statement_names_what_rehearsals_could_not_compare():
    program = Program(AlwaysRandom(), points())
    program.run(program.training())
    (note,) = program.running.statement()["independence"]["not_compared"]
    assert "random even in eval mode" in note


@pytest.mark.thorough
def test_examples_that_can_be_neither_replaced_nor_left_out_are_refused():
    lengths = np.random.default_rng(0).integers(1, 2**20, N)
    examples = [torch.randn(int(length)) for length in lengths]
    program = Program(SumsOfFlat(), examples, lambda model, b: model(b).square().sum(1), flat, "nothing can be shown")
    assert_refused(program)
    program.running = None
    free = program.training(examples={"assume_independent": "values are summed within an example alone"})
    program.run(free)
    assert free.step_count == 6


class Remembering(nn.Module):
    """Attends to a memory of all earlier examples, and adds these to it."""

    def __init__(self):
        super().__init__()
        self.f, self.bank = nn.Linear(D, 4), torch.zeros(N, 4)

    def forward(self, x, index):
        h = self.f(x)
        near = h.detach() @ self.bank.T @ self.bank
        self.bank = self.bank.index_copy(0, index, h.detach())
        return h + near


def test_a_memory_of_all_examples_is_refused():
    """An empty memory changes what the data reorder: it is another path, and no crash."""
    examples = TensorDataset(torch.randn(N, D), torch.arange(N))
    assert_refused(Program(Remembering(), examples, lambda model, batch: model(*batch).square().sum(1)))


# Batches of other kinds: random numbers in collate_fn, ragged tensors, items that are fetched at once, strings


def masked_tokens(items):
    """Draws random numbers for the batch as a whole, as for a masked language model."""
    tokens = torch.stack([x for x, _ in items])
    hidden = torch.bernoulli(torch.full(tokens.shape, 0.3)).bool()
    return tokens.masked_fill(hidden, 0), torch.stack([y for _, y in items])


def noisy(items):
    return torch.stack([x + random.gauss(0, 0.1) + 0.1 * torch.randn(D) for (x,) in items])


def ragged():
    return [(torch.randint(1, 7, (1 + k % 5,)), torch.tensor(k % 2)) for k in range(N)]


def offsets(items):
    lengths = torch.tensor([len(x) for x, _ in items])
    return torch.cat([x for x, _ in items]), lengths.cumsum(0) - lengths, torch.stack([y for _, y in items])


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.f = nn.EmbeddingBag(7, 4, mode="mean"), nn.Linear(4, 2)

    def forward(self, tokens, starts):
        return self.f(self.bag(tokens, starts))


def bagged(m, batch, change=lambda logits: logits):
    tokens, starts, y = batch
    return F.cross_entropy(change(m(tokens, starts)), y, reduction="none")


class FetchesMany(torch.utils.data.Dataset):
    """Returns the items of a batch at once, changed together."""

    def __init__(self, change):
        self.x, self.change = torch.randn(N, D), change

    def __len__(self):
        return N

    def __getitems__(self, numbers):
        return list(self.change(self.x[torch.tensor(numbers)]))


class OfWords(nn.Module):
    """Tokenizes strings in its forward; padding gives 0."""

    def __init__(self):
        super().__init__()
        self.e, self.f = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, words):
        tokens = [torch.tensor([1 + ord(c) % 6 for c in word]) for word in words]
        return self.f(self.e(nn.utils.rnn.pad_sequence(tokens, batch_first=True)).sum(1))


def words():
    return ["abcdefgh"[k % 3 : 4 + k % 4] for k in range(N)]


OF_OTHER_KINDS = {
    "masks of the whole batch": lambda: Program(
        Calls(lambda m, b: m.f(m.e(b)).mean(1), e=nn.Embedding(7, 4), f=nn.Linear(4, 2)),
        [(torch.randint(1, 7, (T,)), torch.tensor(k % 2)) for k in range(N)],
        lambda m, batch: F.cross_entropy(m(batch[0]).flatten(1), batch[1], reduction="none"),
        masked_tokens,
    ),
    "noise in collate_fn": lambda: Program(linear(), points(), collate=noisy),
    "offsets": lambda: Program(Bags(), ragged(), bagged, offsets),
    "many at once": lambda: Program(linear(), FetchesMany(lambda x: 2 * x)),
    "many at once, with noise": lambda: Program(linear(), FetchesMany(lambda x: x + 0.1 * torch.randn_like(x))),
    "strings": lambda: Program(OfWords(), words(), lambda m, b: m(b).square().sum(1), list),
}


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", OF_OTHER_KINDS)
def test_batches_of_other_kinds_train(name):
    program = OF_OTHER_KINDS[name]()
    program.run(training := program.training(num_steps=10))
    assert training.step_count == 10


COUPLED_OF_OTHER_KINDS = {
    "noise in collate_fn, centered": lambda: Program(linear(), points(), collate=lambda i: (x := noisy(i)) - x.mean(0)),
    "offsets, centered": lambda: Program(
        Bags(), ragged(), lambda m, b: bagged(m, b, lambda logits: logits - logits.mean(0)), offsets
    ),
    "offsets, centered without a gradient": lambda: Program(
        Bags(), ragged(), lambda m, b: bagged(m, b, lambda logits: logits - logits.detach().mean(0)), offsets
    ),
    "many at once, centered": lambda: Program(linear(), FetchesMany(lambda x: x - x.mean(0))),
    "many at once, rolled": lambda: Program(linear(), FetchesMany(lambda x: x + x.roll(1, 0))),
    "strings, scaled": lambda: Program(OfWords(), words(), lambda m, b: m(b).square().sum(1) / sum(map(len, b)), list),
}


@pytest.mark.parametrize("name", COUPLED_OF_OTHER_KINDS)
def test_couplings_in_batches_of_other_kinds_are_refused(name):
    program = COUPLED_OF_OTHER_KINDS[name]()
    program.match = "depend on each other|cannot be separated"
    assert_refused(program)
