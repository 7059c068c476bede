# SPDX-License-Identifier: Apache-2.0
"""Small models, each with a different use of a parameter: name -> (model, input). A new use is one more line."""

from collections.abc import Callable

import cases_conv
import cases_linear
import torch
import torch.nn.functional as F
from parts import Calls as Calls
from parts import losses_of as losses_of
from parts import tokens as tokens
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def tied_language_model() -> nn.Module:
    def forward(m: Calls, ids: Tensor) -> Tensor:
        h = m.tokens(ids) + m.positions(torch.arange(ids.shape[1]))
        h = h + m.mix(m.norm(h))
        return F.linear(torch.tanh(h), m.tokens.weight)

    parts = {"tokens": nn.Embedding(7, 6, padding_idx=0), "positions": nn.Embedding(8, 6)}
    return Calls(forward, **parts, norm=nn.LayerNorm(6), mix=nn.Linear(6, 6))


def changed_in_place(m: Calls, x: Tensor) -> Tensor:
    h = m.one(x)
    h.relu_()
    h = m.two(h)
    h += m.shift
    return h.mul_(2)


SHUFFLED = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])


def shuffled(m: Calls, x: Tensor) -> Tensor:
    """Processes all positions of all examples in one shuffled order."""
    order = SHUFFLED[SHUFFLED < x[..., 0].numel()]
    return m.f(x.flatten(0, 1)[order])[order.argsort()].view_as(x)


def sorted_by_data(m: Calls, x: Tensor) -> Tensor:
    order = x[:, 0].flatten(1).sum(1).argsort()
    return m.f(x[order])[order.argsort()]


def sorted_positions(m: Calls, x: Tensor) -> Tensor:
    order = x[..., 0].flatten().argsort()
    h = x.flatten(0, 1)[order]
    return (F.layer_norm(m.f(h) * m.s + m.b, (3,), m.g))[order.argsort()].view_as(x)


def sorted_tokens(m: Calls, ids: Tensor) -> Tensor:
    order = ids.flatten().argsort(stable=True)
    return m.f(ids.flatten()[order])[order.argsort()].view(*ids.shape, 4)


def packed(m: Calls, x: Tensor) -> Tensor:
    """Runs an RNN and a linear map on packed sequences, as long as an example's leading positive entries."""
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
    steps = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
    steps = steps._replace(data=torch.tanh(m.f(steps.data)))
    return pad_packed_sequence(steps, batch_first=True, total_length=x.shape[1])[0]


def two_experts_each(m: Calls, x: Tensor) -> Tensor:
    """Sends every token through the best two of three experts, gathered and summed by index."""
    tokens = x.flatten(0, 1)
    best = m.gate(tokens).softmax(-1).topk(2, -1)
    total = torch.zeros_like(tokens)
    for k, expert in enumerate(m.experts):
        token, rank = (best.indices == k).nonzero(as_tuple=True)
        total = total.index_add(0, token, expert(tokens[token]) * best.values[token, rank].unsqueeze(1))
    return total.view_as(x)


def one_expert_each(m: Calls, x: Tensor) -> Tensor:
    """Sends every token through the best of three experts, selected and written back by boolean masks."""
    tokens = x.flatten(0, 1)
    scores = m.gate(tokens).softmax(-1)
    total = torch.zeros_like(tokens)
    for k, expert in enumerate(m.experts):
        chosen = scores.argmax(-1) == k
        total[chosen] = expert(tokens[chosen]) * scores[chosen, k].unsqueeze(1)
    return total.view_as(x)


def sorted_by_expert(m: Calls, x: Tensor) -> Tensor:
    """Uses one weight for all experts, with the tokens sorted by expert and split."""
    tokens = x.flatten(0, 1)
    scores = m.gate(tokens).softmax(-1)
    order = scores.argmax(-1).argsort(stable=True)
    sizes = scores.argmax(-1).bincount(minlength=3).tolist()
    outputs = [F.linear(part, w) for part, w in zip(tokens[order].split(sizes), m.w, strict=True)]
    return (torch.cat(outputs)[order.argsort()] * scores.amax(-1, keepdim=True)).view_as(x)


def experts() -> dict[str, nn.Module]:
    return {"gate": nn.Linear(3, 3), "experts": nn.ModuleList(nn.Linear(3, 3) for _ in range(3))}


def met(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    """Returns a case: a function of x (5, 6, 4) and a parameter."""
    return lambda: (Calls(lambda m, x: function(x, m.w), w=torch.randn(shape or (4,))), torch.randn(5, 6, 4))


def written(h: Tensor, key: object, value: Tensor) -> Tensor:
    """Returns h with a value at a key."""
    h[key] = value
    return h


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear, one position": lambda: (nn.Linear(3, 4), torch.randn(5, 3)),
    "linear, no bias": lambda: (nn.Linear(3, 4, bias=False), torch.randn(5, 3)),
    "linear, rank 3": lambda: (nn.Linear(3, 4), torch.randn(5, 6, 3)),
    "linear, rank 4": lambda: (nn.Linear(3, 4), torch.randn(5, 2, 6, 3)),
    "linear, many positions": lambda: (nn.Linear(40, 50), torch.randn(3, 3, 40)),
    "linear, called twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Linear(3, 3)),
        torch.randn(5, 6, 3),
    ),
    "linear, batch of one": lambda: (nn.Linear(3, 4), torch.randn(1, 6, 3)),
    "linear, positions as many as examples": lambda: (nn.Linear(3, 4), torch.randn(5, 5, 3)),
    "linear, time first inside": lambda: (
        Calls(lambda m, x: m.f(x.transpose(0, 1)).transpose(0, 1), f=nn.Linear(3, 4)),
        torch.randn(5, 6, 3),
    ),
    "linear, flattened inside": lambda: (
        Calls(lambda m, x: m.f(x.flatten(0, 1)).unflatten(0, x.shape[:2]), f=nn.Linear(3, 4)),
        torch.randn(5, 6, 3),
    ),
    "linear, flattened time first": lambda: (
        Calls(lambda m, x: m.f(x.transpose(0, 1).flatten(0, 1)).view(6, -1, 4).transpose(0, 1), f=nn.Linear(3, 4)),
        torch.randn(5, 6, 3),
    ),
    "linear, examples in the middle of a dimension": lambda: (
        Calls(lambda m, x: m.f(x.transpose(0, 1).flatten(0, 2)).view(2, -1, 3, 4).transpose(0, 1), f=nn.Linear(3, 4)),
        torch.randn(5, 2, 3, 3),
    ),
    "linear, changed in place": lambda: (
        Calls(changed_in_place, one=nn.Linear(3, 4), two=nn.Linear(4, 4), shift=torch.randn(4)),
        torch.randn(5, 6, 3),
    ),
    "addmm": lambda: (
        Calls(lambda m, x: torch.addmm(m.b, x, m.w), b=torch.randn(4), w=torch.randn(3, 4)),
        torch.randn(5, 3),
    ),
    "matmul, parameter on the right": lambda: (Calls(lambda m, x: x @ m.w, w=torch.randn(3, 4)), torch.randn(5, 2, 3)),
    "matmul, parameter on the left": lambda: (Calls(lambda m, x: m.w @ x, w=torch.randn(4, 3)), torch.randn(5, 3, 6)),
    "matmul, examples in columns": lambda: (Calls(lambda m, x: (m.w @ x.T).T, w=torch.randn(4, 3)), torch.randn(5, 3)),
    "matmul, vector": lambda: (Calls(lambda m, x: x @ m.w, w=torch.randn(3)), torch.randn(5, 6, 3)),
    "matmul, transposed parameter": lambda: (Calls(lambda m, x: x @ m.w.T, w=torch.randn(4, 3)), torch.randn(5, 6, 3)),
    "linear, product of parameters": lambda: (
        Calls(lambda m, x: F.linear(x, m.a @ m.b), a=torch.randn(4, 2), b=torch.randn(2, 3)),
        torch.randn(5, 6, 3),
    ),
    "linear, weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), torch.randn(5, 6, 3)),
    "linear, sliced parameter": lambda: (
        Calls(lambda m, x: F.linear(x, m.w[:2]) + F.linear(x, m.w[2:]), w=torch.randn(4, 3)),
        torch.randn(5, 6, 3),
    ),
    "tied autoencoder": lambda: (
        Calls(lambda m, x: torch.tanh(F.linear(x, m.w)) @ m.w, w=torch.randn(4, 3)),
        torch.randn(5, 6, 3),
    ),
    "embedding": lambda: (nn.Embedding(7, 4), tokens(5, 6)),
    "embedding by keyword": lambda: (
        Calls(lambda m, x: F.embedding(input=x, weight=m.e.weight), e=nn.Embedding(7, 4)),
        tokens(5, 6),
    ),
    "embedding, one token": lambda: (nn.Embedding(7, 4), tokens(5)),
    "embedding, padding": lambda: (nn.Embedding(7, 4, padding_idx=-2), tokens(5, 6)),
    "embedding, used twice": lambda: (
        Calls(lambda m, x: m.e(x) * torch.tanh(m.e(6 - x)), e=nn.Embedding(7, 4)),
        tokens(5, 6),
    ),
    "tied language model": lambda: (tied_language_model(), tokens(5, 6)),
    "layer norm": lambda: (nn.LayerNorm(4), torch.randn(5, 6, 4)),
    "layer norm over two dimensions": lambda: (nn.LayerNorm([6, 4]), torch.randn(5, 6, 4)),
    "layer norm, used twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.LayerNorm(4)),
        torch.randn(5, 6, 4),
    ),
    "group norm": lambda: (nn.GroupNorm(2, 4), torch.randn(5, 4, 3, 3)),
    "group norm, no positions": lambda: (nn.GroupNorm(2, 4), torch.randn(5, 4)),
    "bias by addition": lambda: (Calls(lambda m, x: x + m.b, b=torch.randn(4)), torch.randn(5, 6, 4)),
    "bias by subtraction": lambda: (Calls(lambda m, x: m.b - x - 2 * m.b, b=torch.randn(4)), torch.randn(5, 6, 4)),
    "bias, scaled": lambda: (Calls(lambda m, x: torch.sub(x, m.b, alpha=3), b=torch.randn(6, 1)), torch.randn(5, 6, 4)),
    "position by expand": lambda: (
        Calls(lambda m, x: x + m.b.expand(len(x), -1, -1), b=torch.randn(1, 6, 4)),
        torch.randn(5, 6, 4),
    ),
    "scale by multiplication": lambda: (Calls(lambda m, x: m.s * x * m.s, s=torch.randn(4)), torch.randn(5, 6, 4)),
    "scale by a scalar parameter": lambda: (Calls(lambda m, x: x * m.s, s=torch.randn(())), torch.randn(5, 6, 4)),
    "scale by a function of a parameter": lambda: (
        Calls(lambda m, x: x * m.s.exp(), s=torch.randn(4)),
        torch.randn(5, 6, 4),
    ),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3), torch.randn(5, 4, 8)),
    "conv1d, everything": lambda: (nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2), torch.randn(5, 4, 9)),
    "conv1d, same": lambda: (nn.Conv1d(4, 6, 4, padding="same"), torch.randn(5, 4, 8)),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3), torch.randn(5, 3, 6, 7)),
    "conv2d, everything": lambda: (nn.Conv2d(4, 6, (3, 2), (1, 2), (2, 1), (2, 1), groups=2), torch.randn(5, 4, 6, 7)),
    "conv2d, valid": lambda: (nn.Conv2d(3, 4, 3, padding="valid"), torch.randn(5, 3, 6, 7)),
    "conv2d, depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4), torch.randn(5, 4, 6, 7)),
    "conv2d, reflected": lambda: (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), torch.randn(5, 3, 6, 7)),
    "conv2d, few places": lambda: (nn.Conv2d(16, 16, 3, bias=False), torch.randn(3, 16, 3, 4)),
    "conv2d, called twice": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Conv2d(3, 3, 3, padding=1)),
        torch.randn(5, 3, 6, 7),
    ),
    "conv2d, called on two sizes": lambda: (
        Calls(lambda m, x: m.f(torch.tanh(m.f(x))), f=nn.Conv2d(3, 3, 3)),
        torch.randn(5, 3, 6, 7),
    ),
    "conv2d, several images an example": lambda: (
        Calls(lambda m, x: m.f(x.flatten(0, 1)).unflatten(0, x.shape[:2]), f=nn.Conv2d(3, 4, 3)),
        torch.randn(5, 2, 3, 6, 7),
    ),
    "convolutional network": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 2 * 2, 5),
        ),
        torch.randn(5, 3, 6, 7),
    ),
    "expanded parameter in a linear map": lambda: (
        Calls(lambda m, x: x + F.linear(m.h.expand(len(x), -1), m.w), h=torch.randn(1, 3), w=torch.randn(4, 3)),
        torch.randn(5, 4),
    ),
    "repeated parameter": lambda: (
        Calls(lambda m, x: x * m.s.repeat(len(x), 2, 1), s=torch.randn(1, 3, 4)),
        torch.randn(5, 6, 4),
    ),
    "position by expand_as": lambda: (
        Calls(lambda m, x: x + m.b.expand_as(x), b=torch.randn(6, 4)),
        torch.randn(5, 6, 4),
    ),
    "positions looked up for every example": lambda: (
        Calls(lambda m, x: x + m.e(torch.arange(6).expand(len(x), 6)), e=nn.Embedding(8, 4)),
        torch.randn(5, 6, 4),
    ),
    "positions looked up once": lambda: (
        Calls(lambda m, x: x + m.e(torch.arange(6)[None]), e=nn.Embedding(8, 4)),
        torch.randn(5, 6, 4),
    ),
    "positions from a list": lambda: (
        Calls(lambda m, x: x + m.e(torch.tensor(list(range(6)))), e=nn.Embedding(8, 4)),
        torch.randn(5, 6, 4),
    ),
    "table of relative positions": lambda: (
        Calls(lambda m, x: x + m.e(torch.arange(6)[:, None] + torch.arange(4)[None]).squeeze(2), e=nn.Embedding(12, 1)),
        torch.randn(5, 6, 4),
    ),
    "recurrence from a state that a weight makes": lambda: (
        Calls(
            lambda m, x: torch.tanh(
                m.i(x[:, 1]) + m.h(torch.tanh(m.i(x[:, 0]) + m.h(m.h.weight.new_zeros(len(x), 4))))
            ),
            i=nn.Linear(3, 4),
            h=nn.Linear(4, 4),
        ),
        torch.randn(5, 2, 3),
    ),
    "scaled in place": lambda: (
        Calls(lambda m, x: m.f(x).mul_(m.s).tanh(), f=nn.Linear(3, 4), s=torch.randn(4)),
        torch.randn(5, 6, 3),
    ),
    "one gradient for several parameters": lambda: (
        Calls(lambda m, x: F.linear(x, m.a + m.b + m.c), a=torch.randn(1, 3), b=torch.randn(1, 3), c=torch.randn(1, 3)),
        torch.randn(5, 3),
    ),
    "normalised over equal entries": lambda: (
        nn.Sequential(
            nn.Linear(3, 4),
            nn.LayerNorm(4),
            Calls(lambda m, x: x.mean(-1, keepdim=True).expand(-1, 4)),
            nn.LayerNorm(4),
        ),
        torch.randn(5, 3),
    ),
    "frozen part": lambda: (
        nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2)),
        torch.randn(5, 3),
    ),
    "long short-term memory": lambda: (
        Calls(lambda m, x: m.f(x)[0], f=nn.LSTM(3, 4, batch_first=True)),
        torch.randn(5, 6, 3),
    ),
    "attention": lambda: (
        Calls(lambda m, x: m.f(x, x, x, need_weights=False)[0], f=nn.MultiheadAttention(4, 2, batch_first=True)),
        torch.randn(5, 6, 4),
    ),
    "transformer layer": lambda: (nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), torch.randn(5, 6, 4)),
    "matrix with every example's own call": lambda: (
        Calls(lambda m, x: torch.stack([m.f(example) for example in x]), f=nn.Linear(3, 4)),
        torch.randn(5, 6, 3),
    ),
    "by fallback: images without a batch, one by one": lambda: (
        Calls(lambda m, x: torch.stack([m.f(image) for image in x]), f=nn.Conv2d(3, 4, 3)),
        torch.randn(5, 3, 5, 5),
    ),
    "one parameter in two roles": lambda: (
        Calls(lambda m, x: torch.stack([F.linear(m.a, example, m.a) for example in x]), a=torch.randn(3)),
        torch.randn(5, 3, 3),
    ),
    "by fallback: one parameter in two roles": met(lambda x, w: torch.addcmul(w, x, w)),
    "parameter minus x": met(lambda x, w: torch.rsub(x, w)),
    "divided by a parameter": met(lambda x, w: x / (2 + w.abs())),
    "parameter divided by x": met(lambda x, w: torch.div(w, 1 + x.abs())),
    "number divided by a parameter": met(lambda x, w: x * Tensor.__rtruediv__(2 + w.abs(), 1.0)),
    "where": met(lambda x, w: torch.where(x > 0, x, w)),
    "masked fill": met(lambda x, w: (x + w).masked_fill(x > 0, 0.5)),
    "masked fill by a parameter": met(lambda x, w: x.masked_fill(x > 0, w[0])),
    "joined with a parameter": met(lambda x, w: torch.cat([x, w.expand(len(x), 2, 4)], 1)),
    "stacked with a parameter": met(lambda x, w: torch.stack([x, w.expand_as(x)], 2)),
    "leaky slope of each channel": met(F.prelu, 6),
    "written into x": met(lambda x, w: written(x.clone(), (slice(None), slice(1, 3)), w)),
    "written into flat x": met(lambda x, w: written(x.reshape(-1, 4) * 1.0, (slice(None), 0), w[0])),
    "by fallback: maximum": met(torch.maximum),
    "by fallback: power": met(lambda x, w: x.abs().pow(w)),
    "by fallback: distances": met(torch.cdist, 3, 4),
    "by fallback: similarity": met(lambda x, w: F.cosine_similarity(x, w, dim=-1)),
    "by fallback: solve": met(lambda x, w: torch.linalg.solve(w + 4 * torch.eye(4, dtype=w.dtype), x.mT), 4, 4),
    "by fallback: several outputs": met(lambda x, w: torch.stack(torch.meshgrid(x[:, 0, 0], w, indexing="ij")).prod(0)),
    "by fallback: threefold product": lambda: (
        Calls(
            lambda m, x: torch.einsum("bti,ir,rj->btj", x, m.a, m.b).tanh() @ m.b.mT,
            a=torch.randn(4, 2),
            b=torch.randn(2, 3),
        ),
        torch.randn(5, 6, 4),
    ),
    "irregular: shuffled": lambda: (Calls(shuffled, f=nn.Linear(3, 3)), torch.randn(5, 2, 3)),
    "irregular: sorted by data, convolution": lambda: (
        Calls(sorted_by_data, f=nn.Conv1d(3, 3, 2)),
        torch.randn(5, 3, 6),
    ),
    "irregular: sorted positions": lambda: (
        Calls(sorted_positions, f=nn.Linear(3, 3), s=torch.randn(3), b=torch.randn(3), g=torch.randn(3)),
        torch.randn(5, 4, 3),
    ),
    "irregular: sorted tokens": lambda: (Calls(sorted_tokens, f=nn.Embedding(7, 4)), tokens(5, 6)),
    "irregular: packed": lambda: (
        Calls(packed, rnn=nn.GRU(3, 4, batch_first=True, bidirectional=True), f=nn.Linear(8, 2)),
        torch.randn(5, 6, 3),
    ),
    "irregular: two experts each": lambda: (Calls(two_experts_each, **experts()), torch.randn(5, 4, 3)),
    "irregular: one expert each": lambda: (Calls(one_expert_each, **experts()), torch.randn(5, 4, 3)),
    "irregular: sorted by expert": lambda: (
        Calls(sorted_by_expert, gate=nn.Linear(3, 3), w=torch.randn(3, 3, 3)),
        torch.randn(5, 4, 3),
    ),
    **cases_conv.CASES,
    **cases_linear.CASES,
}
