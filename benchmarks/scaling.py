# SPDX-License-Identifier: Apache-2.0
"""Computes what a private step should send, take and hold on 8 to 1,024 GPUs. A MODEL: nothing here is measured.

    python benchmarks/scaling.py docs/scaling.svg                   # prints the tables of docs/scaling.md, and draws
    python benchmarks/scaling.py --tokens 65536 --gb-per-s 20       # another machine, tables only

Beside the library's schedule stand ordinary training with FSDP2, FSDP2's own schedule with one private backward, two
backwards (ghost clipping), and noise that rank 0 alone draws (Opacus with DDP). Every constant is an option, and its
help says where it comes from. The tables are Markdown, as on the page; GiB are 2^30 bytes, GPUs are called ranks (N).
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

GIB = 2**30
WEIGHT, SUM = 2, 4  # bytes of a gathered weight (bf16) and of a number of the clipped sum (float32)
STATE = 16  # bytes of weight, gradient and Adam's two moments, in float32: the shards
WHOLE_SUMS = 2  # layers with whole sums in memory on each rank: the layer being computed, and its copy for the scatter
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
SHOWN = (8, 64, 1024)  # in tables
DEPTH = 60  # layers, where a network is asked for by its memory alone: as many as those of 33 B


@dataclass(frozen=True)
class Network:
    """A language model: parameters, layers, and the widths of its linear layers' inputs and outputs, summed."""

    name: str
    params: float
    layers: int
    inputs: int  # numbers of a token's x; layers with the same input share it
    outputs: int  # numbers of a token's b


def transformer(name: str, params: float, layers: int, block: tuple[int, int], head: tuple[int, int]) -> Network:
    """Returns the network with these sums of widths (inputs, outputs), of a layer and of the last product."""
    return Network(name, params, layers, layers * block[0] + head[0], layers * block[1] + head[1])


NETWORKS = (
    # GPT-2 XL: width 1,600; qkv, out, up, down
    transformer("1.5 B", 1.5e9, 48, (3 * 1600 + 6400, 4800 + 1600 + 6400 + 1600), (1600, 50257)),
    # Llama 3: q, k, v, out, gate, up, down; keys and values are 1,024 wide
    transformer("8 B", 8e9, 32, (3 * 4096 + 14336, 3 * 4096 + 2 * 1024 + 2 * 14336), (4096, 128256)),
    transformer("70 B", 70e9, 80, (3 * 8192 + 28672, 3 * 8192 + 2 * 1024 + 2 * 28672), (8192, 128256)),
)
# The first Llama, of a size that hardly fits; keys and values are as wide as queries
NEAR_LIMIT = transformer("33 B", 32.5e9, 60, (3 * 6656 + 17920, 5 * 6656 + 2 * 17920), (6656, 32000))


def constant(option: str, default: float, meaning: str, source: str) -> Any:
    """Returns a field of ``Machine`` that is also an option."""
    return field(default=default, metadata={"option": option, "meaning": meaning, "source": source})


@dataclass(frozen=True)
class Machine:
    """All constants of the model, each an option."""

    tflops: float = constant(
        "--tflops",
        400.0,
        "10^12 operations per second of a GPU in bf16, as reached in training",
        "Llama 3 (arXiv:2407.21783) reports 380 to 430 on H100s; their data sheet says 989",
    )
    gb_per_s: float = constant(
        "--gb-per-s",
        45.0,
        "10^9 bytes per second between nodes, sent by each GPU",
        "nine tenths of a network card of 400 Gbit/s for each GPU; within a node links are faster",
    )
    tokens: int = constant("--tokens", 16384, "tokens of a step on each GPU", "chosen: 4 examples of 4,096 tokens")
    parts: int = constant("--parts", 1, "microbatches of a step on each GPU", "chosen")
    norms: float = constant(
        "--norms",
        0.3,
        "what norms and clipping add to a step with one backward, in units of its ordinary computation",
        "measured on CPUs: 0.1 to 0.45 for networks that are not tiny (docs/benchmarks.md); in operations, at most 1/3",
    )
    ghost_norms: float = constant(
        "--ghost-norms",
        0.1,
        "the same for two backwards; the second backward is counted separately",
        "the lower end of that range, in favor of two backwards",
    )
    noise_ns: float = constant(
        "--noise-ns",
        1.2,
        "nanoseconds per normal number that a GPU draws for itself",
        "counted on a CPU: 510 tensor operations for 2^21 numbers, assumed to take 5 µs each; their 2.7 kB of traffic "
        "for each number would take 0.8 ns at an H100's 3.35 TB/s",
    )
    pair_ns: float = constant(
        "--pair-ns",
        9.7,
        "the same on two cores of a host, of which all cores help",
        "measured on two cores for an earlier generator: 17.5 ms for 1.8 million",
    )
    cores: float = constant("--cores", 16.0, "cores of the host for each GPU", "chosen")
    thread_ns: float = constant(
        "--thread-ns",
        5.6,
        "the same for today's generator of the host, which runs in one thread",
        "measured on one core by `python benchmarks/noise.py`: 141 ms for 25 million",
    )
    device_gib: float = constant(
        "--device-gib", 79.6, "GiB of memory of a GPU", "81,559 MiB, which nvidia-smi shows for an H100 with 80 GB"
    )
    example: int = constant("--example", 2048, "tokens of an example, in the table of memory", "chosen")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value!r}: must be positive.")


# --- bytes


@dataclass(frozen=True)
class Schedule:
    """How often all weights are gathered, in every part of a step or once, and all sums scattered in every part."""

    name: str
    gathers: int
    scatters: int
    gathers_once: bool = False


FSDP2 = Schedule("FSDP2, ordinary, or with one private backward", 2, 1)
OURS = Schedule("ours: gathered once", 1, 1, gathers_once=True)
TWO_BACKWARDS = Schedule("two backwards", 3, 2)
SCHEDULES = (OURS, FSDP2, TWO_BACKWARDS)
DDP = "ours with DDP"


def sent_bytes(schedule: Schedule, params: float, ranks: int, parts: int = 1) -> float:
    """Returns the bytes that a rank sends in a step, over a ring: (N-1)/N P (2 gathers + 4 scatters of all parts)."""
    gathers = schedule.gathers * (1 if schedule.gathers_once else parts)
    return _ring(params, ranks) * (WEIGHT * gathers + SUM * schedule.scatters * parts)


def ddp_bytes(params: float, ranks: int, parts: int = 1) -> float:
    """Returns the bytes of a reduce-scatter in each part, and of an all-gather of the noisy gradient, in float32."""
    return _ring(params, ranks) * SUM * (parts + 1)


def _ring(params: float, ranks: int) -> float:
    return (ranks - 1) / ranks * params


# --- time


def compute_seconds(params: float, machine: Machine) -> float:
    """Returns the time of an ordinary forward and backward: 6 operations per parameter and token."""
    return 6 * params * machine.tokens / (1e12 * machine.tflops)


def gather_seconds(params: float, ranks: int, machine: Machine) -> float:
    return WEIGHT * _ring(params, ranks) / (1e9 * machine.gb_per_s)


def scatter_seconds(params: float, ranks: int, machine: Machine) -> float:
    return SUM * _ring(params, ranks) / (1e9 * machine.gb_per_s)


def ordinary_seconds(params: float, ranks: int, machine: Machine, *, hidden: bool = True) -> float:
    """Returns the time of an ordinary step with FSDP2: all communication behind the computation, or none."""
    computing = compute_seconds(params, machine)
    sending = machine.parts * (2 * gather_seconds(params, ranks, machine) + scatter_seconds(params, ranks, machine))
    return max(computing, sending) if hidden else computing + sending


def fsdp2_seconds(params: float, ranks: int, machine: Machine) -> float:
    """Returns the time with one private backward in FSDP2's own schedule, with all that can be hidden hidden.

    max(t_c, 2 t_AG) + norms t_c + max(0, t_RS - t_w). The factors are known at the end of the backward, so that sums
    are scattered behind the products that make them, t_w = t_c / 3, and behind nothing else.
    """
    computing = compute_seconds(params, machine)
    gathering = 2 * machine.parts * gather_seconds(params, ranks, machine)
    scattering = machine.parts * scatter_seconds(params, ranks, machine)
    return max(computing, gathering) + machine.norms * computing + max(0, scattering - computing / 3)


def our_seconds(
    params: float, ranks: int, machine: Machine, *, gather_hidden: bool = False, scatter_hidden: bool = True
) -> float:
    """Returns the time of the library's step, which gathers all weights once and scatters all sums in each part.

    All is gathered before the first forward begins. In each part a layer's sums are scattered behind the products that
    make the next layer's, t_w / M; the last layer's, which nothing hides, are left out.

    Args:
        params, ranks, machine: P, N and the constants.
        gather_hidden: whether the gather hides behind the first part's forward, as it could.
        scatter_hidden: whether scatters hide at all.
    """
    computing = compute_seconds(params, machine)
    gathering, scattering = gather_seconds(params, ranks, machine), scatter_seconds(params, ranks, machine)
    third = computing / 3 / machine.parts  # the forward of one part; the products of its sums take as long
    waiting = max(0, gathering - third) if gather_hidden else gathering
    waiting += machine.parts * (max(0, scattering - third) if scatter_hidden else scattering)
    return (1 + machine.norms) * computing + waiting


def two_backwards_seconds(params: float, ranks: int, machine: Machine, *, hidden: bool = True) -> float:
    """Returns the time of a forward and two backwards (5/3 t_c), with the norms in the first."""
    computing = compute_seconds(params, machine)
    gathering, scattering = gather_seconds(params, ranks, machine), scatter_seconds(params, ranks, machine)
    sending = machine.parts * (3 * gathering + 2 * scattering)
    passes = 5 / 3 * computing
    return (max(passes, sending) if hidden else passes + sending) + machine.ghost_norms * computing


# --- memory


def state_bytes(params: float, ranks: int) -> float:
    """Returns the bytes of a rank's shards: weights, gradients, Adam's moments."""
    return STATE * params / ranks


def our_memory(network: Network, ranks: int, parts: int = 1) -> float:
    """Returns the bytes of a rank during a step without activations: shards, gathered weights, some layers' sums.

    With several parts, the slices of one part's sums are there beside those of the parts before.
    """
    slices = SUM * network.params / ranks if parts > 1 else 0
    held = WEIGHT * network.params + WHOLE_SUMS / network.layers * SUM * network.params
    return state_bytes(network.params, ranks) + slices + held


def fsdp2_memory(network: Network, ranks: int) -> float:
    """Returns the same for FSDP2's own schedule, which has two layers whole at a time."""
    return state_bytes(network.params, ranks) + 2 / network.layers * (WEIGHT + SUM) * network.params


def factors_bytes(network: Network, tokens: float) -> float:
    """Returns the bytes of x and b of all linear layers, in bf16, that one backward keeps for the clipped sum."""
    return WEIGHT * tokens * (network.inputs + network.outputs)


def largest_params(ranks: int, gib: float) -> float:
    """Returns how many parameters, in `DEPTH` layers, leave no memory for activations in the library's schedule."""
    return gib * GIB / (WEIGHT + WHOLE_SUMS / DEPTH * SUM + STATE / ranks)


# --- noise


def noise_seconds(params: float, machine: Machine) -> float:
    """Returns the time of one number for each parameter on one GPU; its next computation waits for it."""
    return 1e-9 * machine.noise_ns * params


def host_seconds(params: float, machine: Machine) -> float:
    """Returns the same on the host's cores, if all of them help."""
    return 1e-9 * machine.pair_ns * params * 2 / machine.cores


def thread_seconds(params: float, machine: Machine) -> float:
    """Returns the same in one thread of the host."""
    return 1e-9 * machine.thread_ns * params


def with_noise_seconds(params: float, ranks: int, machine: Machine, *, shared: bool = True) -> float:
    """Returns the time of the library's step and its noise, of which each rank draws its share, or rank 0 all."""
    return our_seconds(params, ranks, machine) + noise_seconds(params, machine) / (ranks if shared else 1)


# --- tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, *rows]).replace(
        "\n", "\n" + "|---" * len(head) + "|\n", 1
    )


def constants_table(machine: Machine) -> str:
    rows = [
        (f"`{f.metadata['option']}`", f"{getattr(machine, f.name):g}", f.metadata["meaning"], f.metadata["source"])
        for f in fields(machine)
    ]
    return table(["option", "value", "meaning", "source"], rows)


def bytes_table(machine: Machine) -> str:
    def rows() -> Iterator[list[str]]:
        for network in NETWORKS:
            sent = {s.name: [sent_bytes(s, network.params, n, machine.parts) for n in SHOWN] for s in SCHEDULES}
            sent[DDP] = [ddp_bytes(network.params, n, machine.parts) for n in SHOWN]
            for name, each in sent.items():
                yield [network.name, name, *(f"{count / GIB:.2f}" for count in each)]

    return table(["parameters", "GiB sent by each GPU in a step", *map(_n, SHOWN)], rows())


def parts_table(machine: Machine) -> str:
    counts = (1, 2, 4, 16)
    rows = [
        [schedule.name, *(f"{sent_bytes(schedule, 8e9, 64, parts) / GIB:.1f}" for parts in counts)]
        for schedule in SCHEDULES
    ]
    rows.append([DDP, *(f"{ddp_bytes(8e9, 64, parts) / GIB:.1f}" for parts in counts)])
    return table(["GiB, 8 B, N = 64", *map(_parts, counts)], rows)


TIMES = {
    "ordinary step, FSDP2": ordinary_seconds,
    "ordinary step, nothing hidden": lambda *args: ordinary_seconds(*args, hidden=False),
    "ours": our_seconds,
    "ours, if the gather hid, too": lambda *args: our_seconds(*args, gather_hidden=True),
    "ours, nothing hidden": lambda *args: our_seconds(*args, scatter_hidden=False),
    "one private backward in FSDP2's schedule, hidden": fsdp2_seconds,
    "two backwards, hidden": two_backwards_seconds,
    "two backwards, nothing hidden": lambda *args: two_backwards_seconds(*args, hidden=False),
}
NOISY = {
    "ours, then each GPU's share of the noise": with_noise_seconds,
    "ours, then all noise on rank 0": lambda *args: with_noise_seconds(*args, shared=False),
}


def time_table(machine: Machine) -> str:
    def cell(seconds: float, ranks: int) -> str:
        return f"{seconds:.2f} ({seconds / ordinary_seconds(8e9, ranks, machine):.2f})"

    rows = [[name, *(cell(seconds(8e9, n, machine), n) for n in SHOWN)] for name, seconds in {**TIMES, **NOISY}.items()]
    return table(["seconds of a step, 8 B (to ordinary)", *map(_n, SHOWN)], rows)


def tokens_table(machine: Machine) -> str:
    counts = (2048, 4096, 8192, 16384, 65536)
    machines = [Machine(**{**vars(machine), "tokens": count}) for count in counts]
    rows = [
        [name, *(f"{TIMES[name](8e9, 64, m) / ordinary_seconds(8e9, 64, m):.2f}" for m in machines)]
        for name in list(TIMES)[1:]
    ]
    return table(["time to ordinary, N = 64; tokens on each GPU", *(f"{count:,}" for count in counts)], rows)


def time_of_parts_table(machine: Machine) -> str:
    counts = (1, 2, 4, 8, 16)
    machines = [Machine(**{**vars(machine), "tokens": 65536, "parts": parts}) for parts in counts]
    rows = [[name, *(f"{seconds(8e9, 64, m):.1f}" for m in machines)] for name, seconds in TIMES.items()]
    return table(["seconds, 8 B, N = 64, 65,536 tokens", *map(_parts, counts)], rows)


def memory_table(machine: Machine) -> str:
    def row(network: Network, ranks: int) -> list[str]:
        ours, theirs = our_memory(network, ranks, machine.parts) / GIB, fsdp2_memory(network, ranks) / GIB
        shards, factors = state_bytes(network.params, ranks) / GIB, factors_bytes(network, machine.example) / GIB
        cells = (f"{shards:.1f}", f"{ours:.1f}", _left(ours, machine), f"{theirs:.1f}", _left(theirs, machine))
        return [network.name, f"{ranks:,}", *cells, f"{factors:.1f}"]

    head = ["parameters", "N", "shards, GiB", "ours", "left", "FSDP2's schedule", "left", "x and b of an example"]
    networks = sorted([*NETWORKS, NEAR_LIMIT], key=lambda network: network.params)
    return table(head, [row(network, ranks) for network in networks for ranks in SHOWN])


def largest_table(machine: Machine) -> str:
    sizes = (39.5, machine.device_gib, 140, 180)
    rows = [[f"{ranks:,}", *(f"{largest_params(ranks, gib) / 1e9:.1f} B" for gib in sizes)] for ranks in SHOWN]
    return table(["N", *(f"{gib:g} GiB" for gib in sizes)], rows)


def noise_table(machine: Machine) -> str:
    def rows() -> Iterator[list[str]]:
        where = {"GPU": noise_seconds, "all cores of a host": host_seconds, "one thread": thread_seconds}
        for network in NETWORKS:
            for name, seconds in where.items():
                alone = seconds(network.params, machine)
                yield [network.name, name, *(_short(alone / ranks) for ranks in (1, *SHOWN))]

    return table(["parameters", "seconds of noise", "rank 0 alone", *(f"share, {_n(n)}" for n in SHOWN)], rows())


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 9.5 else f"{seconds:.2g}"


def _n(ranks: int) -> str:
    return f"N = {ranks:,}"


def _parts(count: int) -> str:
    return f"{count} part{'s' * (count > 1)}"


def _left(gib: float, machine: Machine) -> str:
    left = machine.device_gib - gib
    return f"{left:.1f}" if left > 0 else "does not fit"


TABLES = {
    "Constants": constants_table,
    "Bytes": bytes_table,
    "Bytes of a step in parts": parts_table,
    "Time": time_table,
    "Time with fewer or more tokens": tokens_table,
    "Time of a step in parts": time_of_parts_table,
    "Memory": memory_table,
    "Largest network without activations": largest_table,
    "Noise": noise_table,
}

# --- picture

COLORS = {"ours": "#1f5fbf", "ordinary": "#55606e", "two": "#b03a48", "rank 0": "#c4741a"}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torch_privacy",
    "font.size": 10,
    "axes.edgecolor": "#9aa3ad",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "lines.linewidth": 2,
    "xtick.color": "#9aa3ad",
    "xtick.labelcolor": "black",
    "ytick.color": "#9aa3ad",
    "ytick.labelcolor": "black",
}


def draw(machine: Machine, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 8), layout="constrained", facecolor="white")
        figure.suptitle("A model, not measured: one private step on N GPUs", x=0.01, ha="left", fontsize=13)
        axes = figure.subplots(2, 2)
        draw_bytes(axes[0, 0], machine)
        draw_time(axes[0, 1], machine)
        draw_memory(axes[1, 0], machine)
        draw_noise(axes[1, 1], machine)
        for ax in axes.flat:
            finish(ax)
        figure.supxlabel(
            f"number of GPUs, N. Assumed: {machine.tflops:g} TFLOP/s and {machine.tokens:,} tokens on each, "
            f"{machine.gb_per_s:g} GB/s between them, norms {machine.norms:g}",
            x=0.01,
            ha="left",
            fontsize=9,
        )
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_bytes(ax: Axes, machine: Machine) -> None:
    """Draws the bytes of all schedules for all networks."""
    lines = [(TWO_BACKWARDS, "two", "two backwards"), (FSDP2, "ordinary", "FSDP2"), (OURS, "ours", "ours")]
    for network in NETWORKS:
        for schedule, color, name in lines:
            sent = [sent_bytes(schedule, network.params, n, machine.parts) / GIB for n in RANKS]
            ax.plot(RANKS, sent, color=COLORS[color], label=name if network is NETWORKS[0] else None)
        middle = sent_bytes(FSDP2, network.params, RANKS[-1], machine.parts) / GIB
        beside(ax, middle, network.name)
    ax.set_yscale("log")
    ax.set_title("GiB that each GPU sends")
    ax.legend(frameon=False, fontsize=9, ncols=3, loc="upper left", bbox_to_anchor=(0, 1.02))
    ax.set_ylim(5, 3000)


def draw_time(ax: Axes, machine: Machine) -> None:
    """Draws the seconds of a step with 8 B parameters; ours between all and nothing hidden."""
    curves: list[tuple[str, str, str, str]] = [
        ("two backwards, nothing hidden", "two", ":", "two backwards, nothing hidden"),
        ("two backwards, hidden", "two", "-", "two backwards"),
        ("ordinary step, FSDP2", "ordinary", "-", "ordinary"),
        ("ours, nothing hidden", "ours", ":", "ours, nothing hidden"),
        ("ours", "ours", "-", "ours"),
        ("ours, if the gather hid, too", "ours", "--", "ours, gather hidden"),
        ("ours, then each GPU's share of the noise", "rank 0", "-", "ours and its noise"),
    ]
    top = 0.0
    for name, color, line, label in curves:
        seconds = [{**TIMES, **NOISY}[name](8e9, ranks, machine) for ranks in RANKS]
        ax.plot(RANKS, seconds, color=COLORS[color], linestyle=line, label=label)
        top = max(top, *seconds)
    ax.set_title("Seconds of a step, 8 B parameters")
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.02))
    ax.set_ylim(0, 1.5 * top)  # room for the names


def draw_memory(ax: Axes, machine: Machine) -> None:
    """Draws what a rank holds besides activations."""
    for network in NETWORKS:
        ours = [our_memory(network, ranks, machine.parts) / GIB for ranks in RANKS]
        theirs = [fsdp2_memory(network, ranks) / GIB for ranks in RANKS]
        label = {"ours": "ours", "theirs": "FSDP2's schedule"} if network is NETWORKS[0] else {}
        ax.plot(RANKS, ours, color=COLORS["ours"], label=label.get("ours"))
        ax.plot(RANKS, theirs, color=COLORS["ordinary"], label=label.get("theirs"))
        beside(ax, ours[-1] * 1.15, network.name, COLORS["ours"])
        beside(ax, theirs[-1] / 1.15, network.name, COLORS["ordinary"])
    ax.axhline(machine.device_gib, color="black", linewidth=1, linestyle=(0, (4, 3)))
    ax.text(RANKS[-1], machine.device_gib * 1.08, f"a GPU of {machine.device_gib:g} GiB", ha="right", fontsize=9)
    ax.set_yscale("log")
    ax.set_title("GiB in each GPU, without activations")
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.02))
    ax.set_ylim(0.2, 3000)


def draw_noise(ax: Axes, machine: Machine) -> None:
    """Draws the seconds of noise, shared or on rank 0."""
    for network in NETWORKS:
        alone = noise_seconds(network.params, machine)
        label = {"ours": "each GPU its share", "0": "rank 0 alone"} if network is NETWORKS[0] else {}
        ax.plot(RANKS, [alone / ranks for ranks in RANKS], color=COLORS["ours"], label=label.get("ours"))
        ax.plot(RANKS, [alone] * len(RANKS), color=COLORS["rank 0"], label=label.get("0"))
        beside(ax, alone, network.name, COLORS["rank 0"])
        beside(ax, alone / RANKS[-1], network.name, COLORS["ours"])
    step = our_seconds(8e9, RANKS[0], machine)
    ax.axhline(step, color="black", linewidth=1, linestyle=(0, (4, 3)))
    ax.text(RANKS[-1], step * 1.12, "a step of 8 B", ha="right", fontsize=9)
    ax.set_yscale("log")
    ax.set_title(f"Seconds of noise, {machine.noise_ns:g} ns for each number")
    ax.legend(frameon=False, fontsize=9, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.02))
    ax.set_ylim(5e-4, 1000)


def beside(ax: Axes, y: float, text: str, color: str = "black") -> None:
    """Writes a name at the right end of a line."""
    ax.annotate(text, (RANKS[-1], y), (6, 0), textcoords="offset points", va="center", fontsize=9, color=color)


def finish(ax: Axes) -> None:
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(RANKS))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    ax.set_axisbelow(True)


def arguments() -> tuple[Machine, Path | None]:
    parser = argparse.ArgumentParser(description="A model of a private step on many GPUs. Nothing here is measured.")
    parser.add_argument("picture", type=Path, nargs="?", help="file to draw, PNG or SVG; without it, tables only")
    for f in fields(Machine):
        text = f"{f.metadata['meaning']} (default {f.default:g}; {f.metadata['source']})"
        parser.add_argument(f.metadata["option"], type=type(f.default), default=f.default, help=text)
    chosen = vars(parser.parse_args())
    picture = chosen.pop("picture")
    try:
        return Machine(**chosen), picture
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    machine, picture = arguments()
    print("A MODEL, NOT MEASURED: no GPU was used.")
    for title, make in TABLES.items():
        print(f"\n{title}\n\n{make(machine)}")
    if picture:
        draw(machine, picture)


if __name__ == "__main__":
    main()
