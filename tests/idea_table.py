"""How much does the conclusion hang on the form of the layer?  Runs every form of tests/ideas, prints a Markdown table.

Run.  python tests/idea_table.py                             ten benchmarks: the built-in layer, then each form
      python tests/idea_table.py --seeds 4 --epochs 4        a quick look; options go to stage2_bench.py as they are
      python tests/idea_table.py --out-dir forms             keeps what is trained: started again, it goes on from there
Columns.  Mean test MSE at the form's best rate and its ratio to the baseline's; pairs (seeds) in which the form is
lower; exact two-sided sign-flip p against the baseline; mean of the form's own placebo, the same layer with h = 0.
All run in one folder with --resume, so the baseline trains once.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import stage2_bench as bench

HEADER = ["form", "parameters", "mean test MSE", "ratio", "pairs won", "exact p", "placebo mean"]


def find_ideas() -> dict[str, str]:
    """Return {form: "path.py:Class"} of tests/ideas, but for the base of all, which is the built-in form."""
    found = {}
    for path in sorted((HERE / "ideas").glob("*.py")):
        (name,) = re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        found[path.stem] = f"{path}:{name}"
    del found["kinetic"]
    return found


@contextlib.contextmanager
def kept_folder(given: str | None) -> Iterator[str]:
    """Yield the folder that the user gave, or one that is gone afterwards."""
    with contextlib.nullcontext(given) if given else tempfile.TemporaryDirectory() as folder:
        yield folder


def benchmark(options: Sequence[str], folder: str) -> dict:
    """Run the benchmark with these options and return its report.  Exits with the benchmark's status if it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        status = bench.main([*options, "--resume", "--out-dir", folder])
    if status:
        sys.exit(status)
    return json.loads(Path(folder, bench.REPORT).read_text(encoding="utf-8"))


def show(value: float | None, form: str) -> str:
    """Return a number of the table; a dash where there is none."""
    return "-" if value is None else format(value, form)


def compared(report: dict) -> tuple[str, str, str]:
    """Return a report's ratio of means, pairs won and exact p, as the table shows them."""
    means, block = (report["idea"]["mean"], report["baseline"]["full"]["mean"]), report["comparison"]
    ratio = None if None in means or not means[1] else means[0] / means[1]
    won = f"{block['idea_wins']} of {block['n_pairs']}"
    return show(ratio, ".2f"), won, show(report["extensions"]["statistics"]["p_exact"], ".4f")


def row(form: str, report: dict) -> list[str]:
    """Return the table's row of one form."""
    parameters = str(report["parameter_parity"]["idea"])
    placebo = report["extensions"]["placebo"].get("full", {}).get("mean")
    return [form, parameters, show(report["idea"]["mean"], ".4g"), *compared(report), show(placebo, ".4g")]


def baseline_row(report: dict) -> list[str]:
    """Return the row of the raw baseline, with which every form is compared."""
    mean = show(report["baseline"]["full"]["mean"], ".4g")
    return ["baseline (raw tokens)", str(report["parameter_parity"]["baseline"]), mean, "1.00", "", "", ""]


def line(cells: Sequence[str]) -> None:
    """Print a row of a Markdown table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table's rows as they become known."""
    parser = argparse.ArgumentParser(description="Tabulate the forms of the layer.", allow_abbrev=False)
    parser.add_argument("--out-dir", metavar="DIR", help="where the runs are kept (default: nowhere)")
    own, options = parser.parse_known_args(argv)
    with kept_folder(own.out_dir) as folder:
        built_in = benchmark(options, folder)
        line(HEADER)
        line(["---"] * len(HEADER))
        line(baseline_row(built_in))
        line(row("kinetic (built in)", built_in))
        for form, idea in find_ideas().items():
            line(row(f"`{form}.py`", benchmark([*options, "--idea", idea], folder)))


if __name__ == "__main__":
    main()
