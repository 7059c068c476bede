# SPDX-License-Identifier: Apache-2.0
"""Writes claims.md from docs/results (claims, jl-mnist, jl-cifar10): ``python docs/_claims.py``.

``python docs/_results.py RUN`` keeps the results of a run of ``torch-privacy reproduce claims`` there.
"""

import json
from pathlib import Path
from typing import Any

from torch_privacy.runs import table

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "results", HERE / "claims.md"
HEAD = """\
# What the papers claimed, and what is true

Four papers, one of them in two versions, are reproduced here. Their algorithms work. Their accuracies on MNIST, Adult
and MovieLens can be reached. Some of the epsilons that they print are not guarantees. This page lists every claim that
we could check, with the certified epsilon beside it. One command computes all of it in seconds and trains nothing:

```bash
torch-privacy reproduce claims
```

*Claimed* is the printed epsilon or, where only the method is given, what the method yields (in brackets: computed
by us where the paper prints another number). *Certified* is an interval around the true epsilon at the same delta.
The last column is the certified delta at the claimed epsilon: a claim is a guarantee only if it is at most the
claimed delta. Claims that fail are in bold.
"""
SECTIONS = (
    (
        "JL(1)",
        "One random projection is no clipping",
        "Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, both versions: 95 % on MNIST at "
        "epsilon 2.4, 66.1 % on CIFAR-10 at 5.55 and 83.2 % on IMDb at 21, with norms estimated from one "
        "projection.",
        "The estimate of a norm from one projection is sometimes far too small, and then a large gradient is hardly"
        " clipped. That happens with a probability of about 0.8 / (sigma z) for a z times too large gradient, so "
        "epsilon has a tail without end. The printed numbers are those of the opposite direction at best, in which "
        "an example is added. At least [16 projections](sketched.md) are needed: 30 "
        "cost epsilon 0.955 on MNIST, exact norms 0.865. The first version also says that epsilon is not monotone in "
        "the number of projections; it falls with more of them, as the second version says. Code: "
        "`privacy.SubsampledJL(1.3, num_projections=1, sampling_probability=256 / 60000)`.",
    ),
    (
        "CLT",
        "The central limit theorem is no bound",
        "Bu, Dong, Long & Su (2020), arXiv:1911.11607: mu = q sqrt(T (e^(1/sigma^2) - 1)) and the epsilon of G_mu, "
        "in Tables 1 to 4 and Figures 2, 4 and A.1; two rows apply it to the settings of Abadi et al. (2016).",
        "In all settings but one the claimed epsilon is too small, and the true delta is up to 21 times the stated "
        "one. With little noise and many steps (sigma 0.5, 100 epochs) the claim is too large. So the approximation "
        "is neither an upper nor a lower bound. Code: `privacy.clt(...)`; its `true_delta` gives the last column. See "
        "[Accounting](accounting.md#which-accountant-to-trust).",
    ),
    (
        "GEP",
        "Embedding and residual share a sample",
        "Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Table 1: epsilon 2, 5 and 8 with the noise that the "
        "published code computes, the moments of two releases, each on a sample of its own (sigma per part, batches"
        " of 1000).",
        "Both parts are sums over the same sample: one release with noise sigma / sqrt(2). Where sampling amplifies"
        " most, on SVHN, the sum of two amplified releases is far too small. On MNIST and CIFAR-10 the claim holds "
        "by luck: exact accounting saves more than the error costs. The second column is the same method without "
        "the error. The printed noise 0.60 is rounded up from ours, and costs 18.44 ([GEP](gep.md#what-it-costs)). "
        "Code: `privacy.SubsampledGEP`.",
    ),
    (
        "two layers",
        "Two layers share a sample, too",
        "Abadi et al. (2016), arXiv:1607.00133, Figure 3, and the authors' code (TensorFlow models, "
        "research/differential_privacy): the moments of two layers with noise sigma each are added up as if each "
        "had its own sample, components included.",
        "The same error, with less effect: the sum is below the moments of the one release that it is, so it is no "
        "bound. The printed epsilons hold nevertheless, since exact accounting is below both. Code: "
        "`privacy.moments_of`.",
    ),
    (
        "strong composition",
        "Sampling does not shrink epsilon to q epsilon",
        "Abadi et al. (2016), Figure 2: 9.34 after 100 epochs and 24.22 after 400 by strong composition, "
        "against 1.26 and 2.55 by moments.",
        "The numbers follow only if a step on a sample costs q epsilon. It costs log(1 + q (e^epsilon - 1)), with "
        "which strong composition gives 26.39 and 82.35. So the comparison was kinder to strong composition than it"
        " should be, and the truth is far below all of them. Code: `privacy.strong_composition(..., "
        "amplification=privacy.scaled_epsilon)`.",
    ),
    (
        "IMDb",
        "Norms of repeated words",
        "Bu, Dong, Long & Su (2020), Table 3, and the authors' code (tensorflow/privacy, "
        "research/GDP_2019/imdb_tutorial.py): mu = 2.07, which is epsilon 10.43 by the CLT.",
        "TensorFlow keeps an embedding's gradient as one row for each position, and the code squares these rows one"
        " by one. A word that occurs k times, such as padding, counts k squares instead of the square of the sum. "
        "The row is for a text of 128 words and 128 paddings, where the embedding has all of the gradient: its norm"
        " is 8 times the computed one. `gdp-imdb` trains with these norms and with exact ones "
        "([results](results.md#gdp-imdb)). Code: `torch_privacy_papers/bu2020/sparse_norms.py`.",
    ),
)
MEMORY = """\
## Vanilla DP-SGD needs little more memory

Claim (arXiv:2102.03013, Table 3): on a GPU of 16 GB the largest batch of vanilla DP-SGD on the small MNIST network
is {vanilla_paper:,}, where JL(10) and training without privacy take {jl_paper:,}.

One backward pass for each example, which is what the paper's *vanilla* does, needs the gradient of one example at a
time, and the sum. Measured by `torch-privacy reproduce jl-mnist`: {vanilla:.0f} MiB for a batch of 256, {plain:.0f}
without privacy, {jl:.0f} with JL(10), {multiple:.0f} with all per-example gradients at once, and {exact:.0f} with
this library's exact norms. The largest batch within 2 GiB is {vanilla_batch:,} for vanilla and {jl_batch:,} for
JL(10). On the network for CIFAR-10 vanilla takes {cifar_vanilla:.0f} MiB and non-private training {cifar_plain:.0f}
(`jl-cifar10`). What vanilla lacks is speed: {vanilla_ratio:.0f} times the time of training without privacy, against
{exact_ratio:.1f} times with exact norms and {jl_ratio:.1f} with JL(10).
"""


def page() -> str:
    """The whole page, from the results that are kept."""
    results = json.loads((KEPT / "claims.json").read_text())
    parts = [
        HEAD,
        *(section(results, *words) for words in SECTIONS),
        memory(*(json.loads((KEPT / f"{name}.json").read_text()) for name in ("jl-mnist", "jl-cifar10"))),
    ]
    return "\n".join(parts)


def section(results: dict[str, Any], kind: str, title: str, claim: str, truth: str) -> str:
    """One kind of claim: who claims it, its table, what is true."""
    rows = [row for row in results["rows"] if row["row"].split(",")[0] == kind]
    has_valid = any(row["runs"][0]["numbers"]["valid"] is not None for row in rows)
    names = ["setting", "claimed", *(["made valid"] if has_valid else []), "certified", "delta", "true delta"]
    lines = [f"| {' | '.join(names)} |", f"| --- |{' ---: |' * (len(names) - 1)}"]
    lines += [f"| {' | '.join(cells(results['columns'], row, has_valid=has_valid))} |" for row in rows]
    return "\n\n".join([f"## {title}", f"Claim: {claim}", "\n".join(lines), truth]) + "\n"


def cells(columns: dict[str, Any], row: dict[str, Any], *, has_valid: bool) -> list[str]:
    """The cells of one claim; those of a claim that fails are bold."""
    numbers = row["runs"][0]["numbers"]
    ours, printed = numbers["claim"], row["paper"].get("claim")
    claimed = f"{ours:.2f}" if printed is None else f"{printed:g}"
    if printed is not None and ours is not None and abs(ours - printed) > 0.006:
        claimed += f" ({ours:.2f})"

    def text(key: str) -> str:
        return table.cell([numbers[key]], table.TableColumn(**columns[key]))

    fails = numbers["true_delta"]["low"] > numbers["stated_delta"]
    mark = "**" if fails else ""
    setting = row["row"].partition(", ")[2] or row["row"]
    true = [f"{mark}{text('epsilon')}{mark}", f"{numbers['stated_delta']:.0e}", f"{mark}{text('true_delta')}{mark}"]
    return [setting, claimed, *([text("valid")] if has_valid else []), *true]


def memory(results: dict[str, Any], of_photographs: dict[str, Any]) -> str:
    """What vanilla needs, from the runs that measured it."""
    large = {row["row"]: row["runs"][0]["numbers"] for row in of_photographs["rows"]}
    rows = {row["row"]: (row["runs"][0]["numbers"], row["paper"]) for row in results["rows"]}
    found = {name: rows[name][0] for name in ("non-private", "vanilla", "multiple", "ours, exact", "JL(10)")}
    return MEMORY.format(
        vanilla_paper=round(rows["vanilla"][1]["largest_batch"]),
        jl_paper=round(rows["JL(10)"][1]["largest_batch"]),
        vanilla=found["vanilla"]["peak_mib"],
        plain=found["non-private"]["peak_mib"],
        cifar_vanilla=large["vanilla"]["peak_mib"],
        cifar_plain=large["non-private"]["peak_mib"],
        jl=found["JL(10)"]["peak_mib"],
        multiple=found["multiple"]["peak_mib"],
        exact=found["ours, exact"]["peak_mib"],
        vanilla_batch=round(found["vanilla"]["largest_batch"]),
        jl_batch=round(found["JL(10)"]["largest_batch"]),
        vanilla_ratio=found["vanilla"]["ratio"],
        exact_ratio=found["ours, exact"]["ratio"],
        jl_ratio=found["JL(10)"]["ratio"],
    )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
