"""Runs over cores and hosts: the same digits everywhere, nothing lost by a kill, nothing left behind.

Real processes and real signals; every wait is bounded.  `tiny_track` is a custom track that trains in a moment, so
that a subprocess costs little more than its imports.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy._core import _multiarray_umath

import stage2_bench as bench

SCRIPT = Path(bench.__file__).resolve()
SMOKE = SCRIPT.parent / "tests" / "smoke_report.json"
PYTHON = sys.executable
PATIENCE = 100  # seconds until a process counts as hung: many times what each one needs
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "TORCHELASTIC", "PYTHON"))}

TINY = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.standard_normal((24, 8, 2))
    return tokens, tokens[:, -1, 0]
"""

# A layer that can be told, by environment variables, to fail or die on one rank in the middle of the training.
FRAGILE = """
import os, pathlib, signal
import torch

class Fragile(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(channels))

    def forward(self, tokens):
        if os.environ.get("RANK") == "1" and len(tokens) > 4:
            if "FAIL" in os.environ:
                raise ArithmeticError("planted failure")
            journal = pathlib.Path(os.environ.get("DIE_AFTER", "/nonexistent"))
            if journal.exists() and journal.stat().st_size:
                os.kill(os.getpid(), signal.SIGKILL)
        return tokens * self.scale
"""


@pytest.fixture(scope="module")
def tiny_track(tmp_path_factory):
    """The path of a custom track of 24 short sequences."""
    path = tmp_path_factory.mktemp("track") / "tiny.py"
    path.write_text(TINY)
    return str(path)


@dataclasses.dataclass
class Ended:
    """What is left of a process: exit status, both outputs, and its session's processes that outlived it."""

    status: int
    out: str
    err: str
    survivors: list[int]


def start(command, cwd=None, **environment):
    """Start a command in a session of its own, so that its whole family can be found."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=CLEAN | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def family(session):
    """Return the live processes (no zombies) of a session, {pid: parent}."""
    found = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, owner = place.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state not in "ZX":
                found[int(place.parent.name)] = int(parent)
    return found


def until(condition, seconds=60):
    """Wait for a condition and return its last value."""
    limit = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < limit:
        time.sleep(0.02)
    return value


def finish(process, seconds=PATIENCE):
    """Wait for the end of a process; what outlives it by five seconds is a survivor, and is ended."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = "", "HUNG"
    until(lambda: not family(process.pid), 5)
    survivors = sorted(family(process.pid))
    if survivors:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, out, err, survivors)


def script(*options):
    """Return the command of the script as a user types it."""
    return [PYTHON, SCRIPT, *options]


def torchrun(ranks, *options, launcher=()):
    """Return the script's command under torchrun."""
    return [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", ranks, *launcher, SCRIPT, *options]


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


POOL = concurrent.futures.ThreadPoolExecutor(2)  # scenarios at a time: the tests are to fit two cores


class Later(dict):
    """Named scenarios that run in the background, two at a time; looking one up waits for its result."""

    def __init__(self, scenarios):
        super().__init__({name: POOL.submit(scenario) for name, scenario in scenarios.items()})

    def __getitem__(self, name):
        return super().__getitem__(name).result()


def start_early(request, *fixtures):
    """Start the scenarios of the selected tests' fixtures now, so that they run beside the tests in this process."""
    chosen = {name for item in request.session.items if item.path == request.path for name in item.fixturenames}
    for name in fixtures:
        if name in chosen:
            request.getfixturevalue(name)


@contextlib.contextmanager
def one_thread():
    """Compute on one thread, as the script does: two would fight with the processes in the background."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def background(request):
    """Begin with all processes that the selected tests look at."""
    start_early(request, "smokes", "clusters", "kills")
    with one_thread():
        yield


def report_of(folder):
    """Return the bytes of a folder's report."""
    return (Path(folder) / bench.REPORT).read_bytes()


def journal_lines(folder):
    """Return the whole lines of a folder's journal."""
    path = Path(folder) / bench.JOURNAL
    return path.read_bytes().splitlines() if path.exists() else []


def trained(lines):
    """Return the names of the runs in journal lines."""
    return {json.loads(line.split(b" ", 1)[1])["run"] for line in lines}


# The same digits ------------------------------------------------------------------------------------------------------


def other_machine():
    """Return the environment that stands in for a processor without vector units."""
    features, dispatched = _multiarray_umath.__cpu_features__, _multiarray_umath.__cpu_dispatch__
    numpy_off = " ".join(name for name in dispatched if features.get(name))
    return {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "NPY_DISABLE_CPU_FEATURES": numpy_off}


# each condition that must not matter is in one of them; two share a run where that costs no insight
CONDITIONS = {
    "torchrun 2 ranks, other machine": (functools.partial(torchrun, 2), (), other_machine()),
    "torchrun 3 ranks": (functools.partial(torchrun, 3), (), {}),
    "torchrun 1 rank, OMP 4": (functools.partial(torchrun, 1), (), {"OMP_NUM_THREADS": "4"}),
    "3 jobs, OMP 1": (script, ("--jobs", 3), {"OMP_NUM_THREADS": "1"}),
    "one CPU": (lambda *words: ["taskset", "-c", min(os.sched_getaffinity(0)), *script(*words)], (), {}),
}


@pytest.fixture(scope="module")
def smokes(tmp_path_factory):
    """The smoke under every condition: {name: (Ended, folder)}."""
    base = tmp_path_factory.mktemp("smokes")

    def smoke(name):
        command, options, environment = CONDITIONS[name]
        folder = base / name.replace(" ", "_")
        ended = finish(start(command("--smoke", "--quiet", "--out-dir", folder, *options), base, **environment))
        return ended, folder

    return Later({name: functools.partial(smoke, name) for name in CONDITIONS})


@pytest.mark.parametrize("condition", CONDITIONS)
def test_report_is_byte_identical(smokes, condition):
    """The smoke's report is the committed one to the byte, however its runs were shared out."""
    ended, folder = smokes[condition]
    assert (ended.status, ended.survivors) == (0, []), ended.err
    assert report_of(folder) == SMOKE.read_bytes()


def test_only_rank_zero_prints(smokes):
    """Three ranks print one log."""
    ended, _ = smokes["torchrun 3 ranks"]
    assert ended.out.count("Verdict: ") == 1


def test_one_cpu_means_one_process(smokes):
    """Without --jobs, the affinity mask decides."""
    ended, _ = smokes["one CPU"]
    assert "1 CPUs, 1 processes" in ended.out


def test_spawned_workers_give_the_same_report(tmp_path, capfd):
    """Called from a module that imported the script, `main` spawns: macOS's and Windows's way to start workers."""
    assert bench.main(["--smoke", "--jobs", "2", "--out-dir", str(tmp_path)]) == 0
    assert report_of(tmp_path) == SMOKE.read_bytes()
    assert "2 processes" in capfd.readouterr().out


SMALL = dataclasses.replace(
    bench.Config(), sizes=(64, 32, 16), epochs=1, sweep_seeds=2, lrs=(0.003,), rollout_steps=4, horizons=(1, 4)
)


@functools.cache
def small_outcome(**changes):
    """Run a small benchmark in this process, once for each set of changes."""
    config = dataclasses.replace(SMALL, **changes)
    return bench.benchmark(config, bench.Execution(config, bench.Alone(config), 1))


@pytest.mark.parametrize("name", ["baseline", "idea", "placebo"])
def test_scores_do_not_depend_on_what_runs_beside(name):
    """The scores of 3 seeds are the first three of 8, and stay themselves beside other learning rates."""
    many = getattr(small_outcome(seeds=tuple(range(8))), name)
    few = getattr(small_outcome(seeds=(0, 1, 2)), name)
    wide = getattr(small_outcome(seeds=(0, 1, 2), lrs=(1e-9, 0.003)), name)
    assert few.scores == many.scores[:3]
    assert wide.best[0] == 0.003
    assert wide.scores == few.scores
    assert len(set(many.scores)) == 8


@pytest.mark.parametrize("h", [None, (0.08,), (0.02, 0.3)])
def test_a_run_is_the_same_alone_and_in_a_stack(h):
    """Beside runs of other seeds and rates (and steps), a run has the printed score that it has alone."""
    mixed = [bench.Run(s, lr, h and tuple(x * (1 + s) for x in h)) for s, lr in ((5, 0.003), (0, 0.01), (2, 0.003))]
    together = bench.complete(SMALL, bench.Stack(tuple(mixed), frozenset()))
    for run in mixed:
        alone = bench.complete(SMALL, bench.Stack((run,), frozenset()))[run]
        assert bench.printed(together[run].score) == bench.printed(alone.score)


def test_fresh_seeds_are_seeds_of_their_own():
    """Seed 2 scores the same as the third of three and as the first of a replication on seeds 2..3."""
    first, later = small_outcome(seeds=(0, 1, 2)), small_outcome(seeds=(2, 3))
    assert later.idea.scores[0] == first.idea.scores[2]


def many_runs(seeds, lrs, hs):
    """Return every run of a grid, baseline included."""
    return [bench.Run(s, 0.001 * (1 + i), h) for s in range(seeds) for i in range(lrs) for h in (None, *hs)]


@given(
    seeds=st.integers(1, 40),
    lrs=st.integers(1, 4),
    hs=st.lists(st.sampled_from([(0.0,), (0.08,), (0.02, 0.08)]), unique=True),
    jobs=st.integers(1, 70),
)
def test_plan_shares_every_run_once_and_evenly(seeds, lrs, hs, jobs):
    """Each run is in one group, no group exceeds STACK, has two depths of layers, or twice its sibling's size."""
    runs = many_runs(seeds, lrs, hs)
    groups = bench.plan(bench.Config(), runs, jobs)
    assert sorted(map(str, sum(groups, ()))) == sorted(map(str, runs))
    assert all(0 < len(group) <= bench.STACK for group in groups)
    depths = [{len(run.h or ()) for run in group} for group in groups]
    assert all(len(depth) == 1 for depth in depths)
    for depth in ({0}, {1}, {2}):
        sizes = [len(group) for group, own in zip(groups, depths, strict=True) if own == depth]
        assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_plan_keeps_every_worker_busy(jobs):
    """The default sweep goes to the workers in equal parts: no worker has more than one run above another."""
    config = bench.Config()
    runs = [bench.Run(s, lr, h) for s in config.sweep for grid in bench.grids(config).values() for lr, h in grid]
    shares = [0] * jobs
    for group in sorted(bench.plan(config, runs, jobs), key=len, reverse=True):
        shares[shares.index(min(shares))] += len(group)
    assert max(shares) - min(shares) <= 2
    assert sum(shares) == 36


def test_plan_of_nothing_is_empty():
    """Where a journal has every run, there is nothing to share out."""
    assert bench.plan(bench.Config(), [], 4) == []


CPUS = """
import os, pathlib, sys
import stage2_bench as bench
fake, all_cpus = pathlib.Path(sys.argv[1]), len(os.sched_getaffinity(0))
found = [bench.available_cpus()]
for v2, v1 in (("max 100000", None), ("100000 100000", None), ("50000 100000", None), (None, "100000"), (None, "-1")):
    for file, text in ((fake / "cpu.max", v2), (fake / "cpu" / "cpu.cfs_quota_us", v1)):
        file.write_text(text) if text else file.unlink(missing_ok=True)
    found.append(bench.available_cpus())
print(all_cpus, *found)
"""


def test_container_quota_limits_the_workers(tmp_path):
    """A container's CPU quota counts, version 2 and 1, at least one CPU; the files are faked by a private mount."""
    fake, empty = tmp_path / "cgroup", tmp_path / "empty"
    (fake / "cpu").mkdir(parents=True)
    empty.mkdir()
    (fake / "cpu" / "cpu.cfs_period_us").write_text("100000")
    mount = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /sys/fs/cgroup && shift 0 && exec "$@"', fake]
    if not shutil.which("unshare") or finish(start([*mount, "true"])).status:
        pytest.skip("this machine allows no private mounts")
    ended = finish(start([*mount, PYTHON, "-c", CPUS, fake], empty, PYTHONPATH=str(SCRIPT.parent)))
    assert ended.status == 0, ended.err
    assert ended.err == ""
    n = int(ended.out.split()[0])
    assert list(map(int, ended.out.split()[1:])) == [n, n, 1, 1, 1, n]


def test_available_cpus_respects_affinity():
    """A process that is bound to one CPU has one."""
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert bench.available_cpus() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_idle_worker_killed_is_a_run_error():
    """A worker that dies between two rounds is reported as one that dies at work, and nothing hangs."""
    config = dataclasses.replace(SMALL, epochs=1)
    stack = bench.Stack((bench.Run(0, 0.003, None),), frozenset())
    with bench.WorkerPool(config, 1, fork=False) as pool:
        assert len(list(pool.run([stack]))) == 1
        for pid in pool.workers[0]._processes:
            os.kill(pid, signal.SIGKILL)
        broken = until(lambda: pool.workers[0]._broken, 10)
        assert broken
        with pytest.raises(bench.RunError, match=r"baseline lr 0\.003 seed 0.*--resume"):
            list(pool.run([stack]))


# torchrun -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_reference(tiny_track, tmp_path_factory):
    """Return a function: the report of options on the tiny track, by this very process, one run after the other."""

    def reference(*options):
        folder = tmp_path_factory.mktemp("reference")
        words = ["--track", tiny_track, "--jobs", "1", "--quiet", "--out-dir", folder, *options]
        assert bench.main([str(word) for word in words]) == 0
        return report_of(folder)

    return reference


@pytest.fixture(scope="module")
def clusters(tiny_track, tmp_path_factory):
    """Scenarios under torchrun: a rank that fails, one that is killed and a resume, two hosts."""
    base = tmp_path_factory.mktemp("clusters")
    idea = base / "fragile.py"
    idea.write_text(FRAGILE)
    tiny = ("--track", tiny_track, "--epochs", 1, "--lrs", 0.003, "--quiet")
    fragile = (*tiny, "--seeds", 2, "--sweep-seeds", 1, "--idea", f"{idea}:Fragile")

    def failing():
        return finish(start(torchrun(2, *fragile, "--out-dir", base / "failing"), base, FAIL="1"))

    def killed():
        folder = base / "killed"
        first = torchrun(2, *fragile, "--out-dir", folder)
        ended = finish(start(first, base, DIE_AFTER=str(folder / bench.JOURNAL)))
        before = journal_lines(folder)
        again = finish(start(torchrun(3, *fragile, "--resume", "--out-dir", folder), base))
        return ended, again, folder, before

    def hosts():
        port = free_port()
        agents = [
            start(
                torchrun(
                    2,
                    *(*tiny, "--seeds", 1, "--out-dir", base / f"host{rank}"),
                    launcher=("--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port),
                ),
                base,
            )
            for rank in range(2)
        ]
        return [finish(agent) for agent in agents], base

    scenarios = {"killed": killed, "failing": failing, "hosts": hosts}
    return Later(scenarios | {"fragile options": lambda: fragile})


def test_failing_rank_fails_the_run_with_its_error(clusters):
    """An exception on rank 1 ends every rank, and its text is on stderr; nobody waits for ever."""
    ended = clusters["failing"]
    assert ended.status == 1
    assert "rank 1: ArithmeticError: planted failure" in ended.err
    assert ended.survivors == []


def test_killed_rank_ends_the_run(clusters):
    """SIGKILL to one rank: the run stops, says that --resume goes on, and leaves no rank."""
    ended, _, _, before = clusters["killed"]
    assert ended.status == 1
    assert "--resume goes on" in ended.err
    assert ended.survivors == []
    assert 0 < len(before) < 6


def test_resume_under_torchrun_gives_the_same_report(clusters, tiny_reference):
    """More ranks than before go on from the journal to the report of an uninterrupted run."""
    _, again, folder, before = clusters["killed"]
    assert again.status == 0, again.err
    assert report_of(folder) == tiny_reference(*clusters["fragile options"][2:])
    assert journal_lines(folder)[: len(before)] == before


def test_two_hosts_give_the_same_report(clusters, tiny_reference):
    """Two torchrun agents over the loopback, with more ranks (4) than stacks (3): rank 0's host alone writes."""
    agents, base = clusters["hosts"]
    assert [agent.status for agent in agents] == [0, 0], agents[0].err + agents[1].err
    assert report_of(base / "host0") == tiny_reference("--epochs", 1, "--lrs", 0.003, "--seeds", 1)
    assert not (base / "host1").exists()


# Journal and resume ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_run(tiny_track, tmp_path, capsys):
    """Return a function that runs the script on the tiny track in tmp_path and gives (status, stderr)."""

    def go(*options):
        words = ["--track", tiny_track, "--seeds", "2", "--epochs", "1", "--jobs", "1", "--quiet"]
        status = bench.main([*words, "--out-dir", str(tmp_path), *options])
        return status, capsys.readouterr().err

    return go


def test_resume_of_a_finished_run_trains_nothing(tiny_run, tmp_path):
    """Everything is in the journal: the same report, and no new line."""
    assert tiny_run() == (0, "")
    report, lines = report_of(tmp_path), journal_lines(tmp_path)
    assert len(trained(lines)) == 18
    assert tiny_run("--resume") == (0, "")
    assert report_of(tmp_path) == report
    assert journal_lines(tmp_path) == lines


def flip(line):
    """Change one digit of a line's score, as a bad disk would: the line stays JSON."""
    at = line.index(b'"score": 0.') + len(b'"score": 0.') if b'"score": 0.' in line else line.index(b'"score": 1.') + 11
    return line[:at] + (b"7" if line[at : at + 1] != b"7" else b"3") + line[at + 1 :]


@pytest.mark.parametrize(
    ("harm", "lost"),
    [
        (lambda lines: b"\n".join([*lines[:-1], lines[-1][: len(lines[-1]) // 2]]), 1),
        (lambda lines: b"\n".join([lines[0], flip(lines[1]), *lines[2:], b""]), 1),
        (lambda lines: b"\n".join([b"\xff\x00 rubbish", *lines, b""]), 0),
        (lambda lines: b"\n".join([flip(lines[0]), *lines[1:-1], lines[-1][:20]]), 2),
    ],
    ids=["torn end", "corrupt middle", "foreign line", "both"],
)
def test_torn_and_corrupt_lines_alone_are_trained_again(tiny_run, tmp_path, harm, lost):
    """A bad line is skipped with a warning; only its run trains again; the next resume finds all whole."""
    tiny_run()
    report, lines = report_of(tmp_path), journal_lines(tmp_path)
    path = tmp_path / bench.JOURNAL
    # only first records, which were trained: a probe adds a second line for its run
    first = [line for i, line in enumerate(lines) if trained([line]).isdisjoint(*[trained(lines[:i])])]
    path.write_bytes(harm(first))
    damaged = path.read_bytes()
    status, err = tiny_run("--resume")
    assert status == 0
    assert len(err.splitlines()) == 1
    assert "warning" in err and bench.JOURNAL in err
    assert report_of(tmp_path) == report
    assert path.read_bytes().startswith(damaged)
    new = path.read_bytes()[len(damaged) :].split(b"\n")
    new = [line for line in new if line]
    bare = [line for line in new if json.loads(line.split(b" ", 1)[1])["probe"] is None]
    probed = trained(new) - trained(bare)
    assert len(trained(bare)) <= lost
    assert len(probed) <= 4 + lost
    assert tiny_run("--resume")[1].startswith("stage2_bench.py: warning")  # the line is still there, and known
    assert report_of(tmp_path) == report


def test_without_resume_the_run_starts_afresh(tiny_run, tmp_path):
    """The journal of an earlier start is not used, and is replaced."""
    tiny_run()
    path = tmp_path / bench.JOURNAL
    before = trained(journal_lines(tmp_path))
    path.write_bytes(b"rubbish\n" + path.read_bytes())
    assert tiny_run() == (0, "")
    assert trained(journal_lines(tmp_path)) == before
    assert not path.read_bytes().startswith(b"rubbish")


def test_resume_with_more_seeds_trains_the_new_ones_only(tiny_run, tmp_path):
    """A longer run goes on from a shorter one: its numbers depend on no other seed."""
    tiny_run("--lrs", "0.003", "--sweep-seeds", "1")
    before = journal_lines(tmp_path)
    tiny_run("--lrs", "0.003", "--sweep-seeds", "1", "--seeds", "3", "--resume")
    assert trained(journal_lines(tmp_path)[len(before) :]) == {
        f"{model} lr 0.003 seed 2" for model in ("baseline", "h 0.08", "h 0.0")
    }


def key_of(config, module=bench, folder=Path()):
    """Return the journal's key of one run."""
    return module.Journal(config, folder, resume=False).key(module.Run(0, 0.003, (0.08,)))


def changed_script(tmp_path):
    """Import a copy of the script whose source differs by a comment."""
    path = tmp_path / "changed_bench.py"
    path.write_text(SCRIPT.read_text() + "\n# changed\n")
    spec = importlib.util.spec_from_file_location("changed_bench", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["changed_bench"] = module
    spec.loader.exec_module(module)
    return module


def test_key_covers_all_that_a_number_depends_on(tmp_path):
    """Another epoch count, dtype, size, track or source of the script gives another key; other seeds and rates none."""
    base = bench.Config()
    module = changed_script(tmp_path)
    keys = [key_of(base), key_of(module.Config(), module)]
    for change in ({"epochs": 3}, {"dtype": "float32"}, {"track": "lorenz"}, {"sizes": (64, 64, 64)}, {"batch": 8}):
        keys.append(key_of(dataclasses.replace(base, **change)))
    assert len(set(keys)) == len(keys)
    assert key_of(dataclasses.replace(base, seeds=(0, 1), sweep_seeds=1, lrs=(0.003,))) == keys[0]


def fresh_caches():
    """Forget the user's files, as a new process would."""
    for cache in (bench.load_file, bench.build_dataset, bench.idea_class):
        cache.cache_clear()


def test_key_covers_track_file_its_data_and_idea_file(tmp_path):
    """A changed track file, a changed CSV that the file reads, and a changed idea file give other keys."""
    track, data, idea = tmp_path / "t.py", tmp_path / "d.csv", tmp_path / "i.py"
    track.write_text(TINY.replace("standard_normal((24, 8, 2))", f"gamma(np.loadtxt({str(data)!r}), size=(24, 8, 2))"))
    data.write_text("1.0\n")
    idea.write_text(FRAGILE)
    config = dataclasses.replace(bench.Config(), track=str(track), idea=f"{idea}:Fragile")
    keys = []
    for file, text in ((track, ""), (track, "\n# changed\n"), (data, "2.0\n"), (idea, "\n# changed\n")):
        file.write_text(text if file is data else file.read_text() + text)
        fresh_caches()
        keys.append(key_of(config))
    fresh_caches()
    assert len(set(keys)) == 4
    assert key_of(config) == keys[-1]


def test_journal_gives_back_every_bit(tmp_path):
    """A record comes back from the disk as it went, a diverged one included."""
    config, runs = bench.Config(), [bench.Run(0, 0.003, None), bench.Run(1, 0.003, (0.02, 0.08))]
    weights = np.random.default_rng(0).standard_normal(7)
    records = [bench.Record(0.1 + 0.2, 1e-300, weights, {"signature": {"x": 1 / 3}}), bench.Record(None, None, weights)]
    bench.Journal(config, tmp_path, False).append(dict(zip(runs, records, strict=True)))
    journal = bench.Journal(config, tmp_path, True)
    for run, record in zip(runs, records, strict=True):
        back = journal.recall(run)
        assert (back.score, back.validation, back.probe) == (record.score, record.validation, record.probe)
        assert back.weights.tobytes() == record.weights.tobytes()
    assert journal.recall(bench.Run(2, 0.003, None)) is None


def test_unreadable_journal_is_one_line(tiny_run, tmp_path):
    """A journal that cannot be read (here a link to itself) is said in one line, not in a traceback."""
    (tmp_path / bench.JOURNAL).symlink_to(bench.JOURNAL)
    status, err = tiny_run("--resume")
    assert status in (1, 2)
    assert len(err.splitlines()) == 1


# Killed ---------------------------------------------------------------------------------------------------------------

LONG = ("--seeds", 4, "--sweep-seeds", 1, "--lrs", 0.003, "--jobs", 2, "--quiet")
OLD = "an earlier report\n"

# Sends a signal to its own process at the very moment of each fork, when Python's own fork hooks would swallow what a
# signal handler raises; then in the child, whose parent's handler must not act there.
AT_FORK = """
import os, runpy, signal, sys
os.register_at_fork(
    before=lambda: os.kill(os.getpid(), signal.SIGINT), after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT)
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupt(folder, act, epochs, pause):
    """Start a long run over an earlier report, wait until some runs are journalled, act on the process."""
    folder.mkdir()
    (folder / bench.REPORT).write_text(OLD)
    process = start(script(*LONG, "--out-dir", folder, "--epochs", epochs), folder)
    until(lambda: journal_lines(folder) or process.poll() is not None)
    time.sleep(pause)
    workers = sorted(pid for pid, parent in family(process.pid).items() if parent == process.pid)
    act(process, workers)
    return finish(process, 60), workers


def loading(main):
    """Say whether a worker of the process has begun to load PyTorch, which takes a second or more."""
    for worker in set(family(main)) - {main}:
        with contextlib.suppress(OSError):
            if "libtorch_cpu" in Path(f"/proc/{worker}/maps").read_text():
                return True
    return False


@pytest.fixture(scope="module")
def kills(tmp_path_factory, tiny_track):
    """Runs that were ended in many ways: {name: (Ended, workers, folder)}."""
    base = tmp_path_factory.mktemp("kills")
    acts = {
        "SIGINT": lambda process, _: os.killpg(process.pid, signal.SIGINT),
        "SIGTERM": lambda process, _: process.send_signal(signal.SIGTERM),
        "SIGKILL": lambda process, _: process.kill(),
        "worker": lambda _, workers: os.kill(workers[0], signal.SIGKILL),
    }

    def scenario(name):
        # the one that goes on later is short; in the others the second round of runs is at work for sure
        epochs, pause = (1, 0.0) if name == "SIGKILL" else (16, 0.3)
        return *interrupt(base / name, acts[name], epochs, pause), base / name

    def spawning():
        words = script("--track", tiny_track, "--jobs", 2, "--quiet", "--out-dir", base / "spawning")
        process = start(words, base)
        until(lambda: loading(process.pid))
        os.killpg(process.pid, signal.SIGINT)
        return finish(process, 30)

    def forking():
        words = ["--epochs", 1, "--lrs", 0.003, "--seeds", 1, "--jobs", 2, "--quiet", "--out-dir", base / "forking"]
        return finish(start([PYTHON, "-c", AT_FORK, SCRIPT, *words], base), 30)

    scenarios = {name: functools.partial(scenario, name) for name in acts}
    return Later(scenarios | {"spawning": spawning, "forking": forking})


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_ends_with_one_line_and_no_worker(kills, name, status):
    """Ctrl-C to the whole group, or SIGTERM: one line, the shell's exit status, nobody left, old report untouched."""
    ended, workers, folder = kills[name]
    assert len(workers) == 2
    assert (ended.status, ended.survivors) == (status, [])
    assert ended.err == f"stage2_bench.py: stopped by {name}; finished runs are kept, --resume goes on\n"
    assert ended.out == ""
    assert sorted(path.name for path in folder.iterdir()) == [bench.JOURNAL, bench.REPORT]
    assert (folder / bench.REPORT).read_text() == OLD


def test_kill_9_takes_the_workers_along(kills):
    """SIGKILL of the main process: its workers notice within seconds; the old report is untouched."""
    ended, workers, folder = kills["SIGKILL"]
    assert len(workers) == 2
    assert (ended.status, ended.survivors) == (-signal.SIGKILL, [])
    assert sorted(path.name for path in folder.iterdir()) == [bench.JOURNAL, bench.REPORT]
    assert (folder / bench.REPORT).read_text() == OLD


def test_resume_after_kill_9_trains_what_is_missing_and_gives_the_same_report(kills, tmp_path):
    """The journal's runs are not trained again, and the report is that of an uninterrupted run."""
    _, _, folder = kills["SIGKILL"]
    words = [*map(str, LONG), "--epochs", "1", "--out-dir"]
    before = journal_lines(folder)
    shutil.copytree(folder, tmp_path / "resumed")
    shutil.copytree(folder, tmp_path / "fresh")
    resumed = finish(start(script(*words, tmp_path / "resumed", "--resume")))
    assert resumed.status == 0, resumed.err
    assert bench.main([*words, str(tmp_path / "fresh"), "--jobs", "1"]) == 0
    assert report_of(tmp_path / "resumed") == report_of(tmp_path / "fresh")
    lines = journal_lines(tmp_path / "resumed")
    assert lines[: len(before)] == before
    unprobed = trained(line for line in before if b'"probe": null' in line)
    probed = trained(before) - unprobed
    again = trained(lines[len(before) :])
    assert 0 < len(trained(before)) < 12
    assert again.isdisjoint(probed)
    assert again | trained(before) == trained(journal_lines(tmp_path / "fresh"))


def test_killed_worker_stops_the_run_and_names_what_is_lost(kills):
    """SIGKILL to one worker (out of memory): one line with the lost runs and --resume, exit status 1, no hang."""
    ended, _, folder = kills["worker"]
    assert (ended.status, ended.survivors) == (1, [])
    assert len(ended.err.splitlines()) == 1
    assert "a worker process was killed; lost: " in ended.err
    assert "lr 0.003 seed " in ended.err
    assert "--resume" in ended.err
    assert (folder / bench.REPORT).read_text() == OLD


def test_interrupt_while_workers_load_is_one_line(kills):
    """Ctrl-C while spawned workers still import their libraries: they must not each print a traceback."""
    ended = kills["spawning"]
    assert (ended.status, ended.survivors) == (130, [])
    assert len(ended.err.splitlines()) == 1, ended.err


def test_interrupt_at_the_moment_of_a_fork_is_not_lost(kills):
    """A signal that arrives while Python forks a worker ends the run: fork hooks must not swallow it."""
    ended = kills["forking"]
    assert (ended.status, ended.survivors) == (130, [])
    assert len(ended.err.splitlines()) == 1, ended.err
