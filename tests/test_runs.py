"""Runs over cores and hosts: the same digits everywhere, nothing lost by a kill, nothing left behind.

Real processes and real signals; every wait is bounded.  Most processes are forked from one that has the libraries
loaded (`NURSERY`), so that a process costs what it computes; what depends on the loading itself is started as a user
starts it.  `TINY` is a track that trains in a moment.
"""

import argparse
import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy._core import _multiarray_umath

import stage2_bench as bench

SCRIPT = Path(bench.__file__).resolve()
SMOKE = SCRIPT.parent / "tests" / "smoke_report.json"
PYTHON = sys.executable
PATIENCE = 100  # seconds until a process counts as hung: many times what each one needs
OURS = ("OMP_", "MKL_", "TORCH", "PYTHON", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MPL")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
now = time.monotonic  # tests put another clock in its place

TINY = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.standard_normal((24, 8, 2))
    return tokens, tokens[:, -1, 0]
"""

# Says that it is asked for data, and takes its time.
SLOW = """
import pathlib, time

def make(seed, split):
    pathlib.Path(__file__).with_suffix(".asked").touch()
    time.sleep(60)
"""

# Three layers: one whose training is chaotic at large rates; one that does not come to an end on rank 1 or anywhere, as
# environment variables say; and a plain one.  The check before training shows them fewer sequences than TINY's 24.
IDEAS = """
import os, pathlib, signal
import torch

class Chaotic(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.norm, self.h = torch.nn.LayerNorm(channels), h

    def forward(self, tokens):
        waves = torch.fft.fft(torch.fft.fft(tokens, dim=-1), dim=-2).real
        return self.norm(tokens + (1 - self.h) * waves)

class Plain(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(channels))
        self.h = h

    def forward(self, tokens):
        return tokens * (self.scale - self.h)

steps = 0

class Fragile(Plain):
    def forward(self, tokens):
        global steps
        if len(tokens) > 8 and torch.is_grad_enabled() and os.environ.get("RANK", "1") == "1":
            steps += 1
            if steps == int(os.environ.get("FAIL_AT_STEP", "-1")):
                raise ArithmeticError("planted failure")
            if list(pathlib.Path(os.environ.get("DIE_AFTER_STORE", "/nonexistent")).glob("*.npz")):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens)
"""

# Processes -----------------------------------------------------------------------------------------------------------

# Reads one job a line, as JSON, and runs the script of each as `python script words` does, in a session of its own.
NURSERY = """
import atexit, ctypes, gc, json, os, resource, runpy, signal, sys, threading
from pathlib import Path
import numpy, scipy.integrate, torch  # no arithmetic: a pool of threads must not start before a fork

gc.freeze()  # or each process would touch, and so copy, all that it shares with this one

def note(name, number):
    (folder / f"{name}.part").write_text(str(number))
    os.rename(folder / f"{name}.part", folder / name)

def private(mount):  # a mount that nobody else sees
    if ctypes.CDLL(None).unshare(0x00020000) or os.system(f"(mount --make-rprivate / && {mount}) 2>/dev/null"):
        os._exit(77)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork() == 0:
        break
else:
    os._exit(0)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
job = json.loads(line)
folder = Path(job["folder"])
child = os.fork()
if child:
    note("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started under
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["environment"])
for number, name, flags in ((0, "/dev/null", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
    os.dup2(os.open(folder / name, flags), number)
exec(job["prepare"])
for number, name in enumerate(("stdin", "stdout", "stderr")):
    try:
        setattr(sys, name, open(number, "rww"[number], buffering=1 if number == 2 else -1, closefd=False))
    except OSError:  # it was closed
        setattr(sys, name, None)
note("pid", os.getpid())
sys.argv = job["words"]
sys.path[0] = os.path.dirname(sys.argv[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    if job["slow"]:
        raise
    threading._shutdown()
    atexit._run_exitfuncs()
    for out in filter(None, (sys.stdout, sys.stderr)):
        out.flush()
    os._exit(stop.code or 0)
"""


lock = threading.RLock()


def once(make):
    """Let a function compute its value once a session, whichever thread asks first."""
    cached = functools.cache(make)

    @functools.wraps(make)
    def locked(*args):
        with lock:
            return cached(*args)

    return locked


@dataclasses.dataclass
class Ended:
    """What is left of a process: exit status, both outputs, and its session's processes that outlived it."""

    status: int | None
    out: str
    err: str
    survivors: list[int]

    @property
    def summary(self):
        """The exit status, how many lines stderr has, and how many processes are left."""
        return self.status, len(self.err.splitlines()), len(self.survivors)


@once
def scratch():
    """Return a folder for this session's processes, and their outputs."""
    folder = Path(tempfile.mkdtemp(prefix="stage2_bench_tests_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


counter = itertools.count()


class Running:
    """A command in a session of its own, so that its whole family can be found; its outputs go to files."""

    def __init__(self):
        self.folder = scratch() / f"process{next(counter)}"
        self.folder.mkdir()
        for name in ("out", "err"):
            (self.folder / name).touch()

    def text(self, name):
        """Return what it has written so far."""
        return (self.folder / name).read_text(errors="replace")

    def send(self, number, family=False):
        """Send it a signal, or its whole family."""
        assert self.pid > 1, "it never started; -1 would mean every process there is"
        (os.killpg if family else os.kill)(self.pid, number)


class Started(Running):
    """A command as a user starts it."""

    def __init__(self, command, cwd=None, **environment):
        super().__init__()
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd or self.folder,
                env=CLEAN | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def status(self):
        """The exit status, None while it runs."""
        return self.process.poll()


class Forked(Running):
    """The script, forked from the nursery.  `prepare`: Python that runs in the new process first; `slow`: it is to take
    its interpreter apart when it ends, as a user's does, which costs more than most scripts here."""

    def __init__(self, *words, cwd=None, prepare="", path=None, slow=False, **environment):
        super().__init__()
        job = {
            "folder": str(self.folder), "cwd": str(cwd or self.folder), "environment": CLEAN | environment,
            "prepare": prepare, "slow": slow, "words": [str(word) for word in (path or eager(), *words)],
        }  # fmt: skip
        with lock:
            nursery().stdin.write(json.dumps(job) + "\n")
            nursery().stdin.flush()
        assert until(lambda: self.pid > 1 or self.status is not None), (scratch() / "nursery.err").read_text()

    @property
    def pid(self):
        """Its process id, which is its session's too; -1 where it ended before the script began."""
        return int((self.folder / "pid").read_text()) if (self.folder / "pid").exists() else -1

    @property
    def status(self):
        """The exit status, None while it runs."""
        place = self.folder / "status"
        return int(place.read_text()) if place.exists() else None


@once
def nursery():
    """Start the process that forks the others; the torchrun that it stands in for also sets one thread."""
    environment = CLEAN | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with open(scratch() / "nursery.err", "w") as err:
        return subprocess.Popen([PYTHON, "-c", NURSERY], env=environment, stdin=subprocess.PIPE, stderr=err, text=True)


@once
def eager():
    """Return a copy of the script that saves and tells after every epoch, and waits two seconds for other ranks."""
    text = SCRIPT.read_text()
    for name, number in (("SAVE_EVERY", "0.0"), ("INTERVAL", "0.0"), ("RENDEZVOUS", "2.0")):
        text, changes = re.subn(rf"(?m)^( *{name}) = [0-9.]+", rf"\1 = {number}", text)
        assert changes == 1, f"{name}: the tests want to change it"
    (scratch() / "eager").mkdir()
    path = scratch() / "eager" / "stage2_bench.py"
    path.write_text(text)
    return path


@once
def tiny():
    """Return the path of a custom track of 24 short sequences."""
    path = scratch() / "tiny.py"
    path.write_text(TINY)
    return str(path)


@once
def idea(name):
    """Return one of IDEAS as --idea takes it."""
    path = scratch() / "ideas.py"
    path.write_text(IDEAS)
    return f"{path}:{name}"


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
    limit = now() + seconds
    while not (value := condition()) and now() < limit:
        time.sleep(0.02)
    return value


def finish(running, seconds=PATIENCE):
    """Wait for the end of a process; what outlives it by five seconds is a survivor, and is ended."""
    until(lambda: running.status is not None, seconds)
    status = running.status
    if status is not None:
        until(lambda: not family(running.pid), 5)
    survivors = sorted(family(running.pid)) if running.pid > 0 else []
    if survivors:
        with contextlib.suppress(ProcessLookupError):
            running.send(signal.SIGKILL, family=True)
    return Ended(status, running.text("out"), running.text("err") + ("" if status is not None else "HUNG"), survivors)


def script(*options):
    """Return the command of the script as a user types it."""
    return [PYTHON, SCRIPT, *options]


def torchrun(size, *options, launcher=(), **environment):
    """Start the script under torchrun, whose ranks are started as a user's are."""
    path = scratch() / "torchrun.py"
    path.write_text("from torch.distributed.run import main\nmain()\n")
    words = ("--nproc-per-node", size, *launcher, SCRIPT, *options)
    return Forked(*words, path=path, OMP_NUM_THREADS="1", **environment)


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(size, *options, **how):
    """Start the script once a rank, with the variables that torchrun sets."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [Forked(*options, RANK=str(rank), LOCAL_RANK=str(rank), **place, **how) for rank in range(size)]


POOL = concurrent.futures.ThreadPoolExecutor(3)  # scenarios at a time; some of them wait more than they compute


class Later(dict):
    """Named scenarios that run in the background; looking one up waits for its result."""

    def __init__(self, scenarios):
        super().__init__({name: POOL.submit(scenario) for name, scenario in scenarios.items()})

    def __getitem__(self, name):
        return super().__getitem__(name).result()


def start_early(request, groups):
    """Start the scenarios of the selected tests now, so that they run beside the tests in this process."""
    chosen = {name for item in request.session.items if item.path == request.path for name in item.fixturenames}
    for name in groups:
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
    start_early(request, ("smokes", "clusters", "alone_ranks", "endings", "kills", "neighbours"))
    with one_thread():
        yield


# Results -------------------------------------------------------------------------------------------------------------


def report_of(folder):
    """Return the bytes of a folder's report."""
    return (Path(folder) / bench.REPORT).read_bytes()


def runs_in(folder):
    """Return the trainings in a folder's store, {path: when it was written}."""
    return {path: path.stat().st_mtime_ns for path in (Path(folder) / bench.STORE).glob("*.npz")}


def contents(folder):
    """Return every array of every training in a folder's store, by file name."""
    found = {}
    for path in runs_in(folder):
        with np.load(path, allow_pickle=False) as file:
            found[path.name] = {name: (file[name].dtype, file[name].tobytes()) for name in file}
    return found


def progress(err):
    """Return what the progress lines say: [(epochs of runs done, of how many, seconds), ...]."""
    found = re.findall(r"(?m)^stage2_bench: (\d+) of (\d+) epochs of runs, (\d+) s", err)
    return [tuple(map(int, line)) for line in found]


def trained(err):
    """Return how many epochs of runs were trained, by the last progress line."""
    return progress(err)[-1][0] if progress(err) else 0


def warnings_in(err):
    """Return the lines of stderr that are no progress."""
    return [line for line in err.splitlines() if not line.startswith("stage2_bench: ")]


LITTLE = ("--seeds", 2, "--lrs", 0.003)  # six runs: baseline, idea and placebo of two seeds


@pytest.fixture(scope="session")
def fresh():
    """Return a function: the folder of an uninterrupted run of LITTLE with these options, by this very process."""

    @functools.cache
    def run(*options):
        folder = Path(tempfile.mkdtemp(dir=scratch()))
        words = [*LITTLE, "--track", tiny(), "--jobs", 1, "--quiet", "--out-dir", folder, *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", now)
            assert bench.main([str(word) for word in words]) == 0
        return folder

    return run


@pytest.fixture
def tick(monkeypatch):
    """Give the script a clock that moves ten seconds whenever it is asked: so it saves and tells after each epoch."""
    clock = itertools.count(1000, 10)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))


@pytest.fixture
def run(tmp_path, capfd, tick):
    """Return a function that runs LITTLE with more options into a folder of this test: (epochs trained, the lines that
    are no progress)."""

    def go(*options, main=bench.main, status=0, folder=tmp_path / "out"):
        capfd.readouterr()
        words = [*LITTLE, "--track", tiny(), "--jobs", 1, "--out-dir", folder, *options]
        assert main([str(word) for word in words]) == status
        err = capfd.readouterr().err
        return trained(err), warnings_in(err)

    return go


# The same digits -----------------------------------------------------------------------------------------------------


def other_machine():
    """Return the environment that stands in for a processor without vector units."""
    features, dispatched = _multiarray_umath.__cpu_features__, _multiarray_umath.__cpu_dispatch__
    numpy_off = " ".join(name for name in dispatched if features.get(name))
    return {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "NPY_DISABLE_CPU_FEATURES": numpy_off}


@pytest.fixture(scope="module")
def smokes():
    """The smoke where what must not matter differs: {name: (Ended, folder)}."""
    words = script("--smoke", "--quiet", "--out-dir")
    one_cpu = ["taskset", "-c", min(os.sched_getaffinity(0))]
    starts = {
        "one CPU, other machine": lambda to: Started([*one_cpu, *words, to], **other_machine()),
        "3 jobs, OMP 4": lambda to: Started([*words, to, "--jobs", 3], OMP_NUM_THREADS="4"),
    }

    def smoke(name):
        folder = scratch() / name.replace(" ", "_")
        return finish(starts[name](folder)), folder

    return Later({name: functools.partial(smoke, name) for name in starts})


@pytest.mark.parametrize("condition", ["one CPU, other machine", "3 jobs, OMP 4"])
def test_report_is_byte_identical(smokes, condition):
    """The smoke's report is the committed one to the byte, however its runs were shared out, on whatever processor."""
    ended, folder = smokes[condition]
    assert (ended.summary, ended.err) == ((0, 0, 0), "")
    assert report_of(folder) == SMOKE.read_bytes()


def test_one_cpu_means_one_process(smokes):
    """Without --jobs, the affinity mask decides; the log says so."""
    _, folder = smokes["one CPU, other machine"]
    assert re.search(r"\b1 process", (folder / bench.OUTPUT).read_text())
    _, folder = smokes["3 jobs, OMP 4"]
    assert re.search(r"\b3 process", (folder / bench.OUTPUT).read_text())


def chaos(rate=0.3):
    """Return options of a chaotic training, where one rounding more or less soon shows in the first digits."""
    return ("--epochs", 60, "--seeds", 5, "--sweep-seeds", 4, "--idea", idea("Chaotic"), "--lrs", repr(rate))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_do_not_change_a_chaotic_training(clusters, fresh, size):
    """1, 2 and 3 ranks give the bytes of one process where every rounding shows; rank 0 alone prints and writes."""
    ended, folder = clusters[f"{size} ranks"]
    assert [each.summary for each in ended] == [(0, 0, 0)] * size, [each.err for each in ended]
    assert [each.out.count("Verdict: ") for each in ended] == [1] + [0] * (size - 1)
    assert f" CPUs, {size} processes" in (folder / bench.OUTPUT).read_text()
    assert report_of(folder) == report_of(fresh(*chaos()))


def test_spawned_workers_do_not_change_a_chaotic_training(fresh, tmp_path, capfd):
    """Called from a module that imported the script, `main` spawns workers, as everywhere on macOS and Windows."""
    words = ["--track", tiny(), *chaos(), "--jobs", 2, "--quiet", "--out-dir", tmp_path]
    assert bench.main([str(word) for word in words]) == 0
    assert capfd.readouterr().err == ""
    assert report_of(tmp_path) == report_of(fresh(*chaos()))


def test_chaos_shows_a_rounding(fresh):
    """The tests above see the least that can differ: a learning rate one unit in the last place higher shows."""
    scores = [per_seed(fresh(*chaos(rate))) for rate in (0.3, math.nextafter(0.3, 1))]
    for name in ("baseline", "idea", "placebo"):
        assert all(a != b for a, b in zip(*(each[name] for each in scores), strict=True))


def test_two_agents_give_the_same_report(clusters, fresh):
    """Two torchrun agents over the loopback, with folders of their own: the host of rank 0 has the result, and what
    both have trained, to go on from."""
    agents, base = clusters["agents"]
    assert [agent.status for agent in agents] == [0, 0], agents[0].err + agents[1].err
    assert report_of(base / "host0") == report_of(fresh("--epochs", 2))
    assert contents(base / "host0") == contents(fresh("--epochs", 2))
    assert not (base / "host1" / bench.REPORT).exists()


def test_progress_of_ranks_counts_what_all_do(clusters):
    """Two ranks that share six runs of four epochs, the second on a host that refuses a store: rank 0 alone tells, from
    none to all 24 epochs of runs, and has them all."""
    (first, second), folder = clusters["refusing"]
    assert (first.status, second.status, second.err) == (0, 0, ""), first.err
    done, total, _ = zip(*progress(first.err), strict=True)
    assert (done[0], done[-1], set(total)) == (0, 24, {24})
    assert len(contents(folder)) == 6


def per_seed(folder):
    """Return the scores of each arm's paired runs, by name."""
    report = json.loads(report_of(folder))
    full = {"baseline": report["baseline"]["full"], "idea": report["idea"]}
    return {
        name: arm["per_seed"] for name, arm in (full | {"placebo": report["extensions"]["placebo"]["full"]}).items()
    }


def test_scores_do_not_depend_on_what_runs_beside(fresh):
    """The scores of 3 seeds are the first three of 8, stay themselves beside other rates, and are fresh seeds' own."""
    options = ("--epochs", 3, "--lrs", 0.01)
    many = per_seed(fresh(*options, "--seeds", 8, "--sweep-seeds", 1))
    few = per_seed(fresh(*options, "--seeds", 3))
    wide = per_seed(fresh(*options, 1e-9, "--seeds", 3))
    later = per_seed(fresh(*options, "--seeds", "2:4"))
    for name in ("baseline", "idea", "placebo"):
        assert len(set(many[name])) == 8
        assert few[name] == wide[name] == many[name][:3]
        assert later[name] == many[name][2:4]


def many_runs(seeds, lrs, hs):
    """Return every run of a grid, baseline included."""
    return [bench.Run(s, 0.001 * (1 + i), h) for s in range(seeds) for i in range(lrs) for h in (None, *hs)]


def standing(epoch):
    """Return the state of a run after some epochs, as far as sharing out looks at it; none where it did not start."""
    empty = np.zeros(0)
    return bench.State(epoch, empty, empty, empty, True, {}) if epoch else None


@given(
    seeds=st.integers(1, 40),
    lrs=st.integers(1, 4),
    hs=st.lists(st.sampled_from([(0.0,), (0.08,), (0.02, 0.08)]), unique=True),
    jobs=st.integers(1, 70),
    epochs=st.lists(st.sampled_from([0, 0, 0, 4, 7]), min_size=1, max_size=7),
)
def test_plan_shares_every_run_once_and_evenly(seeds, lrs, hs, jobs, epochs):
    """Each run is in one group with its own state; a group can train together: equally many layers, one epoch, no more
    runs than pay; groups of a kind differ by one run at the most."""
    runs = [(run, standing(epochs[i % len(epochs)])) for i, run in enumerate(many_runs(seeds, lrs, hs))]
    groups = bench.plan(runs, jobs)
    assert sorted((str(run), id(state)) for group in groups for run, state in group) == sorted(
        (str(run), id(state)) for run, state in runs
    )
    kinds = [{(len(run.h or ()), state.epoch if state else 0) for run, state in group} for group in groups]
    assert all(len(kind) == 1 for kind in kinds)
    assert all(len(group) <= 16 for group in groups)
    for kind in set(map(frozenset, kinds)):
        sizes = [len(group) for group, own in zip(groups, kinds, strict=True) if own == kind]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_plan_keeps_every_worker_busy(jobs):
    """The default sweep, dealt to the workers like cards, gives none of them more than two runs above another."""
    config = bench.Config()
    rows = [(lr, h) for lr in config.lrs for h in (None, (0.08,), (0.0,))]
    groups = bench.plan([(bench.Run(seed, *row), None) for seed in config.sweep for row in rows], jobs)
    shares = [sum(map(len, groups[job::jobs])) for job in range(jobs)]
    assert max(shares) - min(shares) <= 2
    assert sum(shares) == 36


def test_plan_of_nothing_is_empty():
    """Where the store has every run, there is nothing to share out."""
    assert bench.plan([], 4) == []


CPUS = """
import os, pathlib
import stage2_bench as bench

quota = pathlib.Path("/sys/fs/cgroup/cpu.max")
print(len(os.sched_getaffinity(0)), bench.available_cpus(), end=" ")
for text in ("max 100000", "100000 100000", "50000 100000", "150000 100000", "9900000 100000", "rubbish", ""):
    quota.write_text(text)
    print(bench.available_cpus(), end=" ")
"""


def test_container_quota_limits_the_workers(clusters):
    """A container's CPU quota counts, whole CPUs of it, at least one; the file is faked by a private mount."""
    ended = clusters["quota"]
    if ended.status == 77:
        pytest.skip("this machine allows no private mounts")
    assert (ended.status, ended.err) == (0, "")
    n, *found = map(int, ended.out.split())
    assert found == [n, n, 1, 1, 1, n, n, n]


@pytest.mark.parametrize("own", ["max 100000", "800000 100000", None])
def test_quota_of_an_outer_group_limits_the_workers(monkeypatch, own):
    """Of nested cgroups the narrowest quota counts, here the outermost one's of three CPUs."""
    files = {"/proc/self/cgroup": "0::/pod/job\n", "/sys/fs/cgroup/cpu.max": "300000 100000\n"}
    files |= {"/sys/fs/cgroup/pod/job/cpu.max": own} if own else {}

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert bench.available_cpus() == 3


def test_available_cpus_respects_affinity():
    """A process that is bound to one CPU has one."""
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert bench.available_cpus() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_workers_compute_on_one_thread_unless_the_user_says_otherwise(monkeypatch):
    """NumPy's libraries read these variables in each new process; one that is set stays as it is."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "3")  # so that it is restored
    monkeypatch.delenv(names[1])
    with bench.workers(None, 1, False):
        assert [os.environ[name] for name in names] == ["3", "1", "3"]


@pytest.mark.parametrize(("seeds", "rates", "expected"), [(8, 3, 4 * 3 * 3), (40, 1, 40 * 3)])
def test_no_more_workers_than_trainings_at_once(tmp_path, seeds, rates, expected):
    """Of three arms the sweep trains four seeds at all rates at once, then the pairs all seeds at one."""
    config = bench.Config(seeds=(*range(seeds),), lrs=bench.Config.lrs[:rates])
    options = argparse.Namespace(jobs=1024, out_dir=tmp_path, resume=False, quiet=True)
    assert bench.Execution(config, options, {}).jobs == expected


# Progress ------------------------------------------------------------------------------------------------------------


def test_progress_comes_early_and_every_few_seconds(monkeypatch, capfd, tmp_path):
    """By a clock that advances half a second an epoch: the first line within 5 s of the start, then every 2 to 6 s,
    whole lines on stderr alone, counts that grow to all epochs of all runs, and the time left at the pace so far."""
    clock = itertools.count(100, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    words = ["--track", tiny(), "--jobs", "1", "--epochs", "60", "--seeds", "3", "--sweep-seeds", "2", "--lrs", "0.01"]
    assert bench.main([*words, "--out-dir", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    assert "epochs of runs" not in out
    line = r"stage2_bench: \d+ of \d+ epochs of runs, \d+ s(, about \d+ s left)?"
    assert all(re.fullmatch(line, each) for each in err.splitlines())
    done, total, seconds = zip(*progress(err), strict=True)
    assert seconds[0] <= 5
    assert all(2 <= after - before <= 6 for before, after in itertools.pairwise(seconds))
    assert list(done) == sorted(done)
    assert len(set(done)) > 10
    assert set(total) == {60 * (6 + 3)}
    assert done[0] == 0
    for line, d, t, elapsed in zip(err.splitlines()[1:], done[1:], total[1:], seconds[1:], strict=True):
        left = int(re.search(r"about (\d+) s left", line)[1])
        assert left == pytest.approx(elapsed * (t - d) / d, rel=0.1, abs=2)


def test_quiet_says_nothing(fresh, tmp_path, tick, capfd):
    """--quiet has no progress, and the same report."""
    words = [*LITTLE, "--track", tiny(), "--jobs", 1, "--epochs", 4, "--out-dir", tmp_path, "--quiet"]
    assert bench.main([str(word) for word in words]) == 0
    assert capfd.readouterr().err == ""
    assert report_of(tmp_path) == report_of(fresh("--epochs", 4))


def test_progress_counts_what_workers_do(kills):
    """Two worker processes count into one line: it grows epoch by epoch to all that were left to train."""
    (ended,), _, _ = kills["workers"]
    done, total, _ = zip(*progress(ended.err), strict=True)
    assert list(done) == sorted(done)
    assert (done[0], done[-1]) == (0, total[0])
    assert len(set(total)) == 1


# The store -----------------------------------------------------------------------------------------------------------

# what was run before; what runs now; how many epochs of runs that has to train (LITTLE has six runs)
CONTINUED = {
    "the same": (["--epochs", 4], ["--epochs", 4], 0),
    "more epochs": (["--epochs", 16], ["--epochs", 64], 6 * 48),
    "fewer epochs": (["--epochs", 7], ["--epochs", 3], 6 * 3),
    "more seeds": (["--epochs", 4], ["--epochs", 4, "--seeds", 3, "--sweep-seeds", 2], 3 * 4),
    "more seeds in the sweep": (["--epochs", 2], ["--epochs", 2, "--seeds", 4], 2 * 3 * 2),
    "other seeds": (["--epochs", 2], ["--epochs", 2, "--seeds", "1:3"], 3 * 2),
    "more rates": (["--epochs", 4], ["--epochs", 4, "--lrs", 0.01, 0.003], 6 * 4),
    "more steps h": (["--epochs", 4], ["--epochs", 4, "--h", 0.2, 0.08], 2 * 4),
    "a stack": (["--epochs", 2], ["--epochs", 2, "--h", "0.08+0.1"], 4 * 2),
    "another idea": (["--epochs", 4], ["--epochs", 4, "--idea", "Plain"], 4 * 4),
    "after an idea": (["--epochs", 4, "--idea", "Plain"], ["--epochs", 4], 4 * 4),
    "another idea of a file": (["--epochs", 4, "--idea", "Plain"], ["--epochs", 4, "--idea", "Chaotic"], 4 * 4),
    "auto again": (["--epochs", 4, "--lrs", "auto"], ["--epochs", 4, "--lrs", "auto"], 0),
    "grid after auto": (["--epochs", 4, "--lrs", "auto"], ["--epochs", 4], 0),
    "another dtype": (["--epochs", 2], ["--epochs", 2, "--dtype", "float32"], 6 * 2),
    "another width": (["--epochs", 2], ["--epochs", 2, "--hidden", 9], 6 * 2),
    "another batch": (["--epochs", 2], ["--epochs", 2, "--batch", 10], 6 * 2),
    "another track": (["--epochs", 2], ["--epochs", 2, "--track", "OTHER"], 6 * 2),
}


def words_of(options):
    """Put the files' paths into options."""
    other = scratch() / "other.py"
    other.write_text(comment(TINY))
    names = {"Plain": idea("Plain"), "Chaotic": idea("Chaotic"), "OTHER": other}
    return tuple(str(names.get(word, word)) for word in options)


@pytest.mark.parametrize("case", CONTINUED)
def test_resume_trains_only_what_is_new(run, fresh, tmp_path, case):
    """--resume trains the epochs, seeds, rates and layers that the store does not have, and no others; the report is
    that of a fresh run to the byte; nothing is warned of; and what was there before still is."""
    before, after, expected = CONTINUED[case]
    run(*words_of(before))
    assert run(*words_of(after), "--resume") == (expected, [])
    assert report_of(tmp_path / "out") == report_of(fresh(*words_of(after)))
    if case != "more epochs":  # in whose place the longer ones are
        assert run(*words_of(before), "--resume") == (0, [])


def test_resumed_trainings_are_the_same_to_the_last_bit(run, fresh, tmp_path):
    """Weights, moments and curves after 4 epochs and 4 more are those after 8, of a diverged run too."""
    options = ("--lrs", "0.003", "1e200")
    for epochs in (4, 8):
        run(*options, "--epochs", epochs, "--resume")
    one_go = contents(fresh(*options, "--epochs", 8))
    assert len(one_go) == 12
    assert contents(tmp_path / "out").items() >= one_go.items()


def test_resume_touches_nothing_that_is_finished(run, tmp_path):
    """Where nothing is left to train, no file of the store is written again; log and report are the same."""
    run("--epochs", 2)
    folder = tmp_path / "out"
    before, report = runs_in(folder), report_of(folder)
    assert len(before) == 6
    assert run("--epochs", 2, "--resume") == (0, [])
    assert (runs_in(folder), report_of(folder)) == (before, report)


def test_without_resume_all_is_trained_afresh(run, tmp_path):
    """An earlier store is not read, whatever is in it; the new runs take their place in it."""
    run("--epochs", 2)
    report = report_of(tmp_path / "out")
    for path in runs_in(tmp_path / "out"):
        path.write_bytes(b"rubbish")
    assert run("--epochs", 2) == (12, [])
    assert report_of(tmp_path / "out") == report
    assert run("--epochs", 2, "--resume") == (0, [])


def test_dtypes_share_a_store_in_peace(run, fresh, tmp_path):
    """float64, then float32, then float64 with --resume: no word of files that can't be read, and nothing lost."""
    for dtype, expected in (("float64", 12), ("float32", 12), ("float64", 0), ("float32", 0)):
        assert run("--epochs", 2, "--dtype", dtype, "--resume") == (expected, [])
        assert report_of(tmp_path / "out") == report_of(fresh("--epochs", 2, "--dtype", dtype))


def project(folder, **changes):
    """Write a track and an idea, each with a helper beside it, and a CSV that the track reads; `changes` edit them."""
    files = {
        "track.py": "import reader\n\ndef make(seed, split):\n    return reader.read(seed, split)\n",
        "reader.py": TINY.replace("def make", "def read").replace(
            "return tokens", "tokens[0, 0, 0] = np.loadtxt(__file__[:-9] + 'data.csv')[seed]; return tokens"
        ),
        "data.csv": "0.5\n0.25\n",
        "idea.py": "from mixer import Mixer\n\nclass Idea(Mixer):\n    pass\n",
        "mixer.py": IDEAS.split("class Plain")[0].replace("Chaotic", "Mixer"),
    }
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(changes[name](text) if name in changes else text)
    return "--track", folder / "track.py", "--idea", f"{folder / 'idea.py'}:Idea", "--epochs", 2


def comment(text):
    """Change nothing but the bytes."""
    return f"{text}\n# changed\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"track.py": comment}, 12),
        ({"reader.py": comment}, 12),
        ({"data.csv": lambda _: "0.5\n0.75\n"}, 6),
        ({"idea.py": comment}, 8),
        ({"mixer.py": comment}, 8),
    ],
    ids=["same files elsewhere", "track", "helper of the track", "data of one seed", "idea", "helper of the idea"],
)
def test_key_holds_the_bytes_of_all_files_and_no_path(run, tmp_path, changes, expected):
    """A changed track, idea, helper beside either, or data file trains anew what depends on it: data the runs of their
    seed, a layer all but the baseline.  The same bytes in another folder are the same runs."""
    run(*project(tmp_path / "first"))
    assert run(*project(tmp_path / "second", **changes), "--resume") == (expected, [])


def changed_script():
    """Import a copy of the script whose source differs by a comment."""
    path = scratch() / "changed_bench.py"
    path.write_text(comment(SCRIPT.read_text()))
    spec = importlib.util.spec_from_file_location("changed_bench", path)
    module = sys.modules["changed_bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_key_holds_the_script(run):
    """Another text of the script may compute other numbers: its runs are its own."""
    run("--epochs", 2)
    main = changed_script().main
    assert run("--epochs", 2, "--resume", main=main) == (12, [])
    assert run("--epochs", 2, "--resume", main=main) == (0, [])


@pytest.mark.parametrize("library", [torch, np, scipy], ids=lambda library: library.__name__)
def test_key_holds_the_versions_of_the_libraries(run, monkeypatch, library):
    """Runs of another version of PyTorch, NumPy or SciPy are trained anew."""
    run("--epochs", 2)
    monkeypatch.setattr(library, "__version__", "0.1")
    assert run("--epochs", 2, "--resume") == (12, [])


def rename_part(path):
    """Leave what a kill in the middle of writing leaves: half a file under another name."""
    data = path.read_bytes()
    path.unlink()
    path.with_name(f".{path.name}.part").write_bytes(data[: len(data) // 2])


def pickled(path):
    """Put a pickle into the place of the arrays, which runs a program when it is loaded."""
    np.savez(path, **dict.fromkeys(np.load(path), np.array([Bomb()], dtype=object)))


class Bomb:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {scratch()}/exploded",)


def flip(path, at, bit):
    """Change one bit of a file, as a bad disk would."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)


def replace_by_folder(path):
    """Put a folder into the file's place."""
    path.unlink()
    path.mkdir()


def replace_by_pipe(path):
    """Put a pipe into the file's place, from which nothing ever comes."""
    path.unlink()
    os.mkfifo(path)


def other_width(path):
    """Put a training of a model of another size into the file's place."""
    folder = Path(tempfile.mkdtemp(dir=scratch()))
    words = ["--track", tiny(), "--jobs", "1", "--seeds", "1", "--epochs", "2", "--hidden", "5", "--quiet"]
    bench.main([*words, "--out-dir", str(folder)])
    shutil.copy(min(runs_in(folder)), path)


HARMS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "a bit flipped in the middle": lambda path: flip(path, 0.5, 6),
    "a bit flipped at the end": lambda path: flip(path, 0.97, 0),
    "zeros of the right size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("not a training\n"),
    "other arrays": lambda path: np.savez(path, a=np.ones(3)),
    "another model": other_width,
    "a pickle": pickled,
}
GONE = {"part": rename_part, "pipe": replace_by_pipe, "dangling link": lambda p: (p.unlink(), p.symlink_to("nowhere"))}


@pytest.fixture
def no_waiting():
    """Turn a wait without end into a failure."""

    def fail(*_):
        raise AssertionError("waits without end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("harm", HARMS | GONE)
def test_a_rotten_file_counts_as_no_run(run, fresh, tmp_path, no_waiting, harm):
    """A file of the store that is damaged, foreign or half: its run alone trains again, with one warning at the most;
    the report is whole.  A pickle, which could run a program, is not opened."""
    run("--epochs", 2)
    path = sorted(runs_in(tmp_path / "out"))[3]
    (HARMS | GONE)[harm](path)
    epochs, lines = run("--epochs", 2, "--resume")
    assert epochs == 2
    assert len(lines) == (harm in HARMS)
    assert all("warning" in line and bench.STORE in line for line in lines)
    assert report_of(tmp_path / "out") == report_of(fresh("--epochs", 2))
    assert not (scratch() / "exploded").exists()
    assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "out" / bench.STORE).glob("*.npz"))
    assert not (tmp_path / "out" / bench.STORE / "nowhere").exists()


def test_many_rotten_files_are_one_warning(run, fresh, tmp_path):
    """Each kind of damage at once, and files that belong to nobody: one line in all."""
    three = ("--lrs", 0.0015, 0.003, 0.006)
    run(*three, "--epochs", 2)
    paths = sorted(runs_in(tmp_path / "out"))
    for path, harm in zip(paths, HARMS.values(), strict=False):
        harm(path)
    for name in ("foreign.npz", "0" * 40 + ".2.npz", "x.y.npz", "notes.txt", ".x.part"):
        (paths[0].parent / name).write_bytes(b"rubbish")
    (paths[0].parent / "folder.npz").mkdir()
    epochs, lines = run(*three, "--epochs", 2, "--resume")
    assert (epochs, len(lines)) == (2 * len(HARMS), 1)
    assert report_of(tmp_path / "out") == report_of(fresh(*three, "--epochs", 2))
    assert run(*three, "--epochs", 2, "--resume") == (0, [])


def test_a_folder_in_a_run_s_place_is_one_line(run, tmp_path):
    """It can't be replaced by a file: that is said in one line, or the run is kept elsewhere; no traceback."""
    run("--epochs", 2)
    report = report_of(tmp_path / "out")
    replace_by_folder(sorted(runs_in(tmp_path / "out"))[3])
    words = ("--track", tiny(), "--jobs", 1, *LITTLE, "--epochs", 2, "--resume", "--quiet")
    ended = finish(Forked(*words, "--out-dir", tmp_path / "out"))
    assert ended.summary in ((0, 0, 0), (0, 1, 0), (1, 1, 0)), ended.err
    assert report_of(tmp_path / "out") == report


def test_no_flipped_bit_comes_back_as_data(run, fresh, tmp_path):
    """One bit flipped anywhere in every file, many times over: what then trains on ends at the very same arrays."""
    chance = random.Random(0)
    run("--epochs", 2)
    half = tmp_path / "half"
    shutil.copytree(tmp_path / "out" / bench.STORE, half)
    wanted = contents(fresh("--epochs", 3))
    again = 0
    for _ in range(12):
        shutil.rmtree(tmp_path / "out" / bench.STORE)
        shutil.copytree(half, tmp_path / "out" / bench.STORE)
        for path in sorted(runs_in(tmp_path / "out")):
            flip(path, chance.random(), chance.randrange(8))
        epochs, lines = run("--epochs", 3, "--resume")
        assert len(lines) == (epochs > 6)
        again += (epochs - 6) // 2
        assert contents(tmp_path / "out").items() >= wanted.items()
    assert again > 36  # of 72 flips; in names, dates and the like they do no harm


@pytest.mark.parametrize("kind", ["file", "pipe", "dangling link"])
def test_what_is_no_folder_in_the_store_s_place_is_one_line(run, tmp_path, no_waiting, kind):
    """It is said before anything is trained, and left as it is."""
    place = tmp_path / "out" / bench.STORE
    place.parent.mkdir()
    {"file": place.touch, "pipe": lambda: os.mkfifo(place), "dangling link": lambda: place.symlink_to("nowhere")}[
        kind
    ]()
    before = place.lstat()
    epochs, lines = run("--epochs", 2, "--resume", status=2)
    assert epochs == 0
    assert len(lines) == 1
    assert bench.STORE in lines[0]
    assert place.lstat() == before
    assert [path.name for path in place.parent.iterdir()] == [bench.STORE]


def test_store_may_be_a_link(run, fresh, tmp_path):
    """A store that is a link to a folder on a larger disk works as the folder does."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / bench.STORE).symlink_to(tmp_path / "disk")
    assert run("--epochs", 2) == (12, [])
    assert run("--epochs", 2, "--resume") == (0, [])
    assert len(list((tmp_path / "disk").iterdir())) == 6


def test_only_the_first_rank_must_be_able_to_write(tmp_path):
    """A disk that refuses is an error of the rank that keeps the results; on another host it is none."""
    (tmp_path / bench.STORE).touch()  # no folder can be made in its place
    store = bench.Store(bench.Config(), tmp_path, False, {})
    with pytest.raises(bench.RunError, match="cannot write"):
        store.save(bench.Run(0, 0.01, None), standing(1))
    store.must_write = False
    store.save(bench.Run(0, 0.01, None), standing(1))
    assert [path.name for path in tmp_path.iterdir()] == [bench.STORE]


@pytest.mark.parametrize("finite", [True, False])
def test_store_gives_back_what_it_took(tmp_path, finite):
    """Every array's bits, the curve, and that a run once diverged, which its numbers need not show."""
    run, arrays = bench.Run(0, 0.01, (0.02, 0.3)), np.random.default_rng(0).standard_normal((3, 7))
    store = bench.Store(bench.Config(epochs=9), tmp_path, True, {})
    store.save(run, bench.State(5, *arrays, finite, {1: 0.1, 2: 0.2, 4: math.inf}))
    found = store.load(run)
    assert (found.epoch, found.finite, found.curve) == (5, finite, {1: 0.1, 2: 0.2, 4: math.inf})
    assert [each.tobytes() for each in (found.weights, found.mean, found.square)] == [row.tobytes() for row in arrays]


def test_data_that_differ_where_they_train_are_an_error(tmp_path):
    """A track whose randomness hangs on the process: no run of a group trains on other data than were checked."""
    config = bench.Config(track=tiny(), seeds=(0, 1), sweep_seeds=2, epochs=1)
    group = [(bench.Run(seed, 0.01, None), None) for seed in config.seeds]
    data = bench.check_track(config)
    assert len(bench.train_runs(config, bench.Store(config, tmp_path, False, data), group, id)) == 2
    for seed in config.seeds:
        store = bench.Store(config, tmp_path, False, data | {seed: data[1 - seed]})
        with pytest.raises(bench.RunError, match=rf"make\({seed}, ...\) differs in another process"):
            bench.train_runs(config, store, group, id)


@pytest.mark.parametrize("kind", [bench.UsageError, bench.RunError])
def test_errors_of_the_script_itself_are_passed_on(kind):
    """What is one line already, with its own exit status, is not wrapped in another that speaks of lost runs."""
    error = kind("one line")
    with pytest.raises(kind) as caught, bench.failure_named([]):
        raise error
    assert caught.value is error


def test_failure_in_a_layer_keeps_what_was_trained(run, fresh, tmp_path, monkeypatch):
    """A layer that fails in its tenth epoch: one line that names error and lost runs, exit status 1, no report;
    --resume then trains the rest alone."""
    options = ("--epochs", 12, "--idea", idea("Fragile"))
    steps = 4 * 9 + 1  # one step an epoch; idea and placebo of two seeds train together
    monkeypatch.setattr(bench.load_file(idea("Fragile").rpartition(":")[0])[0], "steps", 0)
    monkeypatch.setenv("FAIL_AT_STEP", str(steps))
    epochs, lines = run(*options, status=1)
    assert len(lines) == 1
    assert re.search(r"ArithmeticError: planted failure; lost: .*h 0\.08 lr 0\.003 seed 0.*--resume", lines[0])
    assert not (tmp_path / "out" / bench.REPORT).exists()
    monkeypatch.delenv("FAIL_AT_STEP")
    again, lines = run(*options, "--resume")
    assert (epochs + again, lines) == (6 * 12, [])
    assert epochs >= 4 * 9
    assert report_of(tmp_path / "out") == report_of(fresh(*options))


# Ranks ---------------------------------------------------------------------------------------------------------------

OLD = "an earlier report\n"
QUICK = ("--epochs", 2, "--lrs", 0.003, "--seeds", 1)  # on the built-in track, whose workers are forked
ENDINGS = ("SIGINT", "SIGTERM", "SIGINT and SIGTERM")
ONE_LINE = re.compile(r"stage2_bench\.py: [^\n]+\n")


def in_new_folder(name):
    """Return a new folder with an earlier report in it."""
    folder = scratch() / name
    folder.mkdir()
    (folder / bench.REPORT).write_text(OLD)
    return folder


def send(running, names):
    """Send the named signals to a process: Ctrl-C to all its family, both of two at one and the same moment."""
    if " and " in names:
        running.send(signal.SIGSTOP, family=True)
    for name in names.split(" and "):
        running.send(signal.Signals[name], family=name == "SIGINT")
    if " and " in names:
        running.send(signal.SIGCONT, family=True)


def ended_all(group):
    """Wait for the end of several processes that were started together."""
    return [finish(running) for running in group]


@pytest.fixture(scope="module")
def clusters():
    """Several ranks, and what else the number of processes depends on."""
    base = scratch() / "clusters"
    base.mkdir()
    fragile = ("--track", tiny(), "--idea", idea("Fragile"), "--seeds", 2, "--lrs", 0.003, "--quiet")

    def chaotic(size):
        words = ("--track", tiny(), *chaos(), "--quiet", "--out-dir", base / f"chaos{size}")
        return ended_all(ranks(size, *words, path=SCRIPT)), base / f"chaos{size}"

    def agents():
        where = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank")
        words = ("--track", tiny(), *LITTLE, "--epochs", 2, "--quiet", "--out-dir")
        hosts = [torchrun(1, *words, base / f"host{i}", launcher=(*where, i)) for i in range(2)]
        return ended_all(hosts), base

    def refusing():
        refuse = f"os.environ['RANK'] == '0' or open({bench.STORE!r}, 'w').close()"
        group = ranks(2, "--track", tiny(), *LITTLE, "--epochs", 4, prepare=refuse)  # each in a folder of its own
        return ended_all(group), group[0].folder

    def quota():
        (base / "cgroup").mkdir()
        (base / "cgroup" / "cpu.max").touch()
        (base / "cpus.py").write_text(CPUS)
        mount = f'private("mount --bind {base}/cgroup /sys/fs/cgroup")'
        prepare = f"{mount}; sys.path.insert(1, {str(SCRIPT.parent)!r})"
        return finish(Forked(path=base / "cpus.py", prepare=prepare))

    def failing():
        folder = in_new_folder("failing rank")
        return ended_all(ranks(2, *fragile, "--epochs", 9, "--out-dir", folder, slow=True, FAIL_AT_STEP="5")), folder

    def killed():
        folder = in_new_folder("killed rank")
        words = (*fragile, "--epochs", 30, "--out-dir", folder)
        first = ended_all(ranks(3, *words, slow=True, DIE_AFTER_STORE=str(folder / bench.STORE)))
        kept, report = contents(folder), report_of(folder).decode()
        return first, kept, report, ended_all(ranks(2, *words, "--resume")), folder

    def killed_under_torchrun():
        folder = in_new_folder("killed under torchrun")
        words = (*fragile, "--epochs", 100_000, "--out-dir", folder)
        return finish(torchrun(2, *words, DIE_AFTER_STORE=str(folder / bench.STORE))), folder

    scenarios = {f"{size} ranks": functools.partial(chaotic, size) for size in (1, 2, 3)}
    scenarios |= {"failing": failing, "killed": killed, "agents": agents, "quota": quota, "refusing": refusing}
    return Later(scenarios | {"torchrun": killed_under_torchrun, "fragile": lambda: fragile[2:-1]})


def test_failing_rank_fails_the_run_with_its_error(clusters):
    """An exception on rank 1 ends every rank with one line that has its text, and the lost runs; nobody waits on."""
    group, folder = clusters["failing"]
    assert [each.summary for each in group] == [(1, 1, 0)] * 2, [each.err for each in group]
    for ended in group:
        assert re.search(r"rank 1: ArithmeticError: planted failure; lost: .*lr 0\.003 seed \d.*--resume", ended.err)
    assert (folder / bench.REPORT).read_text() == OLD


def test_killed_rank_ends_the_others(clusters):
    """SIGKILL to one of three ranks: the others end by themselves with one line that speaks of --resume."""
    first, kept, report, _, _ = clusters["killed"]
    assert [each.status for each in first] == [1, -signal.SIGKILL, 1]
    assert [each.survivors for each in first] == [[], [], []]
    for ended in (first[0], first[2]):
        assert ONE_LINE.fullmatch(ended.err)
        assert "--resume" in ended.err
    assert kept
    assert report == OLD


def test_resume_with_fewer_ranks_gives_the_same_report(clusters, fresh):
    """What the ranks had trained before one was killed is gone on from, to the report of an uninterrupted run."""
    _, _, _, again, folder = clusters["killed"]
    assert [each.summary for each in again] == [(0, 0, 0)] * 2, [each.err for each in again]
    assert report_of(folder) == report_of(fresh(*clusters["fragile"], "--epochs", 30))


def test_killed_rank_under_torchrun(clusters):
    """The same under torchrun itself: it ends, and leaves neither launcher nor rank."""
    ended, folder = clusters["torchrun"]
    assert (ended.status, ended.survivors) == (1, [])
    assert "--resume" in ended.err
    assert contents(folder)
    assert (folder / bench.REPORT).read_text() == OLD


@pytest.fixture(scope="module")
def alone_ranks():
    """torchrun's variables where no torchrun is: {name: (Ended, seconds, seconds after a signal)}."""
    base = scratch() / "alone"
    base.mkdir()
    words = ("--track", tiny(), "--quiet", "--out-dir", base / "out")

    def place(rank, **more):
        here = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return {name: value for name, value in (here | more).items() if value is not None}

    def waiting(environment, real=False):
        start = now()
        running = Started([PYTHON, eager(), *words], **environment) if real else Forked(*words, **environment)
        return finish(running), now() - start

    def stopped(environment, names):
        running = Forked(*words, path=SCRIPT, slow=True, **environment)
        time.sleep(1.2)
        start = now()
        send(running, names)
        return finish(running), now() - start

    scenarios = {
        "rank 0": functools.partial(waiting, place(0)),
        "rank 1": functools.partial(waiting, place(1), real=True),
        "no address": functools.partial(waiting, place(0, MASTER_ADDR=None)),
        "no port": functools.partial(waiting, place(1, MASTER_PORT=None)),
        "nonsense": functools.partial(waiting, place("first")),
    }
    for rank, names in itertools.product((0, 1), ENDINGS):
        scenarios[f"rank {rank}, {names}"] = functools.partial(stopped, place(rank), names)
    return Later(scenarios | {"out": lambda: base / "out"})


@pytest.mark.parametrize("name", ["rank 0", "rank 1", "no address", "no port", "nonsense"])
def test_variables_of_torchrun_without_torchrun_are_one_line(alone_ranks, name):
    """RANK and WORLD_SIZE from somewhere, and nobody there to meet, or half of what is needed: one clear line when the
    time is up (here two seconds instead of less than a minute), nothing trained, nothing left."""
    ended, seconds = alone_ranks[name]
    assert ended.summary in ((1, 1, 0), (2, 1, 0)), ended.err
    assert ONE_LINE.fullmatch(ended.err)
    assert "torchrun" in ended.err
    assert re.search(r"\bRANK\b|\bMASTER_", ended.err)
    assert seconds < 30
    assert bench.RENDEZVOUS < 55
    assert not alone_ranks["out"].exists()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("names", ENDINGS)
def test_waiting_for_ranks_ends_at_once(alone_ranks, rank, names):
    """Ctrl-C, SIGTERM, or both together end the wait for other ranks at once, with one line."""
    ended, seconds = alone_ranks[f"rank {rank}, {names}"]
    assert_stopped(ended, names)
    assert seconds < 5


# Killed --------------------------------------------------------------------------------------------------------------


def begun(folder, running):
    """Wait until a run has written into its store since this call, or ended."""
    before = written(folder)
    until(lambda: written(folder) != before or running.status is not None)


def written(folder):
    """Return the same as `runs_in` while another process writes and removes."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return runs_in(folder)


def killed_often(folder, start, times):
    """Kill processes with SIGKILL again and again at random moments soon after they have written; then let them end.

    start() returns them.  Returns the last ones' ends, and for each kill the ends, the store and the report after it.
    """
    chance, seen = random.Random(folder.name), []
    for _ in range(times):
        group = start()
        begun(folder, group[0])
        time.sleep(chance.uniform(0, 0.12))
        for running in group:
            running.send(signal.SIGKILL)
        seen.append((ended_all(group), contents(folder), report_of(folder).decode()))
    return ended_all(start()), seen


@pytest.fixture(scope="module")
def kills():
    """Runs that were killed again and again: {name: (last ends, what was seen, folder)}."""

    def scenario(name, start, times):
        folder = in_new_folder(name)
        return *killed_often(folder, lambda: start("--resume", "--out-dir", folder), times), folder

    on_tiny = ("--track", tiny(), "--epochs", 40, *LITTLE)
    starts = {
        "one process": (lambda *words: [Forked(*on_tiny, "--jobs", 1, *words)], 4),
        "workers": (lambda *words: [Forked(*QUICK, "--epochs", 12, "--jobs", 2, *words)], 3),
        "ranks": (lambda *words: ranks(2, *on_tiny, *words), 2),
    }
    return Later({name: functools.partial(scenario, name, *how) for name, how in starts.items()})


@pytest.mark.parametrize("name", ["one process", "workers", "ranks"])
def test_kill_9_at_random_moments(kills, fresh, name):
    """After each kill nobody is left, the store has whole files alone, the old report is untouched; each start goes on
    from there, and the last one ends with the report of an uninterrupted run, byte for byte."""
    last, seen, folder = kills[name]
    for ended, _, report in seen:
        assert {each.status for each in ended} == {-signal.SIGKILL}
        assert [each.survivors for each in ended] == [[]] * len(ended)
        assert report == OLD
    assert [(each.status, each.survivors) for each in last] == [(0, [])] * len(last), [each.err for each in last]
    assert not any(warnings_in(each.err) for each in last)
    wanted = fresh("--track", "dynamics", *QUICK, "--epochs", 12) if name == "workers" else fresh("--epochs", 40)
    assert report_of(folder) == report_of(wanted)
    total = 3 * 12 if name == "workers" else 6 * 40
    assert progress(last[0].err)[0][1] < total


def cpu_seconds(pid):
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def loads(main, library):
    """Say whether a process, or a child of it, has loaded a library."""
    for pid in (main, *family(main)):
        with contextlib.suppress(OSError):
            if library in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


AT_FORK = """
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
os.register_at_fork(before=interrupt, after_in_child=interrupt)
"""
LATE = """
import multiprocessing.process, time
leave, join = os._exit, multiprocessing.process.BaseProcess.join
os._exit = lambda status: (time.sleep(0.5), leave(status))
multiprocessing.process.BaseProcess.join = lambda *given: (time.sleep(0.3), join(*given))[1]
"""
WHILE_WRITING = """
import time, zipfile
opened = zipfile.ZipFile.open

def interrupted(self, name, mode="r", **how):
    handle = opened(self, name, mode, **how)
    if mode == "w":
        {what}
    return handle

zipfile.ZipFile.open = interrupted
"""
IN_A_ZIP = WHILE_WRITING.format(what="os.kill(os.getpid(), signal.SIGINT)")
IN_A_WORKERS_ZIP = WHILE_WRITING.format(what="os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
PHASES = ("data", "training", "workers", "ranks")  # which all three endings are tried in
MORE = (("training", "SIGHUP"), ("drawing", "SIGINT"), ("drawing", "SIGTERM"))
LOADING = (("imports", "SIGINT"), ("libraries", "SIGINT"), ("libraries", "SIGTERM"))


@pytest.fixture(scope="module")
def endings():
    """Runs that were stopped in each phase, in each way, and whose workers were killed: {name: (Ended, folder)}."""
    slow = scratch() / "slow"
    slow.mkdir()

    def started(phase, folder):
        """Start a command and wait until it is in the phase; returns its processes."""
        words = ("--quiet", "--out-dir", folder)
        on_tiny = ("--track", tiny(), *LITTLE, *words)
        if phase in ("imports", "libraries"):
            group = [Started(script(*on_tiny))]
            library = "_multiarray_umath" if phase == "imports" else "libtorch_cpu"
            until(lambda: loads(group[0].pid, library))
            return group
        if phase == "data":
            track = slow / f"{folder.name.replace(' ', '_')}.py"
            track.write_text(SLOW)
            group = [Forked("--track", track, "--jobs", 1, *words, slow=True)]
            until(track.with_suffix(".asked").exists)
            return group
        if phase == "drawing":
            group = [Forked("--epochs", 1, "--jobs", 1, *on_tiny, "--plot", "figure.png", slow=True)]
            until(lambda: (folder / bench.REPORT).read_text() != OLD)
            return group
        if phase == "workers":
            group = [Forked("--epochs", 1000, "--jobs", 2, *LITTLE, *words, slow=True)]
        elif phase == "ranks":
            group = ranks(2, "--epochs", 100_000, *on_tiny, slow=True)
        else:
            nohup = "signal.signal(signal.SIGHUP, signal.SIG_IGN)" if phase == "nohup" else ""
            group = [Forked("--epochs", 100_000, "--jobs", 1, *on_tiny, prepare=nohup, slow=True)]
        begun(folder, group[0])
        return group

    def stopped(phase, names):
        folder = in_new_folder(f"{phase} {names}")
        group = started(phase, folder)
        for running in group:
            send(running, names)
        return ended_all(group), folder

    def spawning():
        folder = in_new_folder("spawning")
        running = Forked("--track", tiny(), "--jobs", 2, "--quiet", "--out-dir", folder, slow=True)
        until(lambda: any(loads(pid, "_multiarray_umath") for pid in set(family(running.pid)) - {running.pid}))
        running.send(signal.SIGINT, family=True)
        return [finish(running)], folder

    def forking():
        folder = in_new_folder("forking")
        return [finish(Forked(*QUICK, "--jobs", 2, "--quiet", "--out-dir", folder, prepare=AT_FORK, slow=True))], folder

    def saving():
        folder = in_new_folder("saving")
        words = ("--track", tiny(), *LITTLE, "--jobs", 1, "--quiet", "--out-dir", folder)
        return [finish(Forked(*words, prepare=IN_A_ZIP, slow=True))], folder

    def writing():
        folder = in_new_folder("writing")
        words = (*QUICK, "--jobs", 2, "--quiet", "--out-dir", folder)
        return [finish(Forked(*words, prepare=IN_A_WORKERS_ZIP, slow=True))], folder

    def killed(name, number):
        folder = in_new_folder(name)
        (running,) = started("workers", folder)
        os.kill(min(pid for pid, parent in family(running.pid).items() if parent == running.pid), number)
        return finish(running, 30), folder

    def late():
        folder = in_new_folder("late")
        words = ("--epochs", 1000, "--jobs", 2, *LITTLE, "--quiet", "--out-dir", folder)
        running = Forked(*words, prepare=LATE, slow=True)
        begun(folder, running)
        running.send(signal.SIGTERM)
        return [finish(running)], folder

    def nohup():
        folder = in_new_folder("nohup")
        (running,) = started("nohup", folder)
        running.send(signal.SIGHUP, family=True)
        begun(folder, running)
        begun(folder, running)
        running.send(signal.SIGTERM)
        return [finish(running)], folder

    def idle(folder):
        running = Forked(*QUICK, "--epochs", 6, "--jobs", 2, "--quiet", "--out-dir", folder, slow=True)
        until(lambda: len(family(running.pid)) == 3)
        stopped, idle = sorted(set(family(running.pid)) - {running.pid})
        os.kill(stopped, signal.SIGSTOP)

        def stands_still():
            before = cpu_seconds(idle)
            time.sleep(0.4)
            return before > 0.2 and cpu_seconds(idle) == before

        until(stands_still)
        os.kill(idle, signal.SIGKILL)
        time.sleep(0.3)
        os.kill(stopped, signal.SIGCONT)
        return finish(running), folder

    chosen = [*itertools.product(PHASES, ENDINGS), *LOADING, *MORE]
    scenarios = {f"{phase} {names}": functools.partial(stopped, phase, names) for phase, names in chosen}
    scenarios |= {
        "spawning": spawning,
        "forking": forking,
        "saving": saving,
        "writing": writing,
        "worker": functools.partial(killed, "worker", signal.SIGKILL),
        "ended worker": functools.partial(killed, "ended worker", signal.SIGTERM),
        "nohup": nohup,
        "late": late,
    }
    return Later(scenarios | {"idle worker": lambda: idle(in_new_folder("idle worker"))})


def assert_stopped(ended, names):
    """Check that a process ended by one of the named signals, with its one line, nothing on stdout, and nobody left."""
    numbers = [signal.Signals[name] for name in names.split(" and ")]
    assert ended.status in [128 + number for number in numbers], (ended.status, ended.err)
    name = signal.Signals(ended.status - 128).name
    assert re.fullmatch(rf"stage2_bench\.py: stopped by {name}[^\n]*--resume[^\n]*\n", ended.err), ended.err
    assert (ended.out, ended.survivors) == ("", [])


@pytest.mark.parametrize(("phase", "names"), [*itertools.product(PHASES, ENDINGS), MORE[0]])
def test_signals_end_every_phase_with_one_line(endings, phase, names):
    """Ctrl-C to the whole group, SIGTERM, or both at once, while data are made, in training alone, with workers and on
    ranks: one line, the shell's exit status, nobody left, what was trained is whole, the old report untouched."""
    group, folder = endings[f"{phase} {names}"]
    for ended in group:
        assert_stopped(ended, names)
    assert {path.name for path in folder.iterdir()} == {bench.REPORT} | ({bench.STORE} if phase != "data" else set())
    assert (folder / bench.REPORT).read_text() == OLD
    assert (phase == "data") == (not contents(folder))


def test_a_stop_leaves_no_half_file_of_a_worker(endings):
    """SIGTERM while a worker, which is killed for it, is in the middle of a training's file."""
    (ended,), folder = endings["writing"]
    assert_stopped(ended, "SIGTERM")
    assert not [path for path in folder.rglob("*") if path.is_file() and path.name != bench.REPORT]


def test_a_late_end_is_still_one_line(endings):
    """On a busy machine workers take their time to die, and the main thread learns of it before the program ends: it
    says nothing, and does not end it otherwise."""
    (ended,), folder = endings["late"]
    assert_stopped(ended, "SIGTERM")
    assert (folder / bench.REPORT).read_text() == OLD


def test_nohup_stays_nohup(endings):
    """A hangup that was ignored when the script started, as by nohup, goes on to be ignored."""
    (ended,), _ = endings["nohup"]
    assert_stopped(ended, "SIGTERM")


@pytest.mark.parametrize(("phase", "names"), LOADING)
def test_signals_while_the_libraries_load_end_it_at_once(endings, phase, names):
    """Ctrl-C or SIGTERM before the script has begun: it is gone, without a traceback."""
    (ended,), folder = endings[f"{phase} {names}"]
    number = signal.Signals[names]
    assert ended.status in (128 + number, -number)
    assert len(ended.err.splitlines()) <= 1
    assert "Traceback" not in ended.err
    assert (ended.out, ended.survivors) == ("", [])
    assert [path.name for path in folder.iterdir()] == [bench.REPORT]


@pytest.mark.parametrize("names", ENDINGS[:2])
def test_signals_while_drawing_leave_whole_files(endings, names):
    """The result is written before it is drawn: a signal then ends the drawing and nothing else."""
    (ended,), folder = endings[f"drawing {names}"]
    assert ended.status == 128 + signal.Signals[names]
    assert len(ended.err.splitlines()) == 1
    assert json.loads(report_of(folder))["n_seeds"] == 2
    assert {path.name for path in folder.iterdir()} <= {bench.REPORT, bench.OUTPUT, bench.STORE, "figure.png"}


@pytest.mark.parametrize("name", ["spawning", "forking", "saving"])
def test_interrupt_in_a_delicate_moment_is_one_line(endings, name):
    """Ctrl-C while spawned workers load their libraries, which must not each print a traceback; in the moment of a
    fork, whose hooks swallow what a handler raises; while a training is written into a zip, which then complains."""
    (ended,), folder = endings[name]
    assert_stopped(ended, "SIGINT")
    assert (folder / bench.REPORT).read_text() == OLD


@pytest.mark.parametrize("name", ["worker", "ended worker", "idle worker"])
def test_killed_worker_stops_the_run_and_names_what_is_lost(endings, name):
    """SIGKILL to a worker (out of memory) or SIGTERM, at work or between two rounds: one line with the lost runs and
    --resume, exit status 1, no hang, nobody left; what was trained is kept."""
    ended, folder = endings[name]
    assert ended.summary == (1, 1, 0), ended.err
    assert "a worker process was killed; lost: " in ended.err
    assert re.search(r"(baseline|h 0\.08|h 0\.0) lr 0\.003 seed \d", ended.err)
    assert "--resume" in ended.err
    assert contents(folder)
    assert (folder / bench.REPORT).read_text() == OLD


# Together in one place ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def neighbours():
    """Two runs at once in one folder, and shared memory that is none: {name: ([Ended], folder)}."""

    def at_once(name, *options):
        folder = scratch() / name
        words = ("--track", tiny(), "--jobs", 1, *LITTLE, "--epochs", 30, "--quiet", "--out-dir", folder)
        group = ended_all([Forked(*words, *options) for _ in range(2)])
        single = scratch() / f"{name} alone"
        finish(Forked(*words[:-1], single))
        return group, folder, single

    def shared_memory(name, options):
        folder = scratch() / name
        mount = f'private("mount -t tmpfs -o {options} tmpfs /dev/shm")'
        return [finish(Forked(*QUICK, "--jobs", 2, "--quiet", "--out-dir", folder, prepare=mount))], folder

    return Later({
        "at once": lambda: at_once("at once"),
        "at once with --resume": lambda: at_once("at once resume", "--resume"),
        "read-only": lambda: shared_memory("shm read-only", "ro"),
        "tiny": lambda: shared_memory("shm tiny", "size=4k"),
    })  # fmt: skip


@pytest.mark.parametrize("name", ["at once", "at once with --resume"])
def test_runs_at_once_in_one_folder(neighbours, fresh, name):
    """Two equal commands in one folder at one time: both end well, the report is whole, and no half file is left."""
    group, folder, single = neighbours[name]
    assert [each.summary for each in group] == [(0, 0, 0)] * 2, [each.err for each in group]
    assert report_of(folder) == report_of(fresh("--epochs", 30))
    assert sorted(path.name for path in folder.iterdir()) == sorted([bench.STORE, bench.REPORT, bench.OUTPUT])
    assert {path.suffix for path in (folder / bench.STORE).iterdir()} == {".npz"}
    assert contents(folder) == contents(single)


@pytest.mark.parametrize("name", ["read-only", "tiny"])
def test_shared_memory_is_not_needed_or_said_in_one_line(neighbours, fresh, name):
    """/dev/shm read-only, or of one page: two workers do their work, or one line says why they can't and what helps."""
    (ended,), folder = neighbours[name]
    if ended.status == 77:
        pytest.skip("this machine allows no private mounts")
    if ended.status == 0:
        assert ended.err == ""
        assert report_of(folder) == report_of(fresh("--track", "dynamics", *QUICK))
    else:
        assert ended.summary == (1, 1, 0), ended.err
        assert "--jobs 1" in ended.err
