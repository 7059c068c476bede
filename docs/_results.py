# SPDX-License-Identifier: Apache-2.0
"""Writes results.md from finished runs of ``torch-privacy reproduce``: ``python docs/_results.py RUN [RUN ...]``.

Each run's ``results.json`` is kept in docs/results, one for each experiment; a new one takes the place of the old. Rows
that the new run left out (``--only``, ``--skip``) stay from the old one, with their own seeds: the page then shows a
command for each list of seeds. The page is made of these files alone: without arguments it is only written anew. In
place of a run, the name of an experiment renews the words of its kept results: notes and findings, as the code has them
now. Do this only if the settings have not changed.
"""

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch_privacy.experiments import EXPERIMENTS, load_study
from torch_privacy.runs import table
from torch_privacy_papers.catalog import CATALOG

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "results", HERE / "results.md"
PICTURES = {  # experiment -> the figure of its paper, drawn by docs/_papers.py, and what it shows
    "abadi-mnist": ("abadi2016", "Accuracy over epsilon: the claims of Abadi et al. hold, with room to spare"),
    "gdp-mnist": ("bu2020", "Accuracy over epsilon: the CLT claims less than is certified in all settings but one"),
    "jl-mnist": (
        "bu2021",
        "Accuracy over epsilon: with one projection the truth is above a hundred billion",
    ),
    "gep-mnist": ("yu2021", "Accuracy over epsilon: the claims for GEP hold on MNIST and CIFAR-10, not on SVHN"),
    "best-mnist": ("best", "Accuracy over epsilon: the best known, and ours"),
}
PICTURE_NOTE = (
    "Hollow: as the paper prints it. Full: the certified epsilon of the same setting, red if it is larger. Blue: ours, "
    "with the standard error over the seeds if there are several. From docs/results by `python docs/_papers.py`."
)
HEAD = """\
# Results

The tables and figures of the papers, reproduced. `python docs/_results.py RUN` writes each table from the run folder
of the command above it; no number in a table is typed by hand. Our numbers are means over the seeds ± the standard
deviation; without ±, there was one seed, or no seed matters. With one seed, an accuracy a on n test examples has a
standard error of at least √(a (1 - a) / n): 0.2 points at 95 % of 10,000 examples, 0.5 at 50 %. `eps, certified` is
an interval around the true epsilon: report its upper end. The other epsilons and mu are shown because the papers
state them. Run times were measured on machines that also did other work; `torch-privacy reproduce` lists what to
expect.
"""


def keep(run: Path) -> None:
    """Take the results of one run."""
    results = json.loads((run / "results.json").read_text())
    if "reproduce" not in results:
        raise SystemExit(f"{run}: is no run of reproduce")
    if results["quick"]:
        raise SystemExit(f"{run}: is a quick look; run it without --quick")
    if "own_data" in results:
        raise SystemExit(f"{run}: is of other data than the paper's")
    path = KEPT / f"{results['reproduce']}.json"
    KEPT.mkdir(exist_ok=True)
    write(with_kept_rows(results, json.loads(path.read_text())) if path.exists() else results)


def write(results: dict[str, Any]) -> None:
    """Write the kept results of one experiment."""
    path = KEPT / f"{results['reproduce']}.json"
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def with_kept_rows(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """The new results, with those rows of the old ones that the new run left out on purpose."""
    if not (new.get("only") or new.get("skip")):
        return new
    made = {row["row"]: row for row in new["rows"]}
    kept = {row["row"]: row for row in old["rows"]}
    names = [row.name for row in load_study(new["reproduce"]).rows(False)]
    rows = [made.get(name) or kept[name] for name in names if name in made or name in kept]
    if len(rows) == len(made):
        return new
    skip = [*new.get("skip", ()), *old.get("skip", ())]
    merged = {**new, "rows": rows, "only": [], "skip": skip, "deltas": new["deltas"] or old["deltas"]}
    return reworded({**merged, "seeds": list(next(iter(table.rows_by_seeds(merged))))})


def reworded(results: dict[str, Any]) -> dict[str, Any]:
    """The results with the notes, the columns and the paper's numbers that the experiment has now."""
    study, experiment = load_study(results["reproduce"]), EXPERIMENTS[results["reproduce"]]
    made = {row["row"] for row in results["rows"]}
    left_out = [row.name for row in study.rows(False) if row.name not in made]
    notes = [*study.notes, *([f"Left out: {'; '.join(left_out)}."] if left_out else [])]
    paper = {row.name: dict(row.paper) for row in study.rows(False)}
    rows = [{**row, "paper": paper.get(row["row"], row["paper"])} for row in results["rows"]]
    columns = {key: asdict(column) for key, column in study.columns.items()}
    words = {"place": experiment.place, "shows": experiment.shows, "columns": columns, "rows": rows, "notes": notes}
    if not results.get("only"):
        words["skip"] = skipping(left_out, results.get("skip", ()), made)
    results = {**results, **words}
    if study.findings is not None and not (left_out and study.findings_need_all):
        results["notes"] = [*notes, *study.findings(results)]
    return results


def skipping(left_out: list[str], patterns: Iterable[str], made: set[str]) -> list[str]:
    """The patterns that leave out these rows: those given that fit no row that was made, then names."""
    fit = [pattern for pattern in dict.fromkeys(patterns) if not any(fnmatchcase(name, pattern) for name in made)]
    fit = [pattern for pattern in fit if any(fnmatchcase(name, pattern) for name in left_out)]
    return [*fit, *(name for name in left_out if not any(fnmatchcase(name, pattern) for pattern in fit))]


def page() -> str:
    """The whole page, from the results that are kept."""
    paths = [KEPT / f"{experiment.name}.json" for experiment in CATALOG]
    return "\n".join([HEAD, *(section(json.loads(path.read_text())) for path in paths if path.exists())])


def section(results: dict[str, Any]) -> str:
    """One experiment: its command, what it shows, the table, the notes."""
    paper = results["paper"]
    parts = [
        f"## {results['reproduce']}",
        "\n".join(["```bash", *commands(results), "```"]),
        f"{table.what(results)}: {paper['authors']}, {results['place']} ({paper['source']}). {table.summary(results)}.",
        *picture(results["reproduce"]),
        table.markdown(results).rstrip(),
        *results["notes"],
    ]
    return "\n\n".join(parts) + "\n"


def commands(results: dict[str, Any]) -> list[str]:
    """The command for the rows of each list of seeds, that of most rows first."""
    most, *others = table.rows_by_seeds(results).items()
    apart = [name for _, names in others for name in names]
    patterns = [("only", results.get("only", ())), ("skip", [*results.get("skip", ()), *apart])]
    asked = [(most[0], patterns), *((seeds, [("only", names)]) for seeds, names in others)]
    return [
        f"torch-privacy reproduce {results['reproduce']}"
        + ("" if list(seeds) == [0] else f" --seeds {','.join(map(str, seeds))}")
        + "".join(f" --{key} {shlex.quote(name)}" for key, names in patterns for name in names)
        for seeds, patterns in asked
    ]


def picture(name: str) -> list[str]:
    """The figure of a paper, in the section of its first training."""
    if name not in PICTURES:
        return []
    file, shown = PICTURES[name]
    return [f"![{shown}](img/{file}.svg)", PICTURE_NOTE]


def main() -> None:
    """Keep the runs that are named, then write the page."""
    for name in sys.argv[1:]:
        if name in EXPERIMENTS:
            write(reworded(json.loads((KEPT / f"{name}.json").read_text())))
        else:
            keep(Path(name))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
