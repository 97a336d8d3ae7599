"""How fast is the product beside the plain loop, for the same work, on this machine?  Prints a Markdown table.

The plain loop (tests/plain_loop.py) trains one run at a time on torch.nn.GRU with PyTorch's default threads; the
product trains groups of runs in worker processes.  Every figure is taken in this one run, the two peers in turn, and is
the median of the repeats.  What is too slow to measure whole is measured on a share and scaled, and the table says so.

Run.  python tests/bench_speed.py             about 10 minutes on 2 cores
      python tests/bench_speed.py --quick     a check of the script itself: few seeds and epochs, one repeat

Training phase: build the data of every seed, train (with the learning curve), and score the test and validation splits;
raw and kinetic runs, no placebo.  The product also saves its runs.  Both peers have imported torch before the clock
starts, the product in every worker.
Whole command: a fresh process from start to exit.  The loop's does the same runs, placebo included, and measures of
them what the command does: floors, closed loops, signatures before and after training, knockouts.  Only the product
also does statistics, the operator alone, store, report and log.
"""

import argparse
import functools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import plain_loop
import torch

import stage2_bench as bench

H = 0.08
PAIRS = (None, H)  # the step sizes of raw and kinetic runs
SWEEP = 4  # seeds with all learning rates; the others have the best one
TOGETHER = 16  # runs that the product trains side by side


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    few: int = 8  # seeds of the default
    more: int = 16  # seeds, to see what a further one costs
    many: int = 64  # seeds of a large study
    share: int = 4  # seeds of which the loop's time is scaled to `many`
    epochs: int = 16
    repeats: int = 3


QUICK = Size(few=4, more=6, many=12, share=1, epochs=2, repeats=1)


def seconds(work: Callable, *arguments: object) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def rates_of(seed: int) -> tuple[float, ...]:
    """Return the learning rates that a seed is trained with."""
    return plain_loop.RATES if seed < SWEEP else plain_loop.RATES[-1:]


def loop_work(seeds: Sequence[int], epochs: int, steps: Sequence[float | None], dtype: torch.dtype) -> None:
    """Train and score the runs of the seeds one after the other."""
    for seed in seeds:
        data = plain_loop.make_data(seed, dtype)[0]
        for h in steps:
            for lr in rates_of(seed):
                model, _ = plain_loop.train(seed, lr, h, epochs, data, dtype)
                plain_loop.mse(model, data, "val")


def loop_command(count: int, epochs: int) -> None:
    """Do all that the whole command trains and measures."""
    for seed in range(count):
        data, raw, scales = plain_loop.make_data(seed)
        first = data["test"][0][:256]
        plain_loop.floors(data, raw, scales)
        plain_loop.closed_loop_floors(raw, scales)
        for h in (*PAIRS, 0.0):
            for lr in rates_of(seed):
                model, _ = plain_loop.train(seed, lr, h, epochs, data)
                plain_loop.mse(model, data, "val")
            if h in PAIRS:  # the last rate is the best one
                plain_loop.closed_loop(model, data, raw, scales)
            if h == H:
                plain_loop.knockout(model, data)
                plain_loop.signature(model, first)
                plain_loop.signature(plain_loop.Model(seed, h), first)


@contextmanager
def started(jobs: int) -> Iterator[Callable]:
    """Yield `over` of fresh workers (no data built) that have started and imported everything.

    Spawned, not forked: this process has used its OpenMP threads, which a forked child cannot.
    """
    with bench.workers(SimpleNamespace(tick=lambda count: None), jobs, fork=False) as over:
        list(over(peak_memory, [[]] * jobs))
        yield over


def peak_memory(group: object, tick: object) -> float:
    """Return a worker's peak resident memory in MiB (Linux; getrusage would count the parent's before the exec)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def product_work(config: bench.Config, jobs: int, count: int, steps: Sequence[float | None]) -> tuple[float, float]:
    """Train and score the runs of `count` seeds; returns seconds and the largest peak memory of a worker in MiB."""
    found = {}

    def train() -> None:
        store = bench.Store(config, Path(folder), False, {})
        for records in over(functools.partial(bench.train_runs, config, store), bench.plan(runs, jobs)):
            found.update(records)

    cells = [(seed, h, lr) for seed in range(count) for h in steps for lr in rates_of(seed)]
    runs = [(bench.Run(seed, lr, h if h is None else (h,)), None) for seed, h, lr in cells]
    with tempfile.TemporaryDirectory() as folder, started(jobs) as over:
        elapsed = seconds(train)
        assert len(found) == len(runs) and all(record.score is not None for record in found.values())
        return elapsed, max(over(peak_memory, [[]] * jobs))


def training_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure the training phase of both peers, in seconds, and the workers' memory, in MiB."""
    loop = functools.partial(loop_work, epochs=size.epochs, steps=PAIRS, dtype=config.torch_dtype)
    found = {"loop few": seconds(loop, range(size.few))}
    found["product few"], found["memory few"] = product_work(config, jobs, size.few, PAIRS)
    further = max(size.few, SWEEP)  # the first seed of those that no sweep trains
    found["loop share"] = seconds(loop, range(further, further + size.share))
    found["product more"], _ = product_work(config, jobs, size.more, PAIRS)
    found["product many"], found["memory many"] = product_work(config, jobs, size.many, PAIRS)
    return found


def float32_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure the training phase in float32, of the raw runs."""
    loop = seconds(loop_work, range(size.few), size.epochs, (None,), torch.float32)
    return {"loop": loop, "product": product_work(replace(config, dtype="float32"), jobs, size.few, (None,))[0]}


def command_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure the whole command of both peers in fresh processes, in seconds."""

    def run(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, cwd=HERE, stdout=subprocess.DEVNULL)

    loop = seconds(run, "-c", f"import bench_speed; bench_speed.loop_command({size.few}, {size.epochs})")
    with tempfile.TemporaryDirectory() as folder:
        options = f"--seeds {size.few} --epochs {size.epochs} --jobs {jobs} --quiet --out-dir {folder}"
        return {"loop": loop, "product": seconds(run, str(HERE.parent / "stage2_bench.py"), *options.split())}


def core_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure both peers and the machine in a worker of one thread."""
    with started(1) as over:
        (found,) = over(functools.partial(one_core, replace(config, epochs=min(4, size.epochs)), size.repeats), [[]])
    return found


def one_core(config: bench.Config, repeats: int, group: object, tick: object) -> dict[str, float]:
    """Return seconds a run and step of the plain loop and of a full group, and torch.mm's peak.

    The time of a short training, less that of the test scores it takes on its way: the learning curve's after epochs
    1, 2, 4, ... and, in the loop, one of the whole split at the end.
    """
    assert torch.get_num_threads() == 1
    dtype, steps = config.torch_dtype, config.epochs * -(-plain_loop.SIZES["train"] // config.batch)
    data, found, curve = (
        plain_loop.make_data(0, dtype)[0],
        {"peak": matrix_peak(dtype)},
        [256] * config.epochs.bit_length(),
    )

    def loop(h: float | None) -> float:
        model = plain_loop.Model(0, h).to(dtype)
        scores = sum(seconds(plain_loop.mse, model, data, "test", count) for count in (*curve, None))
        return (seconds(plain_loop.train, 0, 0.003, h, config.epochs, data, dtype) - scores) / steps

    def product(model: bench.Model) -> float:
        scores = sum(seconds(bench.evaluate, model, "test", count) for count in curve)
        return (seconds(list, bench.Training(model).run()) - scores) / steps / TOGETHER

    for name, h in (("raw", None), ("kinetic", H)):
        with bench.computing(config):
            runs = [bench.Run(seed, 0.003, h if h is None else (h,)) for seed in range(TOGETHER)]
            model, times = bench.Model(config, runs), {"loop": [], "product": []}
            for _ in range(3 * repeats + 1):  # the first time warms up caches and buffers
                if h is None or dtype == torch.float64:
                    times["loop"].append(loop(h))
                times["product"].append(product(model))
        found |= {f"{peer} {name}": statistics.median(taken[1:]) for peer, taken in times.items() if taken}
    return found


def matrix_peak(dtype: torch.dtype) -> float:
    """Return the operations a second of the best of several square torch.mm, on this process's threads."""
    best = 0.0
    for size in (256, 512, 1024):
        a, b = torch.randn(2, size, size, dtype=dtype)
        best = max(best, *(2 * size**3 / seconds(torch.mm, a, b) for _ in range(max(5, 2**31 // size**3))))
    return best


def step_flops(h: float | None, config: bench.Config) -> float:
    """Return the matrix products' arithmetic of one run and step: two operations for each multiplication.

    A time step's forward pass multiplies (3 H, C + H) by (C + H, batch), and its weights' gradient is as large; the
    state's gradient takes (H, 3 H) by (3 H, batch), the tokens', which only the kinetic layer wants, (C, 3 H).  The
    zero initial state makes the recurrent part of the first step nothing, thrice.  Raw: 38.9 MFLOP.
    """
    recurrent, inputs = 3 * config.hidden * (config.length - 1), (2 if h is None else 3) * 3 * config.length
    return 2.0 * config.batch * 3 * config.hidden * (recurrent + inputs)


def time_row(what: str, loop: float, product: float) -> list[str]:
    """Return a row of two times in seconds and how many times faster the product is."""
    return [what, f"{loop:.1f} s", f"{product:.1f} s", f"{loop / product:.1f}"]


def training_rows(size: Size, found: dict[str, float]) -> list[list[str]]:
    """Return the rows of the training phase: time, its growth with the seeds, and memory."""
    few, many = (len(PAIRS) * sum(len(rates_of(seed)) for seed in range(count)) for count in (size.few, size.many))
    scaled = found["loop few"] + (size.many - size.few) * found["loop share"] / size.share
    first = (found["product more"] - found["product few"]) / (size.more - size.few)
    later = (found["product many"] - found["product more"]) / (size.many - size.more)
    note = f"loop: {size.few} seeds measured, further ones scaled from {size.share}"
    further = f"a further seed, from {size.few} to {size.more} / from {size.more} to {size.many}"
    peak, growth = (
        f"peak memory of a worker, {size.few} / {size.many} seeds",
        found["memory many"] / found["memory few"],
    )
    memory = f"{found['memory few']:.0f} / {found['memory many']:.0f} MiB"
    return [
        time_row(f"training phase, {size.few} seeds ({few} runs)", found["loop few"], found["product few"]),
        time_row(f"training phase, {size.many} seeds ({many} runs; {note})", scaled, found["product many"]),
        [
            further,
            f"{found['loop share'] / size.share:.2f} s",
            f"{first:.3f} / {later:.3f} s",
            f"growth {later / first:.2f}",
        ],
        [peak, "", memory, f"growth {growth:.2f}"],
    ]


def core_rows(config: bench.Config, found: dict[str, float]) -> list[list[str]]:
    """Return the rows of one core: time of a run and step, and the share of the matrix products' peak."""
    rows = []
    for name, h in (("raw", None), ("kinetic", H)):
        loop, product, flops = found.get(f"loop {name}"), found[f"product {name}"], step_flops(h, config)
        times = ["" if t is None else f"{1e3 * t:.2f} ms" for t in (loop, product)]
        shares = ["" if t is None else f"{flops / t / found['peak']:.0%}" for t in (loop, product)]
        ratio = "" if loop is None else f"{loop / product:.1f}"
        rows.append([f"one core, {config.dtype}, a run and step, {name}", *times, ratio])
        rows.append(
            [f"its {flops / 1e6:.1f} MFLOP as share of {found['peak'] / 1e9:.0f} GFLOP/s (torch.mm)", *shares, ""]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="Measure the product beside the plain loop; prints a Markdown table.")
    parser.add_argument("--quick", action="store_true", help="few seeds and epochs: a check of the script itself")
    parser.add_argument("--jobs", type=int, default=bench.available_cpus(), help="worker processes (default: the CPUs)")
    options = parser.parse_args(argv)
    size, jobs = QUICK if options.quick else Size(), options.jobs
    config = bench.Config(epochs=size.epochs)
    single = replace(config, dtype="float32")

    def median(what: str, measure: Callable, config: bench.Config, repeats: int = size.repeats) -> dict[str, float]:
        print(what, file=sys.stderr, flush=True)
        taken = [measure(size, config, jobs) for _ in range(repeats)]
        return {name: statistics.median(one[name] for one in taken) for name in taken[0]}

    training = median("training phase, float64", training_times, config)
    raw = median("training phase, float32", float32_times, config)
    command = median("whole command", command_times, config)
    runs = sum(len(rates_of(seed)) for seed in range(size.few))
    rows = [
        ["figure", f"plain loop, {torch.get_num_threads()} threads", f"product, {jobs} workers", "ratio"],
        ["---"] * 4,
        *training_rows(size, training),
        time_row(f"training phase, float32, {runs} raw runs", raw["loop"], raw["product"]),
        time_row(f"whole command, {size.few} seeds, {size.epochs} epochs", command["loop"], command["product"]),
        *core_rows(config, median("one core, float64", core_times, config, 1)),
        *core_rows(single, median("one core, float32", core_times, single, 1)),
    ]
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    machine = f"{platform.system()} {platform.machine()}, {bench.available_cpus()} CPUs"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\n{machine}; {versions}; medians of {size.repeats}; load of the machine at the end {load}.")


if __name__ == "__main__":
    main()
