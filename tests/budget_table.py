"""Does the verdict survive a larger budget?  Prints a Markdown table over epochs and learning rates.

Run.  python tests/budget_table.py                                  16, 64 and 256 epochs: about a quarter of an hour
      python tests/budget_table.py --idea tests/ideas/residual.py:Residual
      python tests/budget_table.py --epochs 4 8 --seeds 4           other budgets; options go to stage2_bench.py
      python tests/budget_table.py --out-dir budgets                keeps what is trained, for the next time
Rows.  Each number of epochs with the grid of rates as it is, and with the grid that grows until no best rate is at its
edge (--lrs auto).  All run in one folder with --resume, the fewest epochs first, so that each budget only adds epochs.
"""

import argparse
from collections.abc import Sequence

from idea_table import benchmark, compared, kept_folder, line, show

EPOCHS = (16, 64, 256)
HEADER = [
    *("epochs", "rates tried", "best rate, baseline / idea", "baseline", "idea"),
    *("ratio", "pairs won", "exact p", "verdict", "linear floor"),
]


def row(report: dict) -> list[str]:
    """Return the table's row of one report."""
    extra, rates = report["extensions"], report["baseline"]["union_lr_grid"]
    best = [report["baseline"]["best_cfg"]["lr"], report["best_idea_cfg"]["lr"]]
    return [
        str(extra["options"]["epochs"]),
        f"{rates[0]} to {rates[-1]}{' (auto)' if extra['options']['lr_search'] == 'auto' else ''}",
        " / ".join(map(str, best)),
        show(report["baseline"]["full"]["mean"], ".4g"),
        show(report["idea"]["mean"], ".4g"),
        *compared(report),
        report["comparison"]["verdict"],
        show(extra["floors"]["linear"]["mean"], ".4g"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table's rows as they become known."""
    parser = argparse.ArgumentParser(description="Tabulate the verdict over budgets.", allow_abbrev=False)
    parser.add_argument("--epochs", type=int, nargs="+", default=EPOCHS, metavar="N", help="default: 16 64 256")
    parser.add_argument("--out-dir", metavar="DIR", help="where the runs are kept (default: nowhere)")
    own, options = parser.parse_known_args(argv)
    line(HEADER)
    line(["---"] * len(HEADER))
    with kept_folder(own.out_dir) as folder:
        for epochs in sorted(own.epochs):
            for rates in ([], ["--lrs", "auto"]):
                line(row(benchmark([*options, "--epochs", str(epochs), *rates], folder)))


if __name__ == "__main__":
    main()
