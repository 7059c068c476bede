# SPDX-License-Identifier: Apache-2.0
"""Random numbers neither hide that examples depend on each other, nor make independent ones look dependent."""

import contextlib
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parts import Calls
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import torch_privacy as tp
from torch_privacy.support.draws import Drawn, Rule, RunDraws
from torch_privacy.support.fixed_draws import drawing
from torch_privacy.support.own_draws import randint, randn

N = 40


def cross_entropy(logits, y):
    return F.cross_entropy(logits, y, reduction="none")


def trained(model, examples, collate, losses, num_steps=2):
    """Trains for a few steps, and returns the training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"expected_batch_size": 10, "num_steps": num_steps, "clipping": tp.Flat(1.0), "noise_multiplier": 1.0}
    training = tp.PrivateTraining(model, optimizer, tp.Examples(examples, collate_fn=collate), test_seed=5, **settings)
    for batch in training:
        training.step(losses(model, batch))
    return training


def assert_refused(*program):
    with pytest.raises(tp.Refused, match=r"depend on each other|cannot be separated"):
        trained(*program)


# Programs: model, examples, collate_fn, losses


def texts():
    return [(torch.randint(2, 20, (4 + k % 7 + 20 * (k % 9 == 0),)), k % 3) for k in range(N)]


def padded(items):
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def padded_left(items):
    longest = max(len(x) for x, _ in items)
    return torch.stack([F.pad(x, (longest - len(x), 0)) for x, _ in items]), torch.tensor([y for _, y in items])


def of_texts(change=lambda h, own: h, collate=padded, pool=lambda h, own: (h * own).sum(1) / own.sum(1)):
    """Returns a classifier of the mean over each text's own tokens, of which ``change`` changes the embeddings."""

    def forward(m, ids):
        own = (ids != 0)[:, :, None]
        return m.f(pool(change(m.e(ids), own), own))

    model = Calls(forward, e=nn.Embedding(20, 8), f=nn.Linear(8, 3))
    return model, texts(), collate, lambda m, b: cross_entropy(m(b[0]), b[1])


def joined(items):
    sizes = torch.tensor([len(x) for x, _, _ in items])
    edges = [e + start for (_, e, _), start in zip(items, sizes.cumsum(0) - sizes, strict=True)]
    owner = torch.arange(len(items)).repeat_interleave(sizes)
    return torch.cat([x for x, _, _ in items]), torch.cat(edges, 1), owner, torch.tensor([y for *_, y in items])


def of_graphs(nodes=lambda h: F.dropout(h, 0.2), edges=lambda e: e, whole=lambda g: g, collate=joined):
    """Returns a network of graphs joined to one, with functions that change nodes, edges and sums over graphs."""

    def forward(m, batch):
        x, e, owner, y = batch
        n = len(y)
        h, e = nodes(m.a(x).relu()), edges(e)
        h = h + torch.zeros_like(h).index_add(0, e[1], h[e[0]])
        return m.b(whole(torch.zeros(n, 8).index_add(0, owner, h)))

    sizes = [3 + k % 6 for k in range(N)]  # edges follow the nodes, as in molecules
    examples = [(torch.randn(v, 4), torch.randint(v, (2, 2 * v)), v % 3) for v in sizes]
    model = Calls(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3))
    return model, examples, collate, lambda m, b: cross_entropy(m(b), b[3])


def packed(order=None):
    """Returns a packed LSTM with dropout between its layers, and label mixup in this order."""

    def forward(m, ids):
        lengths = (ids != 0).sum(1)
        rows = pack_padded_sequence(m.e(ids), lengths, batch_first=True, enforce_sorted=False)
        return m.f(m.lstm(rows)[1][0][-1])

    def losses(m, batch):
        logits, y = m(batch[0]), batch[1]
        if order is None or not m.training:
            return cross_entropy(logits, y)
        return 0.7 * cross_entropy(logits, y) + 0.3 * cross_entropy(logits, y[order(len(y))])

    lstm = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.3)
    return Calls(forward, e=nn.Embedding(20, 4), lstm=lstm, f=nn.Linear(4, 3)), texts(), padded, losses


def masked(hide, *, is_masked, by_item=False):
    """Returns a masked language model with attention; ``hide`` draws which tokens are hidden, of all or of an item."""

    def collate(items):
        ids = pad_sequence([x for x, _ in items], batch_first=True)
        hidden = pad_sequence([hide(x) for x, _ in items], batch_first=True) if by_item else hide(ids) & (ids != 0)
        return ids.masked_fill(hidden, 1), torch.where(hidden, ids, -100), ids == 0

    def forward(m, batch):
        ids, _, padding = batch
        return m.f(m.t(m.e(ids), src_key_padding_mask=padding if is_masked else None))

    def losses(m, batch):
        y = batch[1]
        of_tokens = F.cross_entropy(m(batch).mT, y, reduction="none", ignore_index=-100)
        return of_tokens.sum(1) / (y != -100).sum(1).clamp(min=1)

    layer = nn.TransformerEncoderLayer(8, 2, 8, 0.1, batch_first=True)
    return Calls(forward, e=nn.Embedding(20, 8), t=layer, f=nn.Linear(8, 20)), texts(), collate, losses


def augmented(change, whole=lambda x: x, few=lambda x: x):
    """Returns a classifier of vectors that collate_fn changes, one by one and then as a batch."""

    def collate(items):
        return whole(torch.stack([change(x) for x, _ in items])), torch.tensor([y for _, y in items])

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, [(torch.randn(6), k % 3) for k in range(N)], collate, lambda m, b: cross_entropy(m(few(b[0])), b[1])


def as_often(x):
    """Adds noise as often as the item asks for."""
    return x + sum(torch.randn(6) for _ in range(1 + int(x[0] > 0)))


def noisy(x):
    return x + 0.1 * torch.randn(6)


def mixed(order):
    return lambda x: 0.7 * x + 0.3 * x[order(len(x))]


def specs_masked(of_own):
    def change(h, own):
        lengths = own.sum(1)[:, 0].tolist() if of_own else [h.shape[1]] * len(h)
        starts = torch.tensor([int(np.random.rand() * length) for length in lengths])[:, None]
        places = torch.arange(h.shape[1])
        return h * ((places < starts) | (places > starts + 3))[:, :, None]

    return change


def with_noise(of_own):
    """Adds noise scaled by the length: NEFTune with each text's own length, or with the padded one."""

    def change(h, own):
        length = own.sum(1, keepdim=True) if of_own else torch.tensor(h.shape[1])
        return h + torch.zeros_like(h).uniform_(-1, 1) * 5 / (8 * length).sqrt()

    return change


def dropped(h, own):
    return F.dropout(h, 0.2)


HONEST = {
    "dropout on joined nodes": lambda: of_graphs(),
    "joined nodes drawn one by one": lambda: of_graphs(lambda h: h * torch.tensor([[random.random()] for _ in h])),
    "edges left out": lambda: of_graphs(edges=lambda e: e[:, torch.rand(e.shape[1]) > 0.2]),
    "edges left out by collate_fn": lambda: of_graphs(
        collate=lambda items: joined([(noisy_nodes(x), e[:, torch.rand(e.shape[1]) > 0.1], y) for x, e, y in items])
    ),
    "packed": packed,
    "mean over the own length": lambda: of_texts(dropped),
    "padding on the left": lambda: of_texts(dropped, padded_left),
    "noise by the own length": lambda: of_texts(with_noise(True)),
    "spans of the own length": lambda: of_texts(specs_masked(True)),
    "time first": lambda: of_texts(lambda h, own: F.dropout(h.transpose(0, 1), 0.2).transpose(0, 1)),
    "tokens hidden": lambda: masked(lambda x: torch.rand(x.shape) < 0.15, is_masked=True),
    "tokens hidden item by item": lambda: masked(lambda x: torch.rand(len(x)) < 0.2, is_masked=True, by_item=True),
    "two of each text hidden": lambda: masked(two_of, is_masked=True, by_item=True),
    "noise as often as asked": lambda: augmented(as_often),
    "drawn until it fits": lambda: augmented(lambda x: x * next(r for r in iter(np.random.rand, 2) if r > 0.7)),
    "one of five": lambda: augmented(lambda x: random.choice([abs, torch.neg, torch.sin, torch.cos, noisy])(x)),
    "noise of numpy": lambda: augmented(lambda x: torch.from_numpy(np.random.normal(x.numpy(), 0.1)).to(x)),
    "layers left out": lambda: augmented(noisy, few=lambda x: x * (torch.rand(len(x), 1) < 0.8)),
    "gumbel": lambda: augmented(noisy, few=lambda x: F.gumbel_softmax(x)),
}


def noisy_nodes(x):
    return x + 0.1 * torch.randn_like(x)


def two_of(x):
    return torch.zeros(len(x)).index_fill(0, torch.tensor(random.sample(range(len(x)), 2)), 1).bool()


ORDERS = {  # functions that draw partners
    "randperm": torch.randperm,
    "randint": lambda n: torch.randint(n, (n,)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n), n),
    "sorted": lambda n: torch.rand(n).argsort(),
    "numpy": lambda n: torch.from_numpy(np.random.permutation(n)),
    "shuffle": lambda n: (numbers := [*range(n)], random.shuffle(numbers), torch.tensor(numbers))[2],
}
COUPLED = {
    "centered graphs": lambda: of_graphs(whole=lambda g: g - g.mean(0)),
    "graphs mixed with a row mask": lambda: of_graphs(
        whole=lambda g: torch.where(torch.rand(len(g), 1) < 0.5, g, g.roll(1, 0))
    ),
    "nodes of other graphs": lambda: of_graphs(lambda h: h + h[torch.rand(len(h)).argsort()]),
    "noise by all graphs": lambda: of_graphs(whole=lambda g: g + torch.randn_like(g) * g.detach().std()),
    "divided by the nodes": lambda: of_graphs(lambda h: F.dropout(h, 0.2) * 10 / len(h)),
    "divided by the batch": lambda: augmented(as_often, few=lambda x: F.dropout(x, 0.1) * 9 / len(x)),
    "noise by the padded length": lambda: of_texts(with_noise(False)),
    "spans of the padded length": lambda: of_texts(specs_masked(False)),
    "mean over padding": lambda: of_texts(dropped, pool=lambda h, own: h.mean(1)),
    "mean over padding on the left": lambda: of_texts(dropped, padded_left, pool=lambda h, own: h.mean(1)),
    "tokens hidden": lambda: masked(lambda x: torch.rand(x.shape) < 0.15, is_masked=False),
    "two of each text hidden": lambda: masked(two_of, is_masked=False, by_item=True),
    "centered by collate_fn": lambda: augmented(as_often, lambda x: x - x.mean(0)),
    **{f"packed, {name}": lambda order=order: packed(order) for name, order in ORDERS.items()},
    **{f"graphs, {name}": lambda order=order: of_graphs(whole=mixed(order)) for name, order in ORDERS.items()},
    **{f"collate_fn, {name}": lambda order=order: augmented(noisy, mixed(order)) for name, order in ORDERS.items()},
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("name", HONEST)
def test_independent_examples_with_random_numbers_train(name):
    training = trained(*HONEST[name]())
    assert training.step_count == 2
    assert training.statement()["independence"]["not_compared"] == []


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", COUPLED)
def test_examples_that_depend_on_each_other_under_random_numbers_are_refused(name):
    assert_refused(*COUPLED[name]())


@pytest.mark.thorough
@pytest.mark.parametrize("late", [0.0, 0.3], ids=["independent", "coupled from step 4 on"])
def test_later_rehearsals_are_short_where_the_data_decide_how_many_numbers_are_drawn(late):
    model, examples, collate, losses = packed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"clipping": tp.Flat(1.0), "noise_multiplier": 1.0, "test_seed": 5, "num_steps": 18}
    training = tp.PrivateTraining(
        model, optimizer, tp.Examples(examples, collate_fn=collate), expected_batch_size=10, **settings
    )
    turns = Counter()
    with pytest.raises(tp.Refused, match="depend on each other") if late else contextlib.nullcontext():
        for batch in training:
            turns[training.step_count] += 1
            each = losses(model, batch)
            training.step(each * (1 + (late if training.step_count >= 4 else 1e-20) * each.detach().mean()))
    assert training.step_count == (4 if late else 18)
    assert late or min(turns[step] for step in (4, 8, 16)) <= 5


def test_a_generator_that_cannot_be_replaced_is_named_in_the_statement():
    draw = random.random  # the function itself, as from `from random import random`
    program = of_texts(lambda h, own: h * torch.tensor([draw() for _ in h])[:, None, None])
    (note,) = trained(*program).statement()["independence"]["not_compared"]
    assert "cannot be replaced" in note


# The numbers themselves


DRAWS = {
    "uniform": lambda n: torch.rand(n, 5),
    "normal": lambda n: torch.randn(n, 5),
    "in place": lambda n: torch.empty(n, 5).exponential_(),
    "true or false": lambda n: torch.bernoulli(torch.full((n, 5), 0.3)),
    "whole numbers": lambda n: torch.randint(3, 99, (n, 5)),
    "gamma": lambda n: torch._standard_gamma(torch.ones(n, 5)),
    "beta": lambda n: torch.distributions.Beta(0.4, 0.4).sample((n, 5)),
    "categories": lambda n: torch.multinomial(torch.ones(n, 9), 4),
    "dropout": lambda n: F.dropout(torch.ones(n, 5), 0.3),
    "numpy": lambda n: torch.from_numpy(np.random.randn(n, 5)),
    "in each of 3 heads": lambda n: torch.rand(n, 3, 5),  # the part has as many examples
}


@pytest.mark.parametrize("name", DRAWS)
def test_all_examples_get_the_same_numbers_by_place_whatever_the_batch(name):
    draws, found = RunDraws(Rule.BY_PLACE, 7), []
    for n in (6, 3):
        with drawing(draws, n):
            found.append(DRAWS[name](n))
    torch.testing.assert_close(found[0][:3], found[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][0], found[0][5], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("from_end", [False, True])
def test_padding_does_not_move_the_numbers_of_a_place(from_end):
    found = []
    for length in (9, 4):
        with drawing(RunDraws(Rule.BY_PLACE, 7, from_end=from_end), 3):
            found.append(torch.rand(3, length))
    kept = found[0][:, -4:] if from_end else found[0][:, :4]
    torch.testing.assert_close(kept, found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [2, 3, 10])
def test_a_permutation_moves_everything(length):
    with drawing(RunDraws(Rule.BY_PLACE, 7), 3):
        order = torch.randperm(length)
    assert not (order == torch.arange(length)).any()
    assert torch.equal(order.sort().values, torch.arange(length))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.1),
        lambda x: torch.bernoulli(0.9 * x),
        lambda x: torch.randint(1000, x.shape),
        lambda x: torch.poisson(100 * x),
        lambda x: torch.multinomial(x[:, :, 0], 200, replacement=True),
    ],
    ids=["dropout", "bernoulli", "randint", "poisson", "multinomial"],
)
def test_whole_numbers_of_an_example_do_not_depend_on_its_place_in_the_batch(draw):
    """Those near a threshold did: a batch without some examples then had other masks, and was refused."""
    for key in range(20):
        with drawing(RunDraws(Rule.BY_PLACE, key), 6):
            found = draw(torch.ones(6, 200, 100, dtype=torch.float32))
        assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize("draw", [lambda g: randn(9, generator=g), lambda g: randint(99, (9,), generator=g)])
def test_numbers_of_ours_are_not_replaced(draw):
    """The direction of a fingerprint was one number for all entries if it was made at a level."""
    expected = draw(torch.Generator().manual_seed(3))
    with drawing(RunDraws(Rule.AT_LEVEL, 7, level=0.3), 4):
        assert torch.equal(draw(torch.Generator().manual_seed(3)), expected)


@pytest.mark.parametrize("level", [0.02, 0.5, 0.98])
def test_single_numbers_are_at_the_level(level):
    with drawing(RunDraws(Rule.AT_LEVEL, 7, level), 3):
        torch_numbers = [float(torch.rand(())) for _ in range(3)]
        others = [random.random(), random.uniform(0, 1), np.random.rand(), np.random.uniform()]
    assert torch_numbers == pytest.approx([level] * 3, abs=1e-2)
    assert others == pytest.approx([1 - level] * 4, abs=0.03)


@pytest.mark.parametrize("rule", [Rule.BY_PLACE, Rule.AT_LEVEL])
def test_the_generators_do_not_advance_and_their_functions_come_back(rule):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = random.random, np.random.rand
    with drawing(RunDraws(rule, 7), 3):
        assert (random.random, np.random.rand) != before
        torch.rand(3), np.random.randn(3), random.gauss(0, 1), torch.randperm(4), random.sample(range(9), 3)
    assert (random.random, np.random.rand) == before
    found = torch.rand(()).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert found == (torch.rand(()).item(), np.random.rand(), random.random())


@pytest.mark.parametrize("rule", [Rule.BY_PLACE, Rule.FEW_AS_DRAWN])
def test_draws_from_states_that_were_set_back_are_made_again(rule):
    """As in a part under activation checkpointing, which runs again in the backward."""
    with drawing(RunDraws(rule, 7), 3):
        torch.rand(3, 4)
        state = torch.get_rng_state()
        first = [torch.rand(3, 4), torch.rand(3), F.dropout(torch.ones(3, 5), 0.5)]
        later = torch.rand(3, 4)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        again = [torch.rand(3, 4), torch.rand(3), F.dropout(torch.ones(3, 5), 0.5)]
        torch.set_rng_state(after)
        new = torch.rand(3, 4)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not any(torch.equal(new, known) for known in (first[0], later))


@pytest.mark.thorough
@pytest.mark.parametrize("draw", [lambda: torch.rand(()), lambda: np.random.rand(), lambda: random.random()])
def test_a_loop_that_waits_for_a_number_ends(draw):
    with drawing(RunDraws(Rule.AT_LEVEL, 7, 0.5), 3):
        while not 0.8 < draw() < 0.9:
            pass


def test_what_is_drawn_one_by_one_is_counted():
    drawn = Drawn(3)
    for shape in ((), (3,), (3, 1)):
        drawn.note(shape)
    assert drawn.has_many
    assert not drawn.unaligned
    drawn.note((3, 2))
    drawn.note((7, 2))
    drawn.note((5, 3, 2))
    assert drawn.unaligned == 2
