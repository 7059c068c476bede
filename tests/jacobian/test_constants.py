# SPDX-License-Identifier: Apache-2.0
"""The tape separates data of the batch from constants; the rows are exact in both cases."""

import pytest
import torch
import torch.nn.functional as F
from oracle import flat, rows_of_one_graph
from parts import Calls, losses_of, own_batches, tokens
from torch import nn

import torch_privacy as tp
from torch_privacy.jacobian.layouts.known import Layouts
from torch_privacy.jacobian.tape import Tape

N, T, D = 6, 5, 3


def jacobian(model, x, layouts=None, losses_of=losses_of, n=N):
    tape = Tape(dict(model.named_parameters()), model.buffers(), layouts, num_examples=n)
    tape.note_inputs(x)
    with tape:
        losses = losses_of(model, x)
    return tape.jacobian(losses, verify=True), losses


def assert_rows(model, x, layouts=None, losses_of=losses_of, n=N):
    """Asserts that the rows equal the gradients of single losses, in the same graph."""
    found, _ = jacobian(model, x, layouts, losses_of, n)
    rows = rows_of_one_graph(losses_of(model, x), model)
    torch.testing.assert_close(flat(found.rows(), 1).double(), rows, rtol=1e-9, atol=1e-12)


OF_EACH = {  # statistics of each example
    "length": lambda x: x.norm(dim=1, keepdim=True),
    "standard deviation": lambda x: x.std(1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True),
    "softmax": lambda x: F.softmax(x, 1),
    "sorted": lambda x: x.sort(1)[0],
    "padded": lambda x: F.pad(x, (1, 1))[:, :-2],
    "product": lambda x: x @ torch.arange(9.0).view(D, D),
}


def with_statistic(statistic, *, detached):
    def forward(m, x):
        if detached:
            return m.f(x * statistic(x.detach()))
        with torch.no_grad():
            found = statistic(x)
        return m.f((x * found).tanh())

    return Calls(forward, f=nn.Linear(D, 4))


def test_statistics_of_hidden_values_match_one_backward_per_loss():
    model = Calls(
        lambda m, x: m.g((h := m.f(x).tanh()) * h.detach().abs().amax(1, keepdim=True)),
        f=nn.Linear(D, 4),
        g=nn.Linear(4, 2),
    )
    assert_rows(model, torch.randn(N, D))


def test_own_statistics_along_a_dimension_that_is_as_long_as_the_batch():
    """Two dimensions may hold the examples: the right one is found."""
    model = Calls(lambda m, x: m.f((x / x.detach().abs().mean(1, keepdim=True)).softmax(2)).mean(1), f=nn.Linear(D, 4))
    assert_rows(model, torch.randn(N, N, D))


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "no_grad"])
@pytest.mark.parametrize("name", OF_EACH)
def test_statistics_of_each_example_match_one_backward_per_loss(name, detached):
    assert_rows(with_statistic(OF_EACH[name], detached=detached), torch.randn(N, D))


KEPT = {  # integers of each example, by functions without a rule
    "pad": lambda x: F.pad(x, (1, 0))[:, :-1],
    "difference": lambda x: torch.diff(x, dim=1, prepend=x[:, :1]).abs(),
    "borders": lambda x: torch.bucketize(x, torch.tensor([1, 3, 5])),
    "median": lambda x: x - x + x.median(1, keepdim=True)[0],
    "scatter": lambda x: torch.zeros_like(x).scatter(1, torch.arange(T).flip(0).expand_as(x), x),
}


def looked_up(change):
    return Calls(lambda m, x: m.e(change(x)).mean(1), e=nn.Embedding(20, 4))


@pytest.mark.parametrize("name", KEPT)
def test_integers_of_each_example_match_one_backward_per_loss(name):
    assert_rows(looked_up(KEPT[name]), tokens(N, T))


def test_the_users_random_numbers_do_not_depend_on_the_tape():
    model = Calls(lambda m, x: F.dropout(m.f(x * F.dropout(x.detach().cumprod(1), 0.5)), 0.5), f=nn.Linear(D, 4))
    x = torch.randn(N, D)
    torch.manual_seed(3)
    alone = losses_of(model, x)
    torch.manual_seed(3)
    _, taped = jacobian(model, x)
    torch.testing.assert_close(taped, alone)


def lists(change):
    """Returns a model of lists of examples with several lengths, and its losses."""

    def forward(m, xs):
        return torch.stack([m.f(x).mean(0) for x in change(list(xs))])

    def losses(model, xs):
        return model(xs).sin().sum(1)

    return Calls(forward, f=nn.Linear(D, 4)), losses


LENGTHS = {
    "of several lengths": [2, 4, 8, 3, 5, 7],
    "one of them as long as the batch": [2, 4, N, 3, 5, 7],
    "of one length": [4] * N,
    "all as long as the batch": [N] * N,
}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lists_of_examples_match_one_backward_per_loss(lengths, kind):
    model, losses = lists(lambda xs: xs)
    assert_rows(model, kind(torch.randn(length, D) for length in LENGTHS[lengths]), losses_of=losses)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lists_of_tokens_match_one_backward_per_loss(lengths):
    model = Calls(lambda m, xs: torch.stack([m.e(x).mean(0) for x in xs]), e=nn.Embedding(7, 4))
    texts = [tokens(length) for length in LENGTHS[lengths]]
    assert_rows(model, texts, losses_of=lambda model, xs: model(xs).sin().sum(1))


SEVERAL = {  # rows (2 n, ..), and the losses of n examples as a function of a layer's output
    "behind each other": lambda y: y.view(-1, 2, *y.shape[1:]).sum(1),
    "all first ones first": lambda y: y.view(2, -1, *y.shape[1:]).sum(0),
}
PAIRS = {"numbers": (nn.Linear, torch.randn), "tokens": (nn.Embedding, tokens)}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("order", SEVERAL)
def test_several_rows_for_each_example_match_one_backward_per_loss(order, kind):
    layer, make = PAIRS[kind]
    model, layouts = Calls(lambda m, x: SEVERAL[order](m.f(x).flatten(1)), f=layer(7, 4)), Layouts()
    for n in (3, 4, 3, 5):
        assert_rows(model, make(2 * n, 7), layouts, lambda model, x: model(x).sin().sum(1), n)


def test_two_ends_of_edges_are_not_two_examples_after_another_batch():
    class Degrees(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 4)

        def forward(self, x, edges, owner, n):
            degree = torch.zeros(len(x)).scatter_add(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
            return torch.zeros(n, 4).index_add(0, owner, self.f(x / degree[:, None]))

    model, layouts = Degrees(), Layouts()
    for n in (3, 2, 4, 2):
        owner = torch.arange(n).repeat_interleave(5)
        edges = torch.randint(5, (2, 7 * n)) + 5 * torch.arange(n).repeat_interleave(7)
        inputs = torch.randn(5 * n, 3), edges, owner
        assert_rows(model, inputs, layouts, lambda model, x, n=n: model(*x, n).sin().sum(1), n)


def test_an_input_that_all_examples_share_does_not_count_as_their_rows():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(3, 4)

        def forward(self, x, shared):
            return self.f(x) @ shared[:4] + self.f(x) @ shared[4:]

    model, shared, layouts = Shared(), torch.randn(8, 5), Layouts()
    for n in (2, 4, 8, 2, 3, 4):
        inputs = torch.randn(n, 3), shared
        assert_rows(model, inputs, layouts, lambda model, x: model(*x).sin().sum(1), n)


def test_a_list_of_as_many_inputs_as_there_are_examples():
    model = Calls(lambda m, xs: m.e(xs[0]).mean(1) + m.e(xs[1]).mean(1), e=nn.Embedding(7, 4))
    assert_rows(model, [tokens(2, T), tokens(2, T)], losses_of=lambda model, xs: model(xs).sin().sum(1), n=2)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 3)])
def test_graphs_with_as_many_features_as_there_are_graphs(sizes):
    n, owner = len(sizes), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    model = Calls(
        lambda m, x: torch.zeros(n, 4).index_add(0, owner, m.f((1 + m.p) * x)), f=nn.Linear(n, 4), p=torch.randn(())
    )
    assert_rows(model, torch.randn(len(owner), n), losses_of=lambda m, x: m(x).sin().sum(1), n=n)


CONSTANTS = {  # made in the forward, with sizes that n may divide
    "mask": lambda m: (m.p + torch.full((6, 6), float("-inf")).triu(1)).softmax(-1),
    "filled by a parameter": lambda m: torch.zeros(6, 6).index_put((torch.arange(6), torch.arange(6)), m.p[0]),
    "of a list": lambda m: m.p * torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
    "a number": lambda m: m.p * torch.tensor(0.5),
    "type of the input": lambda m: m.p * torch.arange(6).to(m.p),
    "rows": lambda m: torch.ones(6, 6) * m.p[0],
    "of a scale": lambda m: m.p * torch.logspace(-1, 1, 6),
}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_a_size_that_the_batch_divides(name, n):
    model = Calls(lambda m, x: m.f(x @ CONSTANTS[name](m)), f=nn.Linear(6, 4), p=torch.randn(6, 6))
    assert_rows(model, torch.randn(n, 6), n=n)


def test_cached_integers_become_constants():
    cached, layouts = torch.arange(7)[:6].roll(2), Layouts()
    model = Calls(lambda m, x: m.f(x @ m.p[cached]), f=nn.Linear(6, 4), p=torch.randn(6, 6))
    with pytest.raises(tp.Refused, match="cannot be separated"):
        jacobian(model, torch.randn(3, 6), layouts, n=3)
    for n in (4, 3, 6):
        assert_rows(model, torch.randn(n, 6), layouts, n=n)


def test_large_filled_tensors_become_constants(monkeypatch):
    monkeypatch.setattr("torch_privacy.jacobian.recording.tensors.LARGE", 0)
    model = Calls(lambda m, x: m.f(x) * (m.p + torch.full((4,), 0.5)), f=nn.Linear(3, 4), p=torch.randn(4))
    with pytest.raises(tp.Refused, match="cannot be separated"):
        jacobian(model, torch.randn(4, 3), n=4)
    layouts = Layouts()
    assert_rows(model, torch.randn(3, 3), layouts, n=3)
    assert_rows(model, torch.randn(4, 3), layouts, n=4)


@pytest.mark.parametrize("n", [4, 5])
def test_parameters_written_into_zeros_are_repeated_per_example_or_not(n):
    """A first token is repeated; the entries of a 4 x 4 matrix are not, even in a batch of four examples."""

    class FirstToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.entries = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            h, w = x.new_zeros(len(x), 7, 4), torch.zeros(4, 4)
            h[:, 0] = self.token
            h[:, 1:] = x
            w[:, :2] = self.entries
            return h @ w

    assert_rows(FirstToken(), torch.randn(n, 6, 4), n=n)


def test_a_first_state_of_zeros_is_an_input():
    model = Calls(lambda m, x: m.f(x) + m.g(torch.zeros(N, 4)).tanh(), f=nn.Linear(D, 4), g=nn.Linear(4, 4))
    assert_rows(model, torch.randn(N, D))


class Positions(nn.Module):
    """Scales position embeddings by numbers that it keeps as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.numbers = torch.linspace(0, 1, 18).view(6, 3)
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

    def forward(self, x):
        return self.head((x + self.scale * self.numbers).mean(1))


def training_of(model, data):
    return tp.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.utils.data.TensorDataset(data),
        expected_batch_size=5,
        num_steps=8,
        clipping=tp.Flat(1.0),
        noise_multiplier=1.0,
        test_seed=1,
    )


def test_a_plain_attribute_is_a_constant():
    training = training_of(Positions(), torch.randn(40, 6, 3))
    for (x,) in own_batches(training, losses_of):
        losses = losses_of(training.model, x)
        norms = training._runs.pending.tape.jacobian(losses, retain_graph=True).squared_norms()
        torch.testing.assert_close(norms, rows_of_one_graph(losses, training.model).square().sum(1))
        training.step(losses)
    assert training.step_count == 8


@pytest.mark.parametrize("change", ["written into", "replaced"])
def test_a_plain_attribute_that_was_changed_is_no_constant(change):
    model = Positions()
    training = training_of(model, torch.randn(40, 6, 3))
    if change == "written into":
        model.numbers += 0
    else:
        model.numbers = torch.linspace(0, 1, 18).view(6, 3)
    with pytest.raises(tp.Refused, match="cannot be separated"):
        next(own_batches(training, losses_of))
    assert training.step_count == 0


IN_PLACE = {  # views that an einsum returns
    "scaled": lambda y: y.mul_(0.5),
    "a part": lambda y: (y[:, 0].mul_(0.5), y)[1],
    "through a view": lambda y: y.reshape(len(y), 4, 6)[:, 1:].mul_(0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_the_view_that_an_einsum_returns_may_be_changed_in_place(name):
    model = Calls(lambda m, x: IN_PLACE[name](torch.einsum("nihd,thd->nhit", x, m.w)), w=torch.randn(2, 4, 3))
    assert_rows(model, torch.randn(N, 3, 4, 3))


def test_a_sparse_adjacency_matches_one_backward_per_loss():
    class Graphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(D, 2)

        def forward(self, x, adjacency):
            return self.f(torch.sparse.mm(adjacency, x.flatten(0, 1)).view(x.shape).mean(1))

    model, x = Graphs(), torch.randn(N, 4, D)
    edges = torch.block_diag(*torch.rand(N, 4, 4))

    assert_rows(model, (x, edges.to_sparse()), losses_of=lambda model, x: model(*x).sin().sum(1))


HIDDEN = {  # code that hides how a parameter is used -> the advice in the message
    "a single example": (lambda m, x: torch.stack([F.linear(v, m.w) for v in x]), r"layer\(x\[None\]\)\[0\]"),
    "nested": (
        lambda m, x: F.linear(torch.nested.nested_tensor(list(x[:, None]), layout=torch.jagged), m.w).values(),
        r"'w' is used with a nested tensor",
    ),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_refusals_name_cause_and_cure(kind):
    forward, message = HIDDEN[kind]
    with pytest.raises(tp.Refused, match=message):
        jacobian(Calls(forward, w=torch.randn(4, D)), torch.randn(N, D))
