# SPDX-License-Identifier: Apache-2.0
"""Tests, on a device that pretends to be a GPU, what a GPU would find: see ``pretended_gpu.py`` and docs/gpu.md."""

import copy
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import length, rows_of_one_graph
from pretended_gpu import NAME, HostWaits, MixedDevices, PretendedTensor, register, watched
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from trainings import RULES, private_training

import torch_privacy as tp
from torch_privacy.jacobian.recording.functions import looks_up_examples
from torch_privacy.jacobian.rows.plan import MemoryBudget
from torch_privacy.mechanisms.noise import Noise, gaussian, grid_unit
from torch_privacy.mechanisms.noise.chacha import ROUNDING, DeviceNormals, normals, normals_of
from torch_privacy.mechanisms.noise.processor import Keystream, ProcessorNormals
from torch_privacy.model_check.rehearsal.comparison import AnswerComparison
from torch_privacy.ops import dense, gram
from torch_privacy.support.random_state import RandomState, SeededRandomNumbers, torch_generators
from torch_privacy.support.torch_modes import full_precision
from torch_privacy.training import release
from torch_privacy.training.release import COLUMNS, Condenser
from torch_privacy.training.weights import WeightGuard, WeightMarks

register()
GPU = torch.device(NAME)


@pytest.fixture(autouse=True)
def noise_of_the_cpu(request, monkeypatch):
    """Makes the noise of all devices that of the CPU, so that their weights can be compared."""
    if not request.node.name.startswith("test_noise"):
        monkeypatch.setattr(gaussian, "has_generator", lambda tensor: False)


CLASSES = 3


class Tokens(nn.Module):
    """A small transformer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.table(x)).mean(1))


class Sequences(nn.Module):
    """An LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


NETWORKS = {  # name -> (network, shape of an example; None for tokens)
    "mlp": (mlp, (4,)),
    "mlp with positions": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES), Mean()), (9, 4)),
    "cnn": (cnn, (1, 6, 6)),
    "lstm": (Sequences, (5, 4)),
    "transformer": (Tokens, None),
}


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def examples(name, n=60, seed=3):
    shape, generator = NETWORKS[name][1], torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator, device="cpu")
    if shape is None:
        return torch.randint(11, (n, 7), generator=generator, device="cpu"), y
    return torch.randn(n, *shape, generator=generator, device="cpu"), y


def gep(name):
    """Returns few directions: more than the anchors' gradients have would be those of rounding, in any order."""
    public = examples(name, n=30, seed=8)[0]
    return tp.GEP(tp.AnchorSubspace(public, num_basis=3), tp.Flat(0.5), tp.Flat(0.5))


SKETCHES = {
    "sketched": tp.Sketched(16, clip_norm=0.5),
}


def training_on(device, name="mlp", model=None, data=None, num_steps=4, **settings):
    torch.manual_seed(1)
    model = (NETWORKS[name][0]() if model is None else model).to(device)
    if settings.pop("gep", False):
        settings["clipping"] = gep(name)
    settings = {"clipping": tp.Flat(0.5)} | settings
    of_examples = {"assume_independent": "rehearsals have tests of their own"} | settings.pop("examples", {})
    return private_training(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        data if isinstance(data, Dataset) else TensorDataset(*(data or examples(name))),
        expected_batch_size=20,
        num_steps=num_steps,
        noise_multiplier=1.0,
        delta=1e-3,
        test_seed=5,
        examples=of_examples,
        **settings,
    )


def steps_of(training, device):
    """Makes the steps; yields the number of each step made."""
    for batch in training:
        x, y = (t.to(device, non_blocking=True) for t in batch)  # a wait of the loop would count as the recorder's
        if training.step(F.cross_entropy(training.model(x), y, reduction="none")):
            yield training.step_count


def trained(device, *args, **settings):
    training = training_on(device, *args, **settings)
    for _ in steps_of(training, device):
        pass
    return torch.cat([p.detach().cpu().flatten() for p in training.model.parameters()])


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# Training is the same as on the CPU


@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_a_gpu_is_that_on_the_cpu(name):
    rehearsed = {"num_steps": 2, "examples": {"assume_independent": None}}
    assert_close(trained(GPU, name, **rehearsed), trained("cpu", name, **rehearsed))


@pytest.mark.parametrize("rule", RULES)
def test_training_on_a_gpu_is_that_on_the_cpu_for_each_rule(rule):
    clipping = RULES[rule][0]
    assert_close(trained(GPU, clipping=clipping), trained("cpu", clipping=clipping))


@pytest.mark.parametrize("sketch", SKETCHES)
def test_training_on_a_gpu_is_that_on_the_cpu_with_estimated_norms(sketch):
    settings = {"name": "mlp with positions", "clipping": SKETCHES[sketch]}
    torch.testing.assert_close(trained(GPU, **settings), trained("cpu", **settings), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_training_on_a_gpu_is_that_on_the_cpu_with_embedded_gradients(name):
    assert_close(trained(GPU, name, gep=True), trained("cpu", name, gep=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"performance": tp.Performance(microbatch_size=7)},
        {"examples": {"views": 2}},
        {"performance": tp.Performance(memory_budget=2**10)},
    ],
    ids=str,
)
def test_training_on_a_gpu_is_that_on_the_cpu_with_parts_views_and_little_memory(settings):
    def run(device):
        training = training_on(device, "mlp with positions", **settings)
        for x, y in training:
            losses = F.cross_entropy(training.model(x.to(device)), y.to(device), reduction="none")
            training.step(losses.view(-1, 2) if "examples" in settings else losses)
        return torch.cat([p.detach().cpu().flatten() for p in training.model.parameters()])

    assert_close(run(GPU), run("cpu"))


@pytest.mark.parametrize(
    "clipping", [tp.Flat(0.5), tp.PerLayer(0.5), tp.Adaptive(0.5, count_noise_stddev=4.0)], ids=str
)
@pytest.mark.parametrize("settings", [{}, {"gep": True}, {"clipping": tp.Sketched(16, clip_norm=0.5)}], ids=str)
def test_an_example_with_a_loss_that_is_not_finite_is_left_out_on_a_gpu(clipping, settings):
    if settings and not isinstance(clipping, tp.Flat):
        settings = {}
    x, y = examples("mlp")
    x[::7] = torch.inf

    def run(device):
        training = training_on(device, data=(x, y), **{"clipping": clipping} | settings)
        for _ in steps_of(training, device):
            pass
        weights = torch.cat([p.detach().cpu().flatten() for p in training.model.parameters()])
        return weights, training.num_non_finite

    if isinstance(settings.get("clipping"), tp.Sketched):  # one backward for all examples: none can be left out
        with pytest.raises(tp.Refused, match="not finite"):
            run(GPU)
        return
    (ours, left_out), (theirs, expected) = run(GPU), run("cpu")
    assert left_out == expected > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_norms_from_inaccurate_gram_matrices_are_computed_again_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gram, "GRAM_TOLERANCE", 1e-20)
    monkeypatch.setattr("torch_privacy.ops.linear.Linear.methods", only_gram)
    assert_close(trained(GPU, "mlp with positions"), trained("cpu", "mlp with positions"))
    model, (x, y) = NETWORKS["mlp with positions"][0]().to(GPU), examples("mlp with positions", 5)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x.to(GPU)), y.to(GPU), reduction="none")
    rows = rows_of_one_graph(losses, model).cpu()
    jacobian = tape.jacobian(losses)
    assert jacobian.squared_norms(final=False).isnan().all()
    torch.testing.assert_close(jacobian.squared_norms().cpu(), rows.square().sum(1))


@pytest.mark.parametrize("stacked", [2**24, 0])
@pytest.mark.parametrize("k", [100, 300, 601, 1024, 4000, 10_007])
def test_long_products_are_as_exact_on_a_gpu_in_few_launches(k, stacked, monkeypatch):
    monkeypatch.setattr(dense, "STACKED", stacked)
    a, b = torch.rand(3, 5, k, dtype=torch.float32), torch.rand(3, 4, k, dtype=torch.float32).mT
    found, exact = dense.product(a.to(GPU), b.to(GPU)).cpu(), a.double() @ b.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    lengths = dense.squared_lengths(a[0].repeat(1, 30).to(GPU)).cpu().double()
    torch.testing.assert_close(lengths, 30 * a[0].double().square().sum(1), rtol=1e-5, atol=0)


def only_gram(op):
    return [method for method in ALL_METHODS(op) if method.name in ("gram", "outer product")]


ALL_METHODS = tp.ops.linear.Linear.methods


# The host waits


WAITS = {  # name -> (settings, places at which a settled step waits, besides noise and the loop itself)
    **{name: (name, {}, {"mechanisms/sums.py": 1, "training/release.py": 1}) for name in NETWORKS},
    "adaptive": (
        "mlp",
        {"clipping": tp.Adaptive(0.5, count_noise_stddev=4.0)},
        {"mechanisms/sums.py": 1, "training/release.py": 1},
    ),
    "per layer": ("mlp", {"clipping": tp.PerLayer(0.5)}, {"mechanisms/sums.py": 2, "training/release.py": 1}),
    "microbatches": (
        "mlp",
        {"performance": tp.Performance(microbatch_size=100)},
        {"mechanisms/sums.py": 1, "training/release.py": 1},
    ),
    "sketched": (
        "mlp",
        {"clipping": tp.Sketched(16, clip_norm=0.5)},
        {"mechanisms/estimated_norms/mechanism.py": 1, "training/release.py": 1},
    ),
    "gep": (
        "cnn",
        {"gep": True},
        {"mechanisms/gep/mechanism.py": 1, "mechanisms/gep/orthonormal.py": 2, "training/release.py": 1},
    ),
}


@pytest.fixture
def without_spot_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after the first two are settled: nothing is measured or rehearsed again."""
    monkeypatch.setattr("torch_privacy.jacobian.layouts.known.SPOT_CHECK", 2**40)


@pytest.mark.parametrize("case", WAITS)
@pytest.mark.usefixtures("without_spot_checks")
def test_a_settled_step_waits_for_the_gpu_twice(case):
    name, settings, expected = WAITS[case]
    training = training_on(GPU, name, num_steps=6, **settings)
    steps, found = steps_of(training, GPU), []
    while True:
        with watched() as log:
            step = next(steps, None)
        if step is None:
            break
        places = Counter[str]()
        for (_, _, place), count in log.library_waits.items():
            places[place.partition(":")[0]] += count if not place.startswith("mechanisms/noise") else 0
        found.append({place: count for place, count in places.items() if count})
    assert found[-1] == found[-2] == expected


def test_norms_and_sums_on_a_gpu_add_in_a_fixed_order():
    with watched() as log:
        trained(GPU, "transformer", clipping=tp.PerLayer(0.5))
    assert log.ops["index_put_"]
    assert not [op for op in log.ops if op.startswith(("index_add", "scatter_add"))]


# What a GPU computes with 10 bits


@pytest.fixture
def coarse_products() -> Iterator[None]:
    """Sets what torch sets by default for convolutions, and a user for matrix products."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = "tf32"
    torch.set_default_dtype(torch.float32)
    yield
    matmul.fp32_precision, conv.fp32_precision = before


@pytest.mark.parametrize("name", ["mlp with positions", "cnn", "transformer"])
@pytest.mark.parametrize("twice", [False, True], ids=["one backward", "two backwards"])
@pytest.mark.usefixtures("coarse_products")
def test_no_clipped_gradient_exceeds_the_clip_norm_where_a_gpu_multiplies_coarsely(name, twice, monkeypatch):
    if twice:
        monkeypatch.setattr(MemoryBudget, "wants_second_backward", True)
    model, (x, _), clip_norm = NETWORKS[name][0]().to(GPU), examples(name, 8), 1e-3

    def clip(jacobian, group):
        return jacobian.weighted_sum((clip_norm / jacobian.squared_norms().sqrt()).clamp(max=1))

    for i in range(len(x)):
        with tp.record(model) as tape:
            losses = model(x[i : i + 1].to(GPU)).square().sum(1)
        total = tape.clipped_sum(losses, {"all": list(tape.parameters)}, clip, memory_budget=1e-9 if twice else 1.2)
        assert length({key: part.cpu() for key, part in total.items()}) <= clip_norm * (1 + 1e-6)
        assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.usefixtures("coarse_products")
def test_the_self_check_allows_for_native_gradients_that_a_gpu_multiplies_coarsely():
    model, x = nn.Linear(64, CLASSES).to(GPU), torch.full((6, 64), 1 + 2.0**-11, device=GPU)  # half between two numbers
    with tp.record(model) as tape:
        losses = model(x).square().sum(1)
    sums = tape.clipped_sum(
        losses, {"all": ["weight", "bias"]}, lambda rows, _: rows.weighted_sum(rows.squared_norms())
    )
    assert tape.measured
    assert sums.keys() == {"weight", "bias"}


@pytest.mark.usefixtures("coarse_products")
def test_answers_of_a_jacobian_are_precise_where_a_gpu_multiplies_coarsely():
    model, (x, y) = NETWORKS["mlp with positions"][0]().to(GPU), examples("mlp with positions", 5)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x.to(GPU)), y.to(GPU), reduction="none")
    jacobian = tape.jacobian(losses)
    rows = torch.cat([part.flatten(1) for part in jacobian.rows().values()], 1).cpu().double()
    torch.testing.assert_close(jacobian.squared_norms().cpu().double(), rows.square().sum(1), rtol=1e-6, atol=0)
    total = torch.cat([part.flatten() for part in jacobian.weighted_sum(torch.ones(5, device=GPU)).values()]).cpu()
    torch.testing.assert_close(total.double(), rows.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "loosened"), [("mlp with positions", False), ("cnn", True)])
def test_rehearsals_allow_for_products_that_a_gpu_multiplies_coarsely(name, loosened, monkeypatch):
    """By torch's defaults these are convolutions: with few rows a GPU takes other products, in full precision."""
    torch.set_default_dtype(torch.float32)
    found, compare = set(), AnswerComparison.compare

    def watched(self, *args, **options):
        found.add(self.rounding)
        return compare(self, *args, **options)

    monkeypatch.setattr(AnswerComparison, "compare", watched)
    trained(GPU, name, num_steps=1, examples={"assume_independent": None})
    assert (max(found) == 2.0**-10) is loosened


def test_settings_of_precision_are_restored_after_an_exception_and_by_the_last_of_two():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    with full_precision(GPU):
        with pytest.raises(KeyError), full_precision(GPU):
            raise KeyError
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
    assert (matmul.fp32_precision, conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == before
    torch.backends.fp32_precision = "tf32"
    try:
        with full_precision(GPU):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
    assert matmul.fp32_precision == before[0]  # it still follows the general one


# Default devices


@pytest.fixture(params=[NAME, "meta"])
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets a default device: a GPU, and one on which every tensor of the library would be without numbers."""
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)


DEFAULTS = {
    "flat": {},
    "per layer": {"clipping": tp.PerLayer(0.5)},
    "micro-batches": {"clipping": tp.MicroBatches(0.5, 4)},
    "banded": {"correlation": tp.Banded(2)},
    "adaptive": {"clipping": tp.Adaptive(0.5, count_noise_stddev=4.0)},
    "microbatches": {"performance": tp.Performance(microbatch_size=6)},
    "gep": {"gep": True},
    **{name: {"clipping": sketch} for name, sketch in SKETCHES.items()},
}


@pytest.mark.parametrize("case", DEFAULTS)
def test_training_under_a_default_device(case, default_device):
    with torch.device("cpu"):
        model = mlp()
    settings = {"num_steps": 2, "examples": {"assume_independent": None if case == "flat" else "tested"}} | DEFAULTS[
        case
    ]
    training = training_on(GPU, model=model, **settings)
    assert list(steps_of(training, GPU)) == [1, 2]


@pytest.mark.parametrize("name", NETWORKS)
def test_jacobians_under_a_default_device(name, default_device):
    with torch.device("cpu"):
        model, (x, y) = NETWORKS[name][0](), examples(name, 6)
    x, y = x.to(GPU), y.to(GPU)
    model = model.to(GPU)
    with tp.record(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none")
    norms = tape.jacobian(losses, retain_graph=True, verify=True).squared_norms()
    rows = rows_of_one_graph(losses, model)
    torch.testing.assert_close(norms, rows.square().sum(1))


def test_checks_under_a_default_device(default_device):
    with torch.device("cpu"):
        model, (x, y) = mlp(), examples("mlp", 8)
    model = model.to(GPU)

    def losses_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert tp.check(model, losses_of, (x.to(GPU), y.to(GPU))).ok


AUDITED = {
    "gradient canaries": lambda: (tp.GradientCanaries(15), {}),
    "record canaries": lambda: (TensorDataset(*examples("mlp", 6, seed=9)), {}),
    "embedded gradients": lambda: (TensorDataset(*examples("mlp", 6, seed=9)), {"gep": True}),
}


@pytest.mark.parametrize("case", AUDITED)
def test_audits_under_a_default_device(case, default_device):
    canaries, settings = AUDITED[case]()
    with torch.device("cpu"):
        model = mlp()

    def train(data):
        training = training_on(GPU, model=model, data=data, num_steps=2, **settings)
        assert list(steps_of(training, GPU)) == [1, 2]
        return training

    tp.audit(train, TensorDataset(*examples("mlp")), canaries, test_seed=1)


# Models over two devices


class TwoDevices(nn.Module):
    """A pipeline by hand: two layers here, one there."""

    def __init__(self, here, there, *, positions=False):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh())
        self.last = nn.Linear(5, CLASSES)
        self.devices, self.positions = (here, there), positions

    def placed(self):
        self.first.to(self.devices[0])
        self.last.to(self.devices[1])
        return self

    def forward(self, x):
        y = self.last(self.first(x.to(self.devices[0])).to(self.devices[1]))
        return y.mean(1) if self.positions else y


TWO = {
    "flat": {"examples": {"assume_independent": None}},
    "positions": {"positions": True},
    "per layer": {"clipping": tp.PerLayer(0.5)},
    "micro-batches": {"clipping": tp.MicroBatches(0.5, 4)},
    "banded": {"correlation": tp.Banded(2)},
    "adaptive": {"clipping": tp.Adaptive(0.5, count_noise_stddev=4.0)},
    "gep": {"gep": True},
    "sketched": {"clipping": SKETCHES["sketched"]},
}


@pytest.mark.parametrize("case", TWO)
@pytest.mark.parametrize("devices", [("cpu", NAME), (NAME, "cpu")], ids=" then ".join)
def test_a_model_over_two_devices_trains_as_on_one(case, devices):
    settings = dict(TWO[case])
    positions = settings.pop("positions", False)

    def run(here, there):
        torch.manual_seed(2)
        model = TwoDevices(here, there, positions=positions).placed()
        settings_here = {"num_steps": 3} | settings
        settings_here |= {"clipping": gep("mlp")} if settings_here.pop("gep", False) else {}
        data = examples("mlp with positions" if positions else "mlp")
        model.to = lambda device: model  # pyright: ignore[reportAttributeAccessIssue]
        training = training_on("cpu", model=model, data=data, **settings_here)
        for x, y in training:
            training.step(F.cross_entropy(model(x), y.to(there), reduction="none"))
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])

    torch.testing.assert_close(run(*devices), run("cpu", "cpu"), rtol=1e-6, atol=1e-7)


# Random numbers, and steps that are repeated


def test_a_seed_sets_the_random_numbers_of_the_gpu_and_restores_them():
    before = RandomState()
    drawn = []
    for _ in range(2):
        numbers = SeededRandomNumbers(b"secret")
        drawn.append(torch.rand(4, device=GPU))
        numbers.close()
        assert RandomState() == before
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], torch.rand(4, device=GPU))
    assert RandomState() != before
    assert len(torch_generators()) == 2


def with_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, CLASSES))


def test_a_resumed_training_repeats_its_dropout_on_a_gpu():
    training = training_on(GPU, model=with_dropout(), num_steps=5, examples={"assume_independent": None})
    steps = steps_of(training, GPU)
    next(steps)
    next(steps)
    state, weights = training.state_dict(), copy.deepcopy(training.model.state_dict())
    next(steps)
    after = [p.detach().cpu().clone() for p in training.model.parameters()]
    records = len(training.ledger)
    steps.close()
    torch.rand(7, device=GPU)
    again = training_on(GPU, model=with_dropout(), num_steps=5, examples={"assume_independent": None})
    again.model.load_state_dict(weights)
    again.load_state_dict(state | {"ledger": training.ledger.state_dict()})
    next(steps_of(again, GPU))
    assert len(again.ledger) == records
    assert all(torch.equal(p.detach().cpu(), q) for p, q in zip(again.model.parameters(), after, strict=True))


def test_a_weight_moved_by_other_code_is_seen_late_on_a_gpu():
    training = training_on(GPU, num_steps=5)
    for step in steps_of(training, GPU):
        if step == 2:
            with torch.no_grad():
                training.model[2].bias.add_(1.0)
    assert "step 2, in '2.bias'" in training.state_dict()["moved_otherwise"]


def test_a_weight_moved_by_other_code_is_seen_if_an_update_replaces_the_weights():
    weights = {"w": nn.Parameter(torch.zeros(3, device=GPU))}
    guard = WeightGuard(lambda: weights, torch.optim.SGD(weights.values(), lr=0.1))
    guard.activate()
    with torch.no_grad():
        weights["w"].add_(1.0)
    guard.look(weights, 3)
    with pytest.warns(UserWarning, match="step 3, in 'w'"):
        guard.update(weights, 3, lambda: weights.update(w=nn.Parameter(torch.ones(3, device=GPU))))
    guard.deactivate()
    assert "step 3" in guard.seen_otherwise


def test_expanded_positions_are_known_without_a_wait():
    ids = torch.arange(4, device=GPU)
    with watched(refuses=True):
        assert looks_up_examples(F.embedding, (ids.expand(3, 4),))
    assert looks_up_examples(F.embedding, (ids.repeat(3, 1),))
    assert not looks_up_examples(F.embedding, (torch.stack([ids, ids + 1]),))


def test_the_first_move_of_weights_of_several_types_is_named():
    names = {"single": torch.float32, "double": torch.float64, "half": torch.float16}
    weights = {name: torch.zeros(3, dtype=dtype, device=GPU) for name, dtype in names.items()}
    marks = WeightMarks(weights)
    for step, moved in enumerate([[], ["half", "single"], ["double"], []]):
        for name in moved:
            weights[name].add_(1)
        marks.look(step)
    assert marks.seen_late() == (1, ["single", "half"])
    marks.look(4)
    assert marks.seen_late() == (-1, [])


# The device itself


def test_tensors_of_two_devices_do_not_meet():
    x = torch.randn(3, device=GPU)
    with pytest.raises(MixedDevices, match="add of"):
        x + torch.randn(3, device="cpu")
    with pytest.raises(MixedDevices):
        torch.randn(3, device=GPU, generator=torch.Generator())
    assert isinstance(x * torch.tensor(2.0, device="cpu"), PretendedTensor)  # a number may come from the CPU


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0, 2], device="cpu")],
        lambda x: torch.ones(3, device="cpu").to(GPU),
        lambda x: bool((x > 0).all()),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_makes_the_host_wait_is_counted(wait):
    x = torch.randn(3, device=GPU)
    with watched() as log:
        wait(x)
    assert sum(log.waits.values()) == 1
    with watched(refuses=True), pytest.raises(HostWaits):
        wait(x)
    with watched(refuses=True):
        torch.where(x > 0, x, 0).index_copy(0, torch.arange(2, device=GPU), x[:2]) @ x


def test_backwards_run_in_a_thread_of_the_device():
    x = torch.randn(3, device=GPU, requires_grad=True)
    with watched() as log:
        x.square().sum().backward()
    assert len(log.threads) == 2


def test_the_cells_that_torch_has_for_gpus_only_are_those_of_the_cpu():
    for kind in (nn.LSTM, nn.GRU):
        layer, x = kind(3, 4, num_layers=2), torch.randn(5, 2, 3)
        there = copy.deepcopy(layer).to(GPU)
        grads = [
            torch.autograd.grad(net(inputs)[0].square().sum(), list(net.parameters()))
            for net, inputs in ((layer, x), (there, x.to(GPU)))
        ]
        assert_close([g.cpu() for g in grads[1]], list(grads[0]))


def test_noise_of_a_gpu_is_made_there_and_is_that_of_the_same_stream_on_the_cpu():
    noise, sums = Noise(bytes(range(32))), {"a": torch.randn(7, 5), "b": torch.randn(3)}
    there = {name: total.to(GPU) for name, total in sums.items()}
    with watched() as log:
        noise.add_to(3, there, 0.5)
    assert not log.waits
    DeviceNormals(noise.key).add(3, [(sums["a"], 0, 0.5), (sums["b"], 35, 0.5)])
    for name, total in sums.items():
        torch.testing.assert_close(there[name].cpu(), total, rtol=0, atol=2 * grid_unit(0.5))
    assert gaussian.generators([torch.empty(gaussian.FEW_NUMBERS + 1, device=GPU)]) == DeviceNormals.name


def test_the_numbers_of_the_noise_are_one_kernel_on_a_card():
    """The default device is the one under test: the CPU, the pretended device, or a card."""
    device = torch.empty(0).device
    found, asked = normals_of(device), (bytes(range(32)), 5, 2**32 - 3, 1000)
    assert (found is normals) == (device.type != "cuda")
    expected = normals(*asked, torch.device("cpu"))
    torch.testing.assert_close(found(*asked, device).cpu(), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("most", [0, gaussian.FEW_NUMBERS])
def test_noise_of_small_sums_is_that_of_the_cpu(most, monkeypatch):
    monkeypatch.setattr(gaussian, "FEW_NUMBERS", most)
    found, waits = [], []
    for device in ("cpu", GPU):
        training = training_on(device, num_steps=8)
        with watched() as log:
            for step in steps_of(training, device):
                if step == 6:
                    log.waits.clear()
                if step == 7:
                    waits.append(sum(n for (_, _, place), n in log.library_waits.items() if "release.py" in place))
                    break
        found.append(torch.cat([p.detach().cpu().flatten() for p in training.model.parameters()]))
        expected = DeviceNormals.name if device == GPU and not most else ProcessorNormals.name
        assert training.state_dict()["machine"]["generator"] == expected
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5) == bool(most)
    assert waits == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [COLUMNS - 1, COLUMNS, 3 * COLUMNS + 1])
def test_condensed_tensors_are_the_keyed_sums_of_their_bits(size, dtype, monkeypatch):
    monkeypatch.setattr(release, "AT_ONCE", 2 * COLUMNS)  # two chunks and more, which begin within a tensor
    tensors = [torch.randn(n, dtype=torch.float64).mul(100).to(dtype) for n in (5, size)]
    condense = Condenser(bytes(range(32)))
    found = condense([tensor.to(GPU) for tensor in tensors]).cpu().numpy().tobytes()
    bits = {1: np.uint8, 2: np.int16}.get(tensors[0].itemsize, np.int32)
    words = np.concatenate([np.frombuffer(t.view(torch.uint8).numpy().tobytes(), bits) for t in tensors]).astype("<i4")
    keys = np.frombuffer(Keystream(bytes(range(32))).words(0, 0, 2 * COLUMNS, bytearray(2**17 + 32)), "<i8")
    expected = b""
    for row in np.split(words, range(COLUMNS, len(words), COLUMNS)):
        if len(row) == COLUMNS:
            sums = [sum(map(int.__mul__, row.tolist(), of_row)) % 2**64 for of_row in keys.reshape(2, -1).tolist()]
            expected += b"".join(one.to_bytes(8, "little") for one in sums)
        else:
            expected += row.tobytes()
    assert found == expected


def test_fingerprints_of_large_sums_depend_on_each_bit_and_little_is_copied(monkeypatch):
    releases = training_on(GPU)._state.releases
    there = torch.randn(release.COPIED // 4 + COLUMNS // 2, device=GPU)
    read, bytes_of = [], release._bytes_of
    monkeypatch.setattr(release, "_bytes_of", lambda tensor: read.append(tensor.nbytes) or bytes_of(tensor))
    before = releases.tag(3, [there])
    assert releases.tag(3, [there.clone()]) == before != releases.tag(4, [there])
    for place in (0, COLUMNS, len(there) - 1):  # also one of those after the last whole row
        other = there.cpu()
        other.view(torch.int32)[place] ^= 1 << 31
        assert releases.tag(3, [other.to(GPU)]) != before
    assert max(read) < 2**15 < release.COPIED < there.nbytes
