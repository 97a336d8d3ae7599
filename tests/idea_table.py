"""How much does the conclusion hang on the form of the layer?  Runs every file of tests/ideas, prints a Markdown table.

Run.  python tests/idea_table.py                             eight full benchmarks: the built-in layer, then each form
      python tests/idea_table.py --seeds 4 --epochs 4        a quick look; options go to stage2_bench.py as they are
Columns.  Mean test MSE at the form's best rate and its ratio to the baseline's; pairs (seeds) in which the form is
lower; exact two-sided sign-flip p against the baseline; mean of the form's own placebo, the same layer with h = 0.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import stage2_bench as bench

IDEAS = HERE / "ideas"
HEADER = ["form", "parameters", "mean test MSE", "ratio", "pairs won", "exact p", "placebo mean"]


def find_ideas() -> dict[str, str]:
    """Return {form: "path.py:Class"} of tests/ideas; each file defines one module."""
    found = {}
    for path in sorted(IDEAS.glob("*.py")):
        module = bench.load_file(str(path))
        (name,) = [x.__name__ for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
        found[path.stem] = f"{path}:{name}"
    return found


def benchmark(options: Sequence[str], folder: Path) -> dict:
    """Run the benchmark with these options and return its report.  Exits with the benchmark's status if it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        status = bench.main([*options, "--out-dir", str(folder)])
    if status:
        sys.exit(status)
    return json.loads((folder / bench.REPORT).read_text(encoding="utf-8"))


def show(value: float | None, digits: int) -> str:
    """Return a number of the table; a dash where a run diverged."""
    return "-" if value is None else f"{value:.{digits}f}"


def row(form: str, report: dict) -> list[str]:
    """Return the table's row of one report."""
    idea, baseline = report["idea"]["mean"], report["baseline"]["full"]["mean"]
    compared, extensions = report["comparison"], report["extensions"]
    return [
        form,
        str(report["parameter_parity"]["idea"]),
        show(idea, 5),
        show(None if None in (idea, baseline) else idea / baseline, 2),
        f"{compared['idea_wins']} of {compared['n_pairs']}",
        show(extensions["statistics"]["p_exact"], 4),
        show(extensions["placebo"]["full"]["mean"], 5),
    ]


def baseline_row(report: dict) -> list[str]:
    """Return the row of the raw baseline, with which every form is compared."""
    mean = show(report["baseline"]["full"]["mean"], 5)
    return ["baseline (raw tokens)", str(report["parameter_parity"]["baseline"]), mean, "1.00", "", "", ""]


def main(options: Sequence[str]) -> None:
    """Print the table's rows as they become known."""

    def line(cells: Sequence[str]) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        built_in = benchmark(options, Path(folder, "built-in"))
        line(HEADER)
        line(["---"] * len(HEADER))
        line(baseline_row(built_in))
        line(row("kinetic (built in)", built_in))
        for form, idea in find_ideas().items():
            line(row(f"`{form}.py`", benchmark([*options, "--idea", idea], Path(folder, form))))


if __name__ == "__main__":
    main(sys.argv[1:])
