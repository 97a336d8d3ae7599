"""How fast is the product beside the plain loop, for the same work, on this machine?  Prints a Markdown table.

The plain loop (tests/plain_loop.py) trains one run at a time on torch.nn.GRU with PyTorch's default threads; the
product trains stacks of runs in worker processes.  Every figure is taken in this one run, the two peers in turn, and is
the median of the repeats.  What is too slow to measure whole is measured on a share and scaled, and the table says so.

Run.  python tests/bench_speed.py             about 20 minutes on 2 cores
      python tests/bench_speed.py --quick     a check of the script itself: few seeds and epochs, one repeat

Training phase: build the data of every seed, train, and score the test and validation splits; raw and kinetic runs, no
placebo.  The product's workers have started and imported torch before the clock starts; so has the loop.
Whole command: a fresh process from start to exit.  The loop's does the same runs, placebo included, the signatures of
the idea and the closed loops of both models; only the product also does statistics, journal and report.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import plain_loop
import torch

import stage2_bench as bench

H = 0.08
PAIRS = (None, H)  # the step sizes of raw and kinetic runs
SWEEP = 4  # seeds with all learning rates; the others have the best one


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


# ---------------------------------------------------------------------------------------------------------------------
# The plain loop
# ---------------------------------------------------------------------------------------------------------------------


def rates_of(seed: int, sweep: int = SWEEP) -> tuple[float, ...]:
    """Return the learning rates that a seed is trained with."""
    return plain_loop.RATES if seed < sweep else plain_loop.RATES[-1:]


def loop_work(
    seeds: Sequence[int], epochs: int, steps: Sequence[float | None] = PAIRS, dtype: torch.dtype = torch.float64
) -> None:
    """Train and score the runs of the seeds one after the other."""
    for seed in seeds:
        data = plain_loop.make_data(seed, dtype)[0]
        for h in steps:
            for lr in rates_of(seed):
                model, _ = plain_loop.train(seed, lr, h, epochs, data, dtype)
                plain_loop.mse(model, data, "val")


def loop_command(count: int, epochs: int) -> None:
    """Do all that the whole command trains and probes: raw, kinetic and placebo runs, signatures and closed loops."""
    for seed in range(count):
        data, raw, scales = plain_loop.make_data(seed)
        for h in (None, H, 0.0):
            for lr in rates_of(seed):
                model, _ = plain_loop.train(seed, lr, h, epochs, data)
                plain_loop.mse(model, data, "val")
            if h != 0.0:  # the last rate is the best one
                plain_loop.closed_loop(model, data, raw, scales)
            if h == H:
                plain_loop.signature(model, data["test"][0][:256])


# ---------------------------------------------------------------------------------------------------------------------
# The product
# ---------------------------------------------------------------------------------------------------------------------


def product_runs(seeds: Sequence[int], steps: Sequence[float | None] = PAIRS) -> list[bench.Run]:
    """Return the runs that `loop_work` trains."""
    return [bench.Run(seed, lr, h if h is None else (h,)) for seed in seeds for h in steps for lr in rates_of(seed)]


@contextmanager
def started_pool(config: bench.Config, jobs: int) -> Iterator[bench.WorkerPool]:
    """Yield fresh workers (no data built) that have started and imported everything.

    Spawned, not forked: this process has used its OpenMP threads, which a forked child cannot.
    """
    with bench.WorkerPool(config, jobs, fork=False) as pool:
        for future in [worker.submit(torch.get_num_threads) for worker in pool.workers]:
            assert future.result() == 1
        yield pool


def product_work(
    config: bench.Config, jobs: int, count: int, steps: Sequence[float | None] = PAIRS
) -> tuple[float, float]:
    """Complete the runs of `count` seeds; returns seconds and the largest peak memory of a worker in MiB."""
    with started_pool(config, jobs) as pool:
        execution = bench.Execution(config, pool, jobs)
        runs = product_runs(range(count), steps)
        elapsed = seconds(execution.complete, runs)
        assert all(execution.records[run].score is not None for run in runs)
        return elapsed, max(worker.submit(peak_memory).result() for worker in pool.workers)


def peak_memory() -> float:
    """Return this process's peak resident memory in MiB (Linux; getrusage would count the parent's before the exec)."""
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


# ---------------------------------------------------------------------------------------------------------------------
# One core
# ---------------------------------------------------------------------------------------------------------------------


def step_flops(h: float | None, config: bench.Config, channels: int = bench.BUILT_IN_CHANNELS) -> float:
    """Return the matrix products' arithmetic of one run and step: two operations for each multiplication.

    A time step's forward pass multiplies (3 H, C + H) by (C + H, batch), and its weights' gradient is as large; the
    state's gradient takes (H, 3 H) by (3 H, batch), the tokens', which only the kinetic layer wants, (C, 3 H).  The
    zero initial state makes the recurrent part of the first step nothing, thrice.  Raw: 38.9 MFLOP.
    """
    column = 2 * config.batch * 3 * config.hidden
    recurrent = 3 * config.hidden * (config.length - 1)
    inputs = (2 if h is None else 3) * channels * config.length
    return float(column * (recurrent + inputs))


def matrix_peak(dtype: torch.dtype) -> float:
    """Return the operations a second of the best of several square torch.mm, on this process's threads."""
    best = 0.0
    for size in (256, 512, 1024):
        a, b = torch.randn(2, size, size, dtype=dtype)
        best = max(best, *(2 * size**3 / seconds(torch.mm, a, b) for _ in range(max(5, 2**31 // size**3))))
    return best


def one_core(config: bench.Config, epochs: int, repeats: int) -> dict[str, float]:
    """Return seconds a run and step, on one thread, of the plain loop and of a full stack, and the torch.mm peak."""
    assert torch.get_num_threads() == 1
    short, dtype = replace(config, epochs=epochs), config.torch_dtype
    steps = epochs * -(-config.size("train") // config.batch)
    found = {"peak": matrix_peak(dtype)}
    loop_data = plain_loop.make_data(0, dtype)[0]
    for name, h in (("raw", None), ("kinetic", H)):
        runs = [bench.Run(seed, 0.003, h if h is None else (h,)) for seed in range(bench.STACK)]
        model = bench.StackedModel(short, runs)
        times: dict[str, list[float]] = {"loop": [], "product": []}
        for _ in range(repeats + 1):
            if h is None or dtype == torch.float64:
                times["loop"].append(seconds(plain_loop.train, 0, 0.003, h, epochs, loop_data, dtype) / steps)
            times["product"].append(seconds(bench.train, model) / steps / len(runs))
        # The first time has warmed up caches and buffers.
        found |= {f"{peer} {name}": statistics.median(taken[1:]) for peer, taken in times.items() if taken}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def seconds(work: Callable, *arguments: object) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def run_command(*words: str) -> None:
    """Run Python with these arguments in a fresh process.  Raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, *words], check=True, cwd=HERE, stdout=subprocess.DEVNULL)


def product_command(size: Size, jobs: int) -> None:
    """Run the benchmark's whole command into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--seeds", str(size.few), "--epochs", str(size.epochs), "--jobs", str(jobs), "--quiet"]
        run_command(str(HERE.parent / "stage2_bench.py"), *options, "--out-dir", folder)


def repeat(size: Size, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the median of every number that `measure` gives."""
    taken = [measure() for _ in range(size.repeats)]
    return {name: statistics.median(one[name] for one in taken) for name in taken[0]}


def training_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure the training phase of both peers, in seconds, and the workers' memory, in MiB."""
    work = functools.partial(product_work, config, jobs)
    found = {"loop few": seconds(loop_work, range(size.few), size.epochs)}
    found["product few"], found["memory few"] = work(size.few)
    further = range(max(size.few, SWEEP), max(size.few, SWEEP) + size.share)  # seeds that no sweep trains
    found["loop share"] = seconds(loop_work, further, size.epochs)
    found["product more"], _ = work(size.more)
    found["product many"], found["memory many"] = work(size.many)
    return found


def float32_times(size: Size, config: bench.Config, jobs: int) -> dict[str, float]:
    """Measure the training phase in float32, of the raw runs."""
    single, raw = replace(config, dtype="float32"), (None,)
    loop = seconds(loop_work, range(size.few), size.epochs, raw, torch.float32)
    return {"loop": loop, "product": product_work(single, jobs, size.few, raw)[0]}


def command_times(size: Size, jobs: int) -> dict[str, float]:
    """Measure the whole command of both peers, in seconds."""
    code = f"import bench_speed; bench_speed.loop_command({size.few}, {size.epochs})"
    return {"loop": seconds(run_command, "-c", code), "product": seconds(product_command, size, jobs)}


def core_times(size: Size, config: bench.Config) -> dict[str, float]:
    """Measure both peers and the machine in a worker of one thread."""
    with started_pool(config, 1) as pool:
        return pool.workers[0].submit(one_core, config, min(4, size.epochs), 3 * size.repeats).result()


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def time_row(what: str, loop: float, product: float) -> list[str]:
    """Return a row of two times in seconds and how many times faster the product is."""
    return [what, f"{loop:.1f} s", f"{product:.1f} s", f"{loop / product:.1f}"]


def training_rows(size: Size, found: dict[str, float]) -> list[list[str]]:
    """Return the rows of the training phase: time, its growth with the seeds, and memory."""
    few, many = len(product_runs(range(size.few))), len(product_runs(range(size.many)))
    scaled = found["loop few"] + (size.many - size.few) * found["loop share"] / size.share
    first = (found["product more"] - found["product few"]) / (size.more - size.few)
    later = (found["product many"] - found["product more"]) / (size.many - size.more)
    note = f"loop: {size.few} seeds measured, further ones scaled from {size.share}"
    memory = f"{found['memory few']:.0f} / {found['memory many']:.0f} MiB"
    return [
        time_row(f"training phase, {size.few} seeds ({few} runs)", found["loop few"], found["product few"]),
        time_row(f"training phase, {size.many} seeds ({many} runs; {note})", scaled, found["product many"]),
        [
            f"a further seed, from {size.few} to {size.more} / from {size.more} to {size.many}",
            f"{found['loop share'] / size.share:.2f} s",
            f"{first:.3f} / {later:.3f} s",
            f"growth {later / first:.2f}",
        ],
        [
            f"peak memory of a worker, {size.few} / {size.many} seeds",
            "",
            memory,
            f"growth {found['memory many'] / found['memory few']:.2f}",
        ],
    ]


def core_rows(config: bench.Config, found: dict[str, float]) -> list[list[str]]:
    """Return the rows of one core: time of a run and step, and the share of the matrix products' peak."""
    rows = []
    for name, h in (("raw", None), ("kinetic", H)):
        loop, product = found.get(f"loop {name}"), found[f"product {name}"]
        flops, what = step_flops(h, config), f"one core, {config.dtype}, a run and step, {name}"
        times = ["" if loop is None else f"{1e3 * loop:.2f} ms", f"{1e3 * product:.2f} ms"]
        rows.append([what, *times, "" if loop is None else f"{loop / product:.1f}"])
        shares = ["" if t is None else f"{flops / t / found['peak']:.0%}" for t in (loop, product)]
        rows.append(
            [f"its {flops / 1e6:.1f} MFLOP as share of {found['peak'] / 1e9:.0f} GFLOP/s (torch.mm)", *shares, ""]
        )
    return rows


def progress(text: str) -> None:
    """Say on stderr what is being measured."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description="Measure the product beside the plain loop; prints a Markdown table.")
    parser.add_argument("--quick", action="store_true", help="few seeds and epochs: a check of the script itself")
    parser.add_argument("--jobs", type=int, default=bench.available_cpus(), help="worker processes (default: the CPUs)")
    options = parser.parse_args(argv)
    size = QUICK if options.quick else Size()
    config = bench.Config(epochs=size.epochs)

    progress("one core")
    core = [core_times(size, each) for each in (config, replace(config, dtype="float32"))]
    progress("training phase, float64")
    training = repeat(size, functools.partial(training_times, size, config, options.jobs))
    progress("training phase, float32")
    single = repeat(size, functools.partial(float32_times, size, config, options.jobs))
    progress("whole command")
    command = repeat(size, functools.partial(command_times, size, options.jobs))

    raw_runs = len(product_runs(range(size.few), (None,)))
    rows = [
        ["figure", f"plain loop, {torch.get_num_threads()} threads", f"product, {options.jobs} workers", "ratio"],
        ["---"] * 4,
        *training_rows(size, training),
        time_row(f"training phase, float32, {raw_runs} raw runs", single["loop"], single["product"]),
        time_row(f"whole command, {size.few} seeds, {size.epochs} epochs", command["loop"], command["product"]),
        *core_rows(config, core[0]),
        *core_rows(replace(config, dtype="float32"), core[1]),
    ]
    print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"\n{bench.machine_line(options.jobs)}; medians of {size.repeats}; load of the machine at the end {load}.")


if __name__ == "__main__":
    main()
