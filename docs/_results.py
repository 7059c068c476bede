# SPDX-License-Identifier: Apache-2.0
"""Writes results.md from finished runs of ``torch-privacy reproduce``: ``python docs/_results.py RUN [RUN ...]``.

Each run's ``results.json`` is kept in docs/results, one for each experiment; a new one takes the place of the old. The
page is made of these files alone: without arguments it is only written anew.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from torch_privacy.experiments.catalog import CATALOG
from torch_privacy.runs import table

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

The tables and figures of the papers, reproduced. `python docs/_results.py RUN` writes each table from the run folder of
the command above it; no number is typed by hand. Our numbers are means over the seeds ± the standard deviation; without
±, there was one seed, or no seed matters. `eps, certified` is an interval around the true epsilon: report its upper
end. The other epsilons and mu are shown because the papers state them. Run times were measured on machines that also
did other work; `torch-privacy reproduce` lists what to expect.
"""


def keep(run: Path) -> None:
    """Take the results of one run."""
    results = json.loads((run / "results.json").read_text())
    if "reproduce" not in results:
        raise SystemExit(f"{run}: is no run of reproduce")
    if results["quick"]:
        raise SystemExit(f"{run}: is a quick look; run it without --quick")
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{results['reproduce']}.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def page() -> str:
    """The whole page, from the results that are kept."""
    paths = [KEPT / f"{experiment.name}.json" for experiment in CATALOG]
    return "\n".join([HEAD, *(section(json.loads(path.read_text())) for path in paths if path.exists())])


def section(results: dict[str, Any]) -> str:
    """One experiment: its command, what it shows, the table, the notes."""
    paper, seeds = results["paper"], results["seeds"]
    option = "" if seeds == [0] else f" --seeds {','.join(map(str, seeds))}"
    option += "".join(f" --{key} {shlex.quote(row)}" for key in ("only", "skip") for row in results.get(key, ()))
    parts = [
        f"## {results['reproduce']}",
        f"```bash\ntorch-privacy reproduce {results['reproduce']}{option}\n```",
        f"{table.what(results)}: {paper['authors']}, {results['place']} ({paper['source']}). {table.summary(results)}.",
        *picture(results["reproduce"]),
        table.markdown(results).rstrip(),
        *results["notes"],
    ]
    return "\n\n".join(parts) + "\n"


def picture(name: str) -> list[str]:
    """The figure of a paper, in the section of its first training."""
    if name not in PICTURES:
        return []
    file, shown = PICTURES[name]
    return [f"![{shown}](img/{file}.svg)", PICTURE_NOTE]


def main() -> None:
    """Keep the runs that are named, then write the page."""
    for run in sys.argv[1:]:
        keep(Path(run))
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
