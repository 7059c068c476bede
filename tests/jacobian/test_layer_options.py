# SPDX-License-Identifier: Apache-2.0
"""Compares torch's layers with random options, for one to four examples, with one backward per example."""

import hypothesis.strategies as st
import oracle
import pytest
import torch
import torch.nn.functional as F
from drawn import draws
from hypothesis import assume, given
from parts import Calls
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCHES = st.integers(1, 4)
SMALL = st.integers(1, 3)
GROUPED = [(1, 1, 1), (1, 2, 3), (2, 2, 4), (2, 4, 2), (3, 3, 3), (2, 6, 4)]  # groups, channels in, channels out


def assert_exact(model: nn.Module, x: Tensor) -> None:
    for p in model.parameters():  # a norm starts at ones and zeros, which would hide a lost factor
        nn.init.normal_(p, std=0.5)
    oracle.assert_exact(model, x)


@draws(20)
@given(
    n=BATCHES,
    positions=st.lists(SMALL, max_size=3),
    sizes=st.tuples(SMALL, SMALL),
    bias=st.booleans(),
    twice=st.booleans(),
    time_first=st.booleans(),
)
def test_linear(n, positions, sizes, bias, twice, time_first):
    d, e = sizes

    def forward(m: Calls, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if time_first and positions else x
        y = m.f(x) + (torch.tanh(m.f(2 * x)) if twice else 0)
        return y.transpose(0, 1) if time_first and positions else y

    assert_exact(Calls(forward, f=nn.Linear(d, e, bias=bias)), torch.randn(n, *positions, d))


@st.composite
def windows(draw: st.DrawFn, dims: int) -> dict[str, tuple[int, ...]]:
    """Draws kernel, stride, padding and dilation, one each per dimension."""
    each = st.tuples(*[st.integers(1, 3)] * dims)
    padding = st.tuples(*[st.integers(0, 2)] * dims)
    return {"kernel_size": draw(each), "stride": draw(each), "padding": draw(padding), "dilation": draw(each)}


def per_example(layer: nn.Module, images: int) -> nn.Module:
    """Applies the layer to several images of each example."""
    if images == 1:
        return Calls(lambda m, x: m.f(x[:, 0]), f=layer)
    return Calls(lambda m, x: m.f(x.flatten(0, 1)).unflatten(0, x.shape[:2]), f=layer)


CONVOLUTIONS = {
    "data": st.data(),
    "dims": st.integers(1, 3),
    "n": BATCHES,
    "images": st.integers(1, 2),
    "channels": st.sampled_from(GROUPED),
    "bias": st.booleans(),
}
MODES = st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"])


@draws(60)
@given(**CONVOLUTIONS, mode=MODES)
def test_convolution(data, dims, n, images, channels, bias, mode):
    groups, d, e = channels
    options = data.draw(windows(dims))
    size = data.draw(st.tuples(*[st.integers(4, 7)] * dims))
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](d, e, groups=groups, bias=bias, padding_mode=mode, **options)
    zipped = zip(size, *options.values(), strict=True)
    assume(all(length + 2 * p > w * (k - 1) for length, k, _, p, w in zipped))
    assert_exact(per_example(layer, images), torch.randn(n, images, d, *size))


@draws(20)
@given(
    dims=st.integers(1, 3),
    n=BATCHES,
    kernel=st.integers(1, 4),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid"]),
)
def test_convolution_with_named_padding(dims, n, kernel, dilation, padding):
    assume(padding != "same" or kernel % 2 or dilation % 2 == 0)  # otherwise torch warns that it copies
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](2, 3, kernel, padding=padding, dilation=dilation)
    assert_exact(layer, torch.randn(n, 2, *[7] * dims))


@pytest.mark.thorough
@draws(60)
@given(**CONVOLUTIONS)
def test_transposed_convolution(data, dims, n, images, channels, bias):
    groups, d, e = channels
    options = data.draw(windows(dims))
    size = data.draw(st.tuples(*[st.integers(2, 4)] * dims))
    largest = [max(s, w) - 1 for s, w in zip(options["stride"], options["dilation"], strict=True)]
    extra = tuple(data.draw(st.integers(0, most)) for most in largest)
    layer = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 1]
    layer = layer(d, e, groups=groups, bias=bias, output_padding=extra, **options)
    zipped = zip(size, *options.values(), extra, strict=True)
    assume(all((length - 1) * s - 2 * p + w * (k - 1) + o + 1 > 0 for length, k, s, p, w, o in zipped))
    assert_exact(per_example(layer, images), torch.randn(n, images, d, *size))


@draws(20)
@given(
    n=BATCHES,
    groups=st.sampled_from([(1, 4), (2, 4), (4, 4), (3, 6)]),
    size=st.lists(SMALL, max_size=3),
    images=st.integers(1, 2),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_group_norm(n, groups, size, images, eps):
    layer = per_example(nn.GroupNorm(*groups, eps=eps), images)
    assert_exact(layer, torch.randn(n, images, groups[1], *size, 2))


@draws(20)
@given(
    n=BATCHES,
    positions=st.lists(SMALL, max_size=2),
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    bias=st.booleans(),
    rms=st.booleans(),
    eps=st.sampled_from([1e-5, 0.1]),
)
def test_layer_norm_and_rms_norm(n, positions, shape, bias, rms, eps):
    shape = [*shape[:-1], shape[-1] + 1]
    layer = nn.RMSNorm(shape, eps=eps) if rms else nn.LayerNorm(shape, eps=eps, bias=bias)
    assert_exact(layer, torch.randn(n, *positions, *shape))


@draws(20)
@given(n=BATCHES, dims=st.integers(1, 3), channels=SMALL, fixed=st.booleans(), eps=st.sampled_from([1e-5, 0.1]))
def test_instance_norm_and_batch_norm_with_fixed_statistics(n, dims, channels, fixed, eps):
    kinds = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d] if fixed else []
    kinds = kinds or [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
    layer = kinds[dims - 1](channels, eps=eps, affine=True, track_running_stats=fixed)
    if fixed:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        layer.eval()
    assert_exact(layer, torch.randn(n, channels, *[2, 3, 2][:dims]))


@draws(20)
@given(
    data=st.data(),
    n=BATCHES,
    positions=st.lists(SMALL, max_size=2),
    width=SMALL,
    padding_idx=st.sampled_from([None, 0, -1, 3]),
)
def test_embedding(data, n, positions, width, padding_idx):
    ids = data.draw(st.lists(st.integers(0, 4), min_size=n * 9, max_size=n * 9))
    ids = torch.tensor(ids).view(n, 9)[:, : torch.Size(positions).numel()].reshape(n, *positions)
    assert_exact(nn.Embedding(5, width, padding_idx=padding_idx), ids)


def bags_of(layer: nn.EmbeddingBag, offsets: bool) -> nn.Module:
    """Sums the first tokens of each example, as many as its first token says, in one bag; or all of them."""

    def forward(m: Calls, ids: Tensor) -> Tensor:
        if not offsets:
            return m.bag(ids)
        lengths = ids[:, 0]
        ends = lengths.cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends]) if m.bag.include_last_offset else ends - lengths
        return m.bag(ids[torch.arange(ids.shape[1]) < lengths[:, None]], starts)

    return Calls(forward, bag=layer)


@draws(20)
@given(
    data=st.data(),
    n=BATCHES,
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding_idx=st.sampled_from([None, 0, 3]),
    offsets=st.booleans(),
    last=st.booleans(),
)
def test_embedding_bag(data, n, mode, padding_idx, offsets, last):
    ids = data.draw(st.lists(st.integers(0, 4), min_size=n * 5, max_size=n * 5))
    layer = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding_idx, include_last_offset=offsets and last)
    assert_exact(bags_of(layer, offsets), torch.tensor(ids).view(n, 5))


def recurrent(layer: nn.RNNBase, packed: bool, states: bool) -> nn.Module:
    """A batch-first layer that returns all its outputs, and on demand its last states."""

    def forward(m: Calls, x: Tensor) -> Tensor:
        first = 0.1 * x.sum((1, 2)).view(1, -1, 1).expand(m.k, -1, m.size).contiguous()
        first = (first, first.new_zeros(m.k, len(x), 3)) if isinstance(m.rnn, nn.LSTM) else first
        if not packed:
            y, last = m.rnn(x, first)
        else:
            lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
            y, last = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), first)
            y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        lasts = [last] if isinstance(last, Tensor) else last
        return torch.cat([y.flatten(1), *(state.transpose(0, 1).flatten(1) for state in lasts * states)], 1)

    model = Calls(forward, rnn=layer)
    model.k, model.size = layer.num_layers * (1 + layer.bidirectional), layer.proj_size or layer.hidden_size
    return model


@pytest.mark.thorough
@draws(40)
@given(
    n=BATCHES,
    kind=st.sampled_from(["LSTM", "GRU", "tanh", "relu"]),
    layers=st.integers(1, 3),
    both=st.booleans(),
    bias=st.booleans(),
    projected=st.integers(0, 2),
    packed=st.booleans(),
    states=st.booleans(),
)
def test_recurrent_layers(n, kind, layers, both, bias, projected, packed, states):
    options = {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": True}
    if kind == "LSTM":
        layer = nn.LSTM(2, 3, proj_size=projected, **options)
    else:
        layer = nn.GRU(2, 3, **options) if kind == "GRU" else nn.RNN(2, 3, nonlinearity=kind, **options)
    assert_exact(recurrent(layer, packed, states), torch.randn(n, 4, 2))


@draws(40)
@given(
    n=BATCHES,
    heads=st.sampled_from([1, 2]),
    bias=st.booleans(),
    added=st.sampled_from(["", "bias", "zeros"]),
    widths=st.sampled_from([(None, None), (3, 2), (4, 3)]),
    batch_first=st.booleans(),
    mask=st.sampled_from(["none", "causal", "padding", "additive"]),
    weights=st.booleans(),
)
def test_multihead_attention(n, heads, bias, added, widths, batch_first, mask, weights):
    kdim, vdim = widths
    layer = nn.MultiheadAttention(
        4,
        heads,
        bias=bias,
        add_bias_kv=added == "bias",
        add_zero_attn=added == "zeros",
        kdim=kdim,
        vdim=vdim,
        batch_first=batch_first,
    )

    def forward(m: Calls, x: Tensor) -> Tensor:
        sequences = x, x[..., : kdim or 4], x[..., : vdim or 4]
        if not batch_first:
            sequences = tuple(sequence.transpose(0, 1) for sequence in sequences)
        options = {"attn_mask": torch.ones(5, 5).triu(1).bool()} if mask == "causal" else {}
        if mask == "additive":
            options = {"attn_mask": torch.arange(25.0).view(5, 5).cos()}
        if mask == "padding":
            options = {"key_padding_mask": torch.cat([torch.zeros(len(x), 1), x[:, 1:, 0]], 1) > 0.5}
        y, shares = m.f(*sequences, need_weights=weights, **options)
        y = y if batch_first else y.transpose(0, 1)
        return torch.cat([y.flatten(1), shares.flatten(1)], 1) if weights else y

    assert_exact(Calls(forward, f=layer), torch.randn(n, 5, 4))


@draws(20)
@given(
    n=BATCHES,
    first=st.booleans(),
    activation=st.sampled_from(["relu", "gelu"]),
    bias=st.booleans(),
    decoder=st.booleans(),
    causal=st.booleans(),
)
def test_transformer_layers(n, first, activation, bias, decoder, causal):
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    layer = kind(4, 2, 6, 0.0, activation, batch_first=True, norm_first=first, bias=bias)
    mask = nn.Transformer.generate_square_subsequent_mask(5) if causal else None

    def forward(m: Calls, x: Tensor) -> Tensor:
        return m.f(x, 2 * x, tgt_mask=mask) if decoder else m.f(x, src_mask=mask)

    assert_exact(Calls(forward, f=layer), torch.randn(n, 5, 4))


@draws(20)
@given(
    n=BATCHES,
    kind=st.sampled_from(["prelu", "prelu per channel", "bilinear", "weight norm", "parametrized norm"]),
    positions=st.lists(SMALL, max_size=2),
)
def test_other_layers(n, kind, positions):
    layer = {
        "prelu": lambda: nn.PReLU(),
        "prelu per channel": lambda: nn.PReLU(3),
        "bilinear": lambda: Calls(lambda m, x: m.f(x, F.relu(x)), f=nn.Bilinear(3, 3, 2)),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), dim=None),
        "parametrized norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), dim=1),
    }[kind]()
    channels = (3, *positions) if kind == "prelu per channel" else (*positions, 3)
    assert_exact(layer, torch.randn(n, *channels))


class Placed(nn.Module):
    """Adds a table's rows, looked up by positions that are written out for each example."""

    def __init__(self):
        super().__init__()
        self.f, self.table = nn.Linear(3, 4), nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(len(x), -1)
        return self.f(x) + self.table(places)


def test_rows_looked_up_by_the_positions_of_each_example():
    assert_exact(Placed(), torch.randn(4, 5, 3))
