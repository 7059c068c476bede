# SPDX-License-Identifier: Apache-2.0
"""Tests recurrent layers and cells: compositions against torch's own, and Jacobians against one backward each."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from cases import Calls, losses_of
from oracle import assert_exact, recorded_jacobian
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_privacy as tp
from torch_privacy.ops import Layout
from torch_privacy.ops.recurrent import COMPOSED, PACKED, PADDED
from torch_privacy.support.torch_modes import tensors_in

n, t, d, e = 5, 6, 3, 4
FUNCTIONS = {"LSTM": torch.lstm, "GRU": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}
LENGTHS = torch.tensor([6, 4, 4, 2, 1])


def layer(kind: str, **options) -> nn.RNNBase:
    """Returns one of the four kinds, with ``nn.LSTM``'s options."""
    if kind in ("LSTM", "GRU"):
        return getattr(nn, kind)(d, e, **options)
    return nn.RNN(d, e, nonlinearity=kind, **options)


OPTIONS: dict[str, dict] = {
    "one layer": {},
    "no bias": {"bias": False},
    "both directions": {"bidirectional": True},
    "batch first": {"batch_first": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "two layers, no bias, batch first": {"num_layers": 2, "bias": False, "batch_first": True},
}
PROJECTED: dict[str, dict] = {
    "projected": {"proj_size": 2},
    "projected, no bias, both directions": {"proj_size": 2, "bias": False, "bidirectional": True},
    "projected, two layers, both directions": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
}
LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    f"{kind}, {name}": lambda kind=kind, options=options: layer(kind, **options)
    for kind, (name, options) in [*product(FUNCTIONS, OPTIONS.items()), *product(["LSTM"], PROJECTED.items())]
}


# Outputs of the compositions


def states_of(rnn: nn.RNNBase) -> list[Tensor]:
    k = rnn.num_layers * (2 if rnn.bidirectional else 1)
    sizes = [rnn.proj_size or e, e] if isinstance(rnn, nn.LSTM) else [e]
    return [torch.randn(k, n, size, requires_grad=True) for size in sizes]


def arguments(rnn: nn.RNNBase, packed: bool, dropout: float = 0.0) -> tuple[Tensor, list[Tensor], tuple]:
    """Returns the sequence, the first states, and the module's other arguments for torch's function."""
    states = states_of(rnn)
    hx = tuple(states) if isinstance(rnn, nn.LSTM) else states[0]
    options = (rnn._flat_weights, rnn.bias, rnn.num_layers, dropout, True, rnn.bidirectional)
    x = torch.randn(*((n, t) if rnn.batch_first else (t, n)), d)
    if packed:
        data, batch_sizes, *_ = pack_padded_sequence(x, LENGTHS, batch_first=rnn.batch_first)
        return data.requires_grad_(), states, (data, batch_sizes, hx, *options)
    return x.requires_grad_(), states, (x, hx, *options, rnn.batch_first)


def function_of(rnn: nn.RNNBase) -> Callable:
    return FUNCTIONS[rnn.nonlinearity if isinstance(rnn, nn.RNN) else rnn.mode]


def gradients(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, materialize_grads=True))


def assert_composition_equals_torch(rnn: nn.RNNBase, packed: bool, dropout: float = 0.0) -> None:
    """Returns outputs and gradients, also of some outputs and a second time, and those of the recorded uses."""
    x, states, args = arguments(rnn, packed, dropout)
    function, weights, notes = function_of(rnn), dict(rnn.named_parameters()), []
    torch.manual_seed(1)
    expected = function(*args)
    torch.manual_seed(1)
    ours = COMPOSED[function](lambda y, uses: notes.extend((y, use) for use in uses), *args)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    hidden = [weight for name, weight in weights.items() if "_hh_" in name or "_hr_" in name]
    assert {id(use.weight) for _, use in notes} == set(map(id, hidden))
    assert len(notes) == len(hidden)
    inputs = [x, *states, *weights.values()]
    for part in (slice(None), slice(1), slice(1, None)):
        cotangents = [torch.randn_like(y) for y in expected[part]]
        theirs = gradients(expected[part], cotangents, inputs)
        for _ in range(2):
            found = gradients(ours[part], cotangents, inputs)
            torch.testing.assert_close(found, theirs, rtol=1e-10, atol=1e-12)
        bs = gradients(ours[part], cotangents, [y for y, _ in notes])
        by_weight = dict(zip(map(id, inputs), theirs, strict=True))
        for (_, use), b in zip(notes, bs, strict=True):
            whole = Layout(0, 1, 1, len(b))  # the batch as one example
            torch.testing.assert_close(use.op(b, whole).rows()[0], by_weight[id(use.weight)], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("case", LAYERS)
def test_composition_equals_torch(case, packed):
    assert_composition_equals_torch(LAYERS[case](), packed)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_composition_draws_the_same_dropout_as_torch(kind, packed):
    assert_composition_equals_torch(layer(kind, num_layers=3, bidirectional=True), packed, dropout=0.5)


def test_composition_is_the_same_in_chunks(monkeypatch):
    monkeypatch.setattr("torch_privacy.ops.recurrence.CHUNK_ENTRIES", 200)
    for kind, packed in product(["LSTM", "GRU"], [False, True]):
        assert_composition_equals_torch(layer(kind, bidirectional=True), packed)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_composition_takes_any_argument_by_keyword(kind, packed):
    _, _, args = arguments(layer(kind, num_layers=2, bidirectional=True), packed)
    named = dict(zip(PACKED if packed else PADDED, args, strict=True))
    function = FUNCTIONS[kind]
    expected = function(*args)
    for number in range(len(args) + 1):
        keywords = dict([*named.items()][number:])
        torch.testing.assert_close(function(*args[:number], **keywords), expected)
        ours = COMPOSED[function](lambda y, uses: None, *args[:number], **keywords)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_composition_frees_its_memory_after_the_backward(kind):
    _, _, args = arguments(layer(kind), packed=False)
    y = COMPOSED[FUNCTIONS[kind]](lambda y, uses: None, *args)[0]
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    assert not [name for name, value in vars(y.grad_fn).items() if list(tensors_in((value,)))]


# Jacobians


def through(rnn: nn.Module) -> nn.Module:
    """Makes input and output batch-first for every layer."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        return m.rnn(x)[0] if m.rnn.batch_first else m.rnn(x.transpose(0, 1))[0].transpose(0, 1)

    return Calls(forward, rnn=rnn)


def through_last(rnn: nn.Module) -> nn.Module:
    """Returns only the last states, as for a classifier."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        last = m.rnn(x if m.rnn.batch_first else x.transpose(0, 1))[1]
        return torch.cat(
            [state.transpose(0, 1).flatten(1) for state in ([last] if isinstance(last, Tensor) else last)], 1
        )

    return Calls(forward, rnn=rnn)


def through_packed(rnn: nn.Module, enforce_sorted: bool) -> nn.Module:
    """Packs sequences; the length is the number of nonzero entries."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        lengths = x.ne(0).any(2).sum(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
        y, last = m.rnn(packed)
        padded, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        states = [last] if isinstance(last, Tensor) else last
        return torch.cat([padded.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)], 1)

    return Calls(forward, rnn=rnn)


def sequences(lengths: Tensor) -> Tensor:
    """Returns sequences (n, t, d), with zeros after every sequence's end."""
    x = torch.randn(len(lengths), t, d)
    return x * (torch.arange(t) < lengths[:, None]).unsqueeze(2)


def learned_state(m: Calls, x: Tensor) -> Tensor:
    h, c = (state.expand(-1, len(x), -1) for state in (m.h, m.c))
    return m.rnn(x, (h, c.contiguous()))[0]


def by_keyword(m: Calls, x: Tensor) -> Tensor:
    """Calls the module, and then torch's function itself."""
    state = torch.ones(1, len(x), e)
    hx = (state, state) if m.rnn.mode == "LSTM" else state
    y = m.rnn(input=x, hx=hx)[0] + m.rnn(x, hx=hx)[0].tanh()
    options = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False}
    return y + function_of(m.rnn)(x, hx=hx, params=m.rnn._flat_weights, **options, batch_first=True)[0].sin()


def cell_by_keyword(m: Calls, x: Tensor) -> Tensor:
    state = torch.ones(len(x), e)
    weights = {"w_ih": m.cell.weight_ih, "w_hh": m.cell.weight_hh, "b_ih": m.cell.bias_ih, "b_hh": m.cell.bias_hh}
    return torch.gru_cell(input=x[:, 1], hx=m.cell(input=x[:, 0], hx=state), **weights)


def translator(m: Calls, x: Tensor) -> Tensor:
    _, state = m.encoder(x)
    return m.decoder(x.flip(1), state)[0]


def unrolled(m: Calls, x: Tensor) -> Tensor:
    """Runs a cell from zero states and returns h of every step."""
    state, outputs = None, []
    for x_t in x.unbind(1):
        state = m.cell(x_t, state)
        outputs.append(state if isinstance(state, Tensor) else state[0])
    return torch.stack(outputs, 1)


def from_learned_state(m: Calls, x: Tensor) -> Tensor:
    return m.cell(x[:, 1], m.cell(x[:, 0], m.h.expand(len(x), -1)))


def frozen_hidden(rnn: nn.RNNBase) -> nn.RNNBase:
    rnn.weight_hh_l0.requires_grad_(False)
    return rnn


def x() -> Tensor:
    return torch.randn(n, t, d)


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{name: lambda make=make: (through(make()), x()) for name, make in LAYERS.items()},
    **{
        f"{kind}, last states": lambda kind=kind: (
            through_last(layer(kind, num_layers=2, bidirectional=True, batch_first=True)),
            x(),
        )
        for kind in FUNCTIONS
    },
    **{
        f"{kind}, packed, sorted": lambda kind=kind: (
            through_packed(layer(kind, num_layers=2, bidirectional=True, batch_first=True), True),
            sequences(LENGTHS),
        )
        for kind in FUNCTIONS
    },
    **{
        f"{kind}, packed, in any order": lambda kind=kind: (
            through_packed(layer(kind, bidirectional=True), False),
            sequences(torch.tensor([2, 6, 1, 4, 4])),
        )
        for kind in FUNCTIONS
    },
    "LSTM, packed, projected": lambda: (
        through_packed(layer("LSTM", proj_size=2, bidirectional=True), True),
        sequences(LENGTHS),
    ),
    "LSTM, packed, equal lengths": lambda: (
        through_packed(layer("LSTM"), True),
        sequences(torch.tensor([6, 6, 6, 6, 6])),
    ),
    "LSTM, learned first state": lambda: (
        Calls(learned_state, rnn=layer("LSTM", batch_first=True), h=torch.randn(1, 1, e), c=torch.randn(1, 1, e)),
        x(),
    ),
    "GRU, encoder and decoder": lambda: (
        Calls(translator, encoder=layer("GRU", batch_first=True), decoder=layer("GRU", batch_first=True)),
        x(),
    ),
    "LSTM, called twice": lambda: (
        Calls(lambda m, x: m.rnn(torch.tanh(m.rnn(x)[0]))[0], rnn=nn.LSTM(d, d, batch_first=True)),
        x(),
    ),
    **{
        f"{kind}, by keyword": lambda kind=kind: (Calls(by_keyword, rnn=layer(kind, batch_first=True)), x())
        for kind in FUNCTIONS
    },
    "GRUCell, by keyword": lambda: (Calls(cell_by_keyword, cell=nn.GRUCell(d, e)), x()),
    "LSTM, frozen hidden weight": lambda: (through(frozen_hidden(layer("LSTM"))), x()),
    "LSTM, as many steps as examples": lambda: (through(layer("LSTM")), torch.randn(t, t, d)),
    "LSTM, one example": lambda: (through(layer("LSTM")), torch.randn(1, t, d)),
    "LSTM, one step": lambda: (through(layer("LSTM")), torch.randn(n, 1, d)),
    **{
        f"{type(cell()).__name__}, {name}": lambda cell=cell: (Calls(unrolled, cell=cell()), x())
        for name, cell in {
            "tanh": lambda: nn.RNNCell(d, e),
            "relu": lambda: nn.RNNCell(d, e, nonlinearity="relu"),
            "no bias": lambda: nn.RNNCell(d, e, bias=False),
            "unrolled": lambda: nn.LSTMCell(d, e),
            "without bias": lambda: nn.LSTMCell(d, e, bias=False),
            "repeated": lambda: nn.GRUCell(d, e),
            "repeated without bias": lambda: nn.GRUCell(d, e, bias=False),
        }.items()
    },
    "GRUCell, learned first state": lambda: (
        Calls(from_learned_state, cell=nn.GRUCell(d, e), h=torch.randn(1, e)),
        x(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_jacobian_matches_one_backward_per_example(case):
    assert_exact(*CASES[case]())


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_recorded_layer_gives_what_it_gives_unrecorded(kind):
    rnn, x = layer(kind, num_layers=2, bidirectional=True), torch.randn(t, n, d)
    with tp.record(rnn):
        ours = rnn(x)
    torch.testing.assert_close(ours, rnn(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_output_changed_in_place_is_refused(kind):
    def in_place(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].mul_(2).sum((1, 2))

    with pytest.raises(tp.Refused, match="changed in place"):
        recorded_jacobian(layer(kind, batch_first=True), x(), in_place)


def test_autocast_stays_near_the_exact_norms():
    torch.set_default_dtype(torch.float32)
    model, x = through(layer("LSTM")), torch.randn(n, t, d)
    exact = recorded_jacobian(model, x, losses_of).squared_norms()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        jacobian = recorded_jacobian(model, x, losses_of)
    assert jacobian.squared_norms().dtype == torch.float32
    torch.testing.assert_close(jacobian.squared_norms(), exact, rtol=0.05, atol=0)
