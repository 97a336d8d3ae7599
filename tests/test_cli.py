"""The command line: what is wrong is said in one line before anything is touched, and every terminal will do.

Bad input goes through `main` in this process, which is what the script calls; what depends on a terminal, a limit or
a place is a process.  `Started`, `Forked`, `finish` and the tiny track are those of test_runs.py.
"""

import contextlib
import copy
import functools
import json
import math
import os
import platform
import pty
import re
import select
import shutil
import string
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_runs import (
    ONE_LINE,
    PYTHON,
    SCRIPT,
    SMOKE,
    TINY,
    Forked,
    Later,
    Started,
    contents,
    finish,
    no_waiting,
    one_thread,
    report_of,
    scratch,
    script,
    start_early,
    tiny,
)

import stage2_bench as bench

__all__ = ["no_waiting"]  # a fixture
COMMITTED = json.loads(SMOKE.read_text())
REFERENCE = SMOKE.with_name("reference_report.json")
FILES = sorted([bench.STORE, bench.REPORT, bench.OUTPUT])


@pytest.fixture(scope="module", autouse=True)
def background(request):
    """Begin with all processes that the selected tests look at."""
    start_early(request, ("places",))
    with one_thread():
        yield


def quick():
    """Return the options of a run that takes a moment."""
    return ("--track", tiny(), "--epochs", 1, "--seeds", 1, "--lrs", 0.003, "--jobs", 1)


@pytest.fixture
def main(tmp_path, capfd):
    """Return a function that runs `main` with its results in tmp_path/out: (status, stdout, stderr)."""

    def run(*words, folder=tmp_path / "out"):
        capfd.readouterr()
        status = bench.main(["--out-dir", str(folder), *map(str, words)])
        return status, *capfd.readouterr()

    return run


def everything(folder):
    """Return what is in a folder: {path: which file it is, and for what is no folder when it was written}."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (each.st_ino, path.is_dir() or each.st_mtime_ns) for path, each in found.items()}


@pytest.fixture
def refused(tmp_path, main):
    """Return a function: run with options; they must be refused in one line, which it returns, with nothing touched."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / bench.REPORT).write_text("earlier")

    def run(*options):
        before = everything(tmp_path)
        status, out, err = main(*options, folder=folder)
        assert (status, out) == (2, "")
        assert re.fullmatch(r"stage2_bench\.py: error: [^\n]+\n", err)
        assert everything(tmp_path) == before
        return err

    return run


# Bad input ------------------------------------------------------------------------------------------------------------

COUNTED = ("--seeds", "--sweep-seeds", "--epochs", "--jobs", "--hidden", "--batch")
COUNTS = ["0", "-1", "1.5", "1e3", "three", "", "nan", "999999999999999999999", "\N{ARABIC-INDIC DIGIT THREE}", "1_0"]
BAD_OPTIONS = [
    *[(option, value) for option in COUNTED for value in COUNTS],
    *[("--seeds", value) for value in ("3:3", "5:2", ":", "1:2:3", "-1:2", "0:2000000", "1:x", "0:4294967297")],
    *[
        (option, value)
        for option in ("--lrs", "--h")
        for value in ("nan", "inf", "-0.1", "x", "1e999", "0.1.2", "", "1_0")
    ],
    *[("--h", value) for value in ("0.1+", "+0.1", "0.1+nan", "0.1+-2", "1e-2+inf")],
    *[("--lrs", value) for value in ("0", "0.0", "1e-999", "Auto")],
    *[("--rtol", value) for value in ("nan", "-1", "inf")],
    ("--jobs", "100000"),
    ("--track", "pendulum"),
    ("--track", "none.py"),
    ("--track", ""),
    ("--idea", "Layer"),
    ("--idea", "none.py:"),
    ("--idea", "none.py"),
    ("--idea", "none.py:not a name"),
    ("--dtype", "float16"),
    ("--plot", "figure.gif"),
    ("--plot", "figure"),
    ("--plot", "/nowhere/at/all/figure.png"),
    ("--plot", "a" * 300 + ".png"),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
def test_bad_value_is_refused_by_name(refused, option, value):
    """One line that names the option and the value, exit status 2, before any file is touched."""
    line = refused(f"{option}={value}")
    assert f"{option}: " in line
    assert value in line or ascii(value) in line


@pytest.mark.parametrize("value", ["-1e-3", "-inf", "-0.001"])
def test_negative_rate_is_refused_by_value(refused, value):
    """A negative rate as a word of its own is a bad value, not an unknown option."""
    line = refused("--lrs", value)
    assert "--lrs" in line
    assert value in line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--lrs", "0.003", "3e-3"), ("--lrs", "0.003")),
        (("--lrs", "auto", "0.003"), ("--lrs", "auto")),
        (("--lrs", "0.003", "auto"), ("--lrs", "auto")),
        (("--h", "0.02+0.08", "0.08", "0.02+8e-2"), ("--h", "0.02+0.08")),
        (("--seeds", "2", "--sweep-seeds", "3"), ("--sweep-seeds", "3", "2 seeds")),
        (("--sweep-seeds", "9"), ("--sweep-seeds", "9", "8 seeds")),
        (("--smoke", "--sweep-seeds", "3"), ("--sweep-seeds", "3", "2 seeds")),
        (("--rtol", "0.1"), ("--rtol", "--diff")),
        (("--all",), ("--all", "--diff")),
        (("--conclusions",), ("--conclusions", "--diff")),
        (("--unknown", "7"), ("--unknown", "7")),
        (("--see", "7"), ("--see", "7")),
        (("--seeds",), ("--seeds",)),
        (("stray",), ("stray",)),
        (("--idea", "none.py:Layer"), ("--idea", "none.py", "No such file")),
    ],
)
def test_contradictions_are_refused(refused, options, named):
    """Values that are fine alone but not together, and words that mean nothing."""
    line = refused(*options)
    assert all(word in line for word in named)


def test_workers_of_ranks_are_refused(refused, monkeypatch):
    """Under torchrun the ranks do the work: --jobs is a contradiction there."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--jobs" in refused("--jobs", "2")


@pytest.mark.parametrize(
    "place", ["a_file", "a_file/below", "x" * 300, "/proc/nothing", "a_pipe", "a_loop", "a_loop/below"]
)
def test_out_dir_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capfd, no_waiting, place):
    """A file, a pipe, a link to itself, a place below one, a name too long, a file system that takes no files: said
    before any training."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("precious")
    os.mkfifo("a_pipe")
    Path("a_loop").symlink_to("a_loop")
    monkeypatch.setattr(bench, "benchmark", None)  # would be a TypeError, were it reached
    assert bench.main(["--track", tiny(), "--jobs", "1", "--out-dir", place]) == 2
    line = capfd.readouterr().err
    assert re.fullmatch(r"stage2_bench\.py: error: argument --out-dir: [^\n]+\n", line)
    assert place in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "a_loop", "a_pipe"]
    assert Path("a_file").read_text() == "precious"


@pytest.mark.parametrize("name", [bench.REPORT, bench.OUTPUT])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_in_a_result_s_place_is_refused(refused, tmp_path, no_waiting, name, make):
    """A folder or a pipe named like a result: said before any training, and never waited for."""
    (tmp_path / "results" / name).unlink(missing_ok=True)
    make(tmp_path / "results" / name)
    assert name in refused(*quick())


@pytest.mark.parametrize("words", [("--diff",), ("--track",), ("--idea",)])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_never_waited_for(refused, tmp_path, no_waiting, words, make):
    """A folder or a pipe in place of a report, a track or an idea is refused by its name."""
    make(tmp_path / "odd.py")
    line = refused(*words, f"{tmp_path / 'odd.py'}{':Layer' * (words == ('--idea',))}")
    assert words[0] in line
    assert "odd.py" in line


def test_a_pipe_in_our_report_s_place_is_never_waited_for(tmp_path, main, no_waiting):
    """The other side of --diff."""
    os.mkfifo(tmp_path / bench.REPORT)
    status, out, err = main("--diff", SMOKE, folder=tmp_path)
    assert (status, out) == (2, "")
    assert ONE_LINE.fullmatch(err)


def test_a_pipe_or_folder_in_the_figure_s_place_is_never_waited_for(tmp_path, main, refused, no_waiting):
    """A folder is refused; a pipe too, or the figure takes its place."""
    (tmp_path / "folder.svg").mkdir()
    assert "--plot" in refused(*quick(), "--plot", tmp_path / "folder.svg")
    path = tmp_path / "pipe.svg"
    os.mkfifo(path)
    status, _, err = main(*quick(), "--plot", path, "--quiet")
    assert (status, len(err.splitlines()), path.is_file()) in ((0, 0, True), (2, 1, False))


def changed(*path, to=None):
    """Return the committed smoke report with one place changed, or removed where `to` is None."""
    report = copy.deepcopy(COMMITTED)
    place = report
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(report)


BAD_REPORTS = {
    "missing": (None, "No such file"),
    "empty": ("", "not a JSON"),
    "text": ("hello", "not a JSON"),
    "truncated": (SMOKE.read_text()[:1000], "not a JSON"),
    "not UTF-8": (b"\xff\xfe{}", "not a JSON"),
    "NaN": (changed("comparison", "p_value", to=math.nan), "NaN"),
    "infinity": (changed("comparison", "p_value", to=math.inf), "Infinity"),
    "too large a number": (SMOKE.read_text().replace('"n_seeds": 2', '"n_seeds": 1e999'), "1e999"),
    "a number of 5,000 digits": (SMOKE.read_text().replace('"n_seeds": 2', '"n_seeds": ' + "9" * 5000), "not a JSON"),
    "deeply nested": ("[" * 100_000, "not a JSON"),
    "a list": ("[1, 2]", "bench_version"),
    "another version": (changed("bench_version", to=2), "bench_version is 2"),
    "version true": (changed("bench_version", to=True), "bench_version is true"),
    "no version": (changed("bench_version"), "bench_version"),
    "lacks a block": (changed("idea"), "idea"),
    "a block is a number": (changed("baseline", to=3), "malformed"),
    "scores are text": (changed("idea", "per_seed", to=["a", "b"]), "malformed"),
    "no scores": (changed("idea", "per_seed", to=[]), "malformed"),
}


@pytest.mark.parametrize("fault", BAD_REPORTS)
def test_bad_report_is_refused_by_diff(refused, main, tmp_path, fault):
    """What is no report is trouble (2), on either side, in one line that names the file and the fault."""
    text, named = BAD_REPORTS[fault]
    path = tmp_path / bench.REPORT
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert named in refused("--diff", path)
    status, out, line = main("--diff", SMOKE, folder=tmp_path)
    assert (status, out) == (2, "")
    assert ONE_LINE.fullmatch(line)
    assert named in line
    assert str(path) in line


# Diverged and enormous ------------------------------------------------------------------------------------------------


def test_diverged_and_enormous_rates_are_flagged_and_lose(main, tmp_path):
    """`--lrs 1e200 0.01 1e20` finishes, says in log and extensions that two rates are no good, and picks 0.01."""
    words = ("--track", tiny(), "--seeds", 2, "--epochs", 6, "--jobs", 1, "--quiet", "--lrs", "1e200", "0.01", "1e20")
    status, out, err = main(*words)
    assert (status, err) == (0, "")
    report = json.loads(report_of(tmp_path / "out"))
    assert report["baseline"]["best_cfg"]["lr"] == report["best_idea_cfg"]["lr"] == 0.01
    flagged = {(row["model"], row["cfg"]["lr"]) for row in report["extensions"]["flagged"]}
    assert flagged == {(name, lr) for name in ("baseline", "idea", "placebo") for lr in (1e20, 1e200)}
    rows = [line.split(maxsplit=4) for line in out.splitlines() if re.match(r"(baseline|idea|placebo) +1e\+\d+", line)]
    assert len(rows) == 6
    assert all("diverged" in " ".join(row[3:]) for row in rows if row[1] == "1e+200")
    assert all("worse than" in row[4] for row in rows if row[1] == "1e+20")


@pytest.mark.parametrize("options", [("--lrs", "1e200"), ("--lrs", "1e20", "--dtype", "float32")])
def test_everything_diverged_is_null_and_status_1(main, tmp_path, options):
    """All runs beyond the number range: strict JSON with nulls, a verdict that says so, exit status 1."""
    status, out, err = main("--track", tiny(), "--seeds", 2, "--epochs", 2, "--jobs", 1, "--quiet", *options)
    assert (status, err) == (1, "")
    assert "diverged" in out.splitlines()[0]
    report = json.loads(report_of(tmp_path / "out"), parse_constant=pytest.fail)
    assert report["baseline"]["full"] == {"mean": None, "std": None, "per_seed": [None, None], "n": 2}
    assert report["comparison"]["p_value"] is None
    assert report["comparison"]["verdict"].startswith("not judged")
    assert "seed 0, 1" in report["comparison"]["verdict"]
    assert {row["mean"] for row in report["idea_sweep"]} == {None}
    assert len(report["extensions"]["flagged"]) == 3


# Terminals, places, full disks ----------------------------------------------------------------------------------------

TERMINAL = 'os.dup2(os.open("{}", os.O_RDWR | os.O_NOCTTY), 2)'
HEAD = """
import subprocess
pipe = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE)
os.dup2(pipe.stdin.fileno(), 1)
pipe.stdin.close()
"""
GONE = "reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader); os.close(writer)"
FULL = 'os.dup2(os.open("/dev/full", os.O_WRONLY), 1)'
NO_STDERR = "os.close(2)"
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
DISK = """
import atexit
private("mount -t tmpfs -o size=64k tmpfs {0}")
Path("{0}/{1}").write_text("earlier")
atexit.register(lambda: print([path.name for path in sorted(Path("{0}").iterdir())], Path("{0}/{1}").read_text()))
"""
READ_ONLY = 'private("mount --bind {0} {0} && mount -o remount,bind,ro {0}")'
NO_MATPLOTLIB = 'sys.modules["matplotlib"] = None'

IMPORT = """
import os, signal, sys, threading
for name in [name for name in os.environ if name.endswith("_NUM_THREADS") or name.startswith("VECLIB")]:
    del os.environ[name]
signals = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
import numpy, scipy, torch, warnings
from scipy import integrate
filters, environment, path = list(warnings.filters), dict(os.environ), list(sys.path)
state = torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), threading.active_count()
import stage2_bench
assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == signals
assert state == (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), threading.active_count())
assert (filters, environment, path) == (list(warnings.filters), dict(os.environ), list(sys.path))
assert sorted(os.listdir()) == ["importer.py"]
print(len(os.listdir("/proc/self/task")), open(f"/proc/self/task/{os.getpid()}/children").read())
"""


@pytest.fixture(scope="module")
def places():
    """Runs in odd places: {name: (Ended, folder)}."""
    base = scratch() / "places"
    base.mkdir()
    fast = (*quick(), "--quiet")

    def forked(name, prepare="", *more, **environment):
        (base / name).mkdir(exist_ok=True)
        (base / name / bench.REPORT).write_text("earlier")
        return finish(Forked(*fast, "--out-dir", base / name, *more, prepare=prepare, **environment)), base / name

    def started(name, *command, **environment):
        return finish(Started(command, base, **environment)), base / name

    def terminal():
        ours, theirs = pty.openpty()
        words = ("--track", tiny(), "--epochs", 30, "--seeds", 2, "--jobs", 1, "--out-dir", base / "terminal")
        running = Forked(*words, prepare=TERMINAL.format(os.ttyname(theirs)), TERM="xterm-256color")
        shown = b""
        while running.status is None or select.select([ours], [], [], 0.1)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 4096)
        os.close(theirs)
        os.close(ours)
        ended = finish(running)
        ended.err = shown.decode()
        return ended, base / "terminal"

    def c_locale():
        strange = base / "a path with späces"
        strange.mkdir()
        shutil.copy(tiny(), strange / "träck one.py")
        environment = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "NO_COLOR": "1"}
        words = script(*fast, "--track", strange / "träck one.py", "--out-dir", strange / "ré sults")
        ended = finish(Started(["sh", "-c", 'exec "$@" <&-', "sh", *words], base, **environment))
        return ended, strange / "ré sults"

    def elsewhere():
        checkout = base / "checkout"
        checkout.mkdir()
        shutil.copy(SCRIPT, checkout)
        prepare = READ_ONLY.format(checkout)
        running = Forked(
            *fast, "--out-dir", base / "elsewhere", path=checkout / SCRIPT.name, cwd=checkout, prepare=prepare
        )
        ended = finish(running)
        assert [path.name for path in checkout.iterdir()] == [SCRIPT.name]
        return ended, base / "elsewhere"

    def read_only_store():
        (base / "old store" / bench.STORE).mkdir(parents=True)
        return forked("old store", READ_ONLY.format(f"'{base / 'old store' / bench.STORE}'"))

    def from_zip():
        shutil.copy(SCRIPT, base / "__main__.py")
        shutil.make_archive(base / "script", "zip", base, "__main__.py")
        return started("zip", PYTHON, base / "script.zip", *fast, "--jobs", 2, "--out-dir", base / "zip")

    def from_stdin():
        words = ("sh", "-c", '"$0" - "$@" <"$SCRIPT"', PYTHON, *fast, "--jobs", 2, "--out-dir", base / "stdin")
        return started("stdin", *words, SCRIPT=str(SCRIPT))

    def importing():
        (base / "importing").mkdir()
        (base / "importing" / "importer.py").write_text(IMPORT)
        path = base / "importing" / "importer.py"
        prepare = f"sys.path.insert(1, {str(SCRIPT.parent)!r}); sys.dont_write_bytecode = True"
        return finish(Forked(path=path, cwd=path.parent, prepare=prepare)), path.parent

    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    enormous = ("--track", tiny(), "--seeds", 2, "--epochs", 2, "--lrs", "1e20", "1e25", "--jobs", 1, "--quiet")
    scenarios = {
        "C locale": c_locale,
        "closed": lambda: started("closed", *closed, *script(*fast, "--jobs", 2, "--out-dir", base / "closed")),
        "zip": from_zip,
        "stdin": from_stdin,
        "enormous": lambda: started(
            "enormous", PYTHON, "-W", "error", SCRIPT, *enormous, "--out-dir", base / "enormous"
        ),
        "help": lambda: forked("help", HEAD, "--help"),
        "terminal": terminal,
        "head": lambda: forked("head", HEAD),
        "gone reader": lambda: forked("gone", GONE),
        "full output": lambda: forked("full", FULL),
        "full diff": lambda: forked(
            "full diff", FULL, "--diff", SCRIPT.parent / bench.REPORT, "--out-dir", SCRIPT.parent
        ),
        "closed stderr": lambda: forked("no stderr", NO_STDERR, "--seeds", 0),
        "limit of runs": lambda: forked("limit of runs", LIMIT.format(8_192)),
        "limit of results": lambda: forked("limit of results", LIMIT.format(9_000), "--hidden", 2),
        "full disk": lambda: forked("disk", DISK.format(base / "disk", bench.REPORT)),
        "read-only": lambda: forked("only read", READ_ONLY.format(f"'{base / 'only read'}'")),
        "read-only store": read_only_store,
        "read-only checkout": elsewhere,
        "backend": lambda: forked("backend", "", "--plot", "figure.png", MPLBACKEND="nonsense"),
        "odd backend": lambda: forked("odd backend", "", "--plot", "figure.png", MPLBACKEND="module://nowhere"),
        "no matplotlib": lambda: forked("no matplotlib", NO_MATPLOTLIB, "--plot", "figure.png"),
        "importing": importing,
    }
    return Later(scenarios)


def assert_complete(folder):
    """Check that all files are there, and nothing else; the report is strict JSON, the log ends with the same."""
    assert sorted(path.name for path in folder.iterdir()) == FILES
    report = json.loads(report_of(folder), parse_constant=pytest.fail)
    log = (folder / bench.OUTPUT).read_text(encoding="ascii")
    assert json.loads(log[log.index("\n{") :])["bench_report"] == report
    assert len(contents(folder)) == 3


def skip_without_mounts(ended):
    """Skip the test where private mounts are not allowed."""
    if ended.status == 77:
        pytest.skip("this machine allows no private mounts")


def test_terminal_gets_plain_lines_and_stdout_the_log_alone(places):
    """On a terminal too, progress is whole lines without control characters; stdout has the log file's human part."""
    ended, folder = places["terminal"]
    assert ended.status == 0
    assert not set(ended.err) & set("\x1b\x08")
    assert ended.err.count("\r") == ended.err.count("\r\n")
    lines = ended.err.splitlines()
    assert len(lines) >= 3
    assert all(
        re.fullmatch(r"stage2_bench: \d+ of \d+ epochs of runs, \d+ s(, about \d+ s left)?", line) for line in lines
    )
    log = (folder / bench.OUTPUT).read_text()
    assert ended.out.startswith("Verdict: ")
    assert log.startswith(ended.out.rstrip("\n"))
    assert "\n{" in log[len(ended.out) - 1 :]


def test_ascii_console_odd_path_and_closed_stdin(places):
    """LANG=C, an ASCII console, spaces and umlauts in paths, no stdin: all complete, all ASCII."""
    ended, folder = places["C locale"]
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.isascii()
    assert not set("\r\x1b") & set(ended.out)
    assert_complete(folder)
    assert json.loads(report_of(folder))["custom_track"]["file"] == "träck one.py"


@pytest.mark.parametrize("name", ["head", "gone reader"])
def test_a_reader_that_leaves_is_no_error(places, name):
    """`... | head -1`, or nobody who reads at all: exit status 0, nothing on stderr, the files are complete."""
    ended, folder = places[name]
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("\n") == (name == "head")
    assert_complete(folder)


def test_closed_streams(places):
    """stdin, stdout and stderr closed, with workers: the files are complete, and nothing leaks into them."""
    ended, folder = places["closed"]
    assert ended.status == 0
    assert_complete(folder)


def test_closed_stderr_sends_no_complaint_to_stdout(places):
    """stdout carries the log only, even where stderr is closed."""
    ended, _ = places["closed stderr"]
    assert (ended.status, ended.out) == (2, "")


def test_full_output_is_said_and_the_files_are_complete(places):
    """stdout on a full device: one line, exit status 1, but the files are whole."""
    ended, folder = places["full output"]
    assert ended.status == 1
    assert ended.err == "stage2_bench.py: stdout: No space left on device\n"
    assert_complete(folder)


def test_comparison_that_nobody_can_read_is_trouble(places):
    """--diff into a full device: one line, and no status that says "the same"."""
    ended, _ = places["full diff"]
    assert (ended.status, ended.err) == (2, "stage2_bench.py: stdout: No space left on device\n")


@pytest.mark.parametrize("name", ["limit of runs", "limit of results", "full disk"])
def test_full_disk_leaves_the_old_report_whole(places, name):
    """A limit on a file's size that the runs exceed, or the results alone, or a file system of 64 KiB: one line, exit
    status 1, the old report as it was, no half file."""
    ended, folder = places[name]
    skip_without_mounts(ended)
    assert ended.status == 1
    assert re.fullmatch(r"stage2_bench\.py: error: cannot write [^\n]+\n", ended.err)
    if name == "full disk":
        assert ended.out.endswith(" earlier\n")
        assert set(re.findall(r"'([^']+)'", ended.out)) <= {bench.REPORT, bench.STORE}
    else:
        assert (folder / bench.REPORT).read_text() == "earlier"
        assert {path.name for path in folder.iterdir()} <= {bench.REPORT, bench.STORE}
        assert (name == "limit of results") == (len(contents(folder)) == 3)
        assert {path.suffix for path in folder.glob(f"{bench.STORE}/*")} <= {".npz"}


def test_read_only_folder_is_refused_first(places):
    """An output folder on a file system that is mounted read-only is refused before any training."""
    ended, folder = places["read-only"]
    skip_without_mounts(ended)
    assert ended.status == 2
    assert re.fullmatch(r"stage2_bench\.py: error: argument --out-dir: [^\n]*[Rr]ead-only[^\n]*\n", ended.err)
    assert [path.name for path in folder.iterdir()] == [bench.REPORT]


def test_read_only_store_is_one_line(places):
    """A store that can't be written, in a folder that can: one line, the old report as it was."""
    ended, folder = places["read-only store"]
    skip_without_mounts(ended)
    assert ended.status in (1, 2)
    assert re.fullmatch(rf"stage2_bench\.py: error: [^\n]*{re.escape(bench.STORE)}[^\n]*\n", ended.err)
    assert (folder / bench.REPORT).read_text() == "earlier"


def test_read_only_checkout(places):
    """The script's own folder is mounted read-only: with --out-dir elsewhere all works, and nothing is put there."""
    ended, folder = places["read-only checkout"]
    skip_without_mounts(ended)
    assert (ended.status, ended.err) == (0, "")
    assert_complete(folder)


@pytest.mark.parametrize("name", ["zip", "stdin"])
def test_script_from_a_zip_or_standard_input_works_or_is_one_line(places, name):
    """`python script.zip` and `python - <script`, with workers asked for: the result, or one line and nothing else."""
    ended, folder = places[name]
    assert ended.survivors == []
    if ended.status == 0:
        assert ended.err == ""
        assert_complete(folder)
    else:
        assert ended.status in (1, 2)
        assert re.fullmatch(r"stage2_bench\.py: error: [^\n]+\n", ended.err)
        assert not (folder / bench.REPORT).exists()


def test_enormous_finite_scores_warn_of_nothing_and_win_nothing(places):
    """`python -W error ... --lrs 1e20 1e25`: scores beyond 1e40 are finite; no warning, and no verdict from scores that
    are worse than predicting the mean."""
    ended, folder = places["enormous"]
    assert (ended.status, ended.err) == (0, "")
    report = json.loads(report_of(folder), parse_constant=pytest.fail)
    assert min(report["baseline"]["full"]["per_seed"] + report["idea"]["per_seed"]) > 1e30
    assert report["comparison"]["verdict"].startswith("not judged")
    assert len(report["extensions"]["flagged"]) == 6
    first = ended.out.splitlines()[0]
    assert "not judged" in first
    assert not re.search(r"(better|worse) \(significant\)|no significant difference", first)


@pytest.mark.parametrize(("name", "said"), [("backend", "nonsense"), ("no matplotlib", "pip install matplotlib")])
def test_a_figure_that_can_t_be_drawn_is_refused_first(places, name, said):
    """MPLBACKEND=nonsense, or no matplotlib: one line before any training."""
    ended, folder = places[name]
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(r"stage2_bench\.py: error: argument --plot: [^\n]+\n", ended.err)
    assert said in ended.err
    assert [path.name for path in folder.iterdir()] == [bench.REPORT]


def test_a_backend_that_is_not_there_does_no_harm(places):
    """A figure needs no window: where MPLBACKEND names what can't be loaded, it is drawn, or refused first."""
    ended, folder = places["odd backend"]
    drawn = (folder / "figure.png").exists()
    assert (ended.status, len(ended.err.splitlines()), drawn) in ((0, 0, True), (2, 1, False))
    assert drawn or [path.name for path in folder.iterdir()] == [bench.REPORT]


def test_failure_while_drawing_leaves_the_files_whole(main, tmp_path, monkeypatch):
    """A figure that fails at the end: one line, exit status 1, but report, log and runs are there."""
    figure = pytest.importorskip("matplotlib.figure")

    def fail(*_, **__):
        raise RuntimeError("planted\nfailure")

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    status, out, err = main(*quick(), "--quiet", "--plot", "figure.png")
    assert status == 1
    assert ONE_LINE.fullmatch(err)
    assert "planted failure" in err
    assert out.startswith("Verdict: ")
    assert_complete(tmp_path / "out")


def test_figure_s_name_with_a_folder_stays_there(main, tmp_path, monkeypatch):
    """--plot ./figure.svg is in the working folder, whatever --out-dir says."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(*quick(), "--quiet", "--plot", "./figure.svg", folder=tmp_path / "out")[0] == 0
    assert (tmp_path / "figure.svg").exists() and not (tmp_path / "out" / "figure.svg").exists()


def test_figure_s_name_alone_goes_into_the_output_folder(main, tmp_path, monkeypatch):
    """--plot NAME stands beside the report."""
    monkeypatch.chdir(tmp_path)
    assert main(*quick(), "--plot", "figure.svg")[0] == 0
    assert (tmp_path / "out" / "figure.svg").read_text().rstrip().endswith("</svg>")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_importing_does_nothing(places):
    """As a module the script starts no work: no output, file, process or thread, and no global state is changed."""
    ended, _ = places["importing"]
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.out.split()) == 1  # the count of threads, no child


@pytest.fixture
def renamed(monkeypatch):
    """Note all (from, to) of renames."""
    seen = []
    for name in ("replace", "rename"):
        real = getattr(os, name)

        def note(source, target, *more, real=real, **named):
            seen.append((Path(source), Path(target)))
            return real(source, target, *more, **named)

        monkeypatch.setattr(os, name, note)
    return seen


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_taken_temporary_names_are_left_alone(main, tmp_path, renamed, kind):
    """Where the temporary names of an earlier run are folders, files or links to a file elsewhere, all works as ever,
    and nothing but the results is touched."""
    assert main(*quick(), "--quiet")[0] == 0
    assert len(renamed) >= 5
    first, folder, precious = tmp_path / "out", tmp_path / "taken", tmp_path / "precious"
    precious.write_text("precious")
    names = {
        path.relative_to(first) for pair in renamed for path in pair if path.name not in FILES and path.suffix != ".npz"
    }
    names |= {Path(f"{dot}{name}{end}") for name in FILES[1:] for dot in (".", "") for end in (".part", ".tmp", "~")}
    names |= {Path("trial"), Path("tmp"), Path("part"), Path(".trial"), Path(f"{bench.STORE}/tmp")}
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        {"folder": path.mkdir, "file": lambda path=path: path.write_text("kept"),
         "link": lambda path=path: path.symlink_to(precious)}[kind]()  # fmt: skip
    before = {name: (folder / name).lstat() for name in names}
    status, _, err = main(*quick(), "--quiet", folder=folder)
    assert (status, err) == (0, "")
    assert report_of(folder) == report_of(first)
    assert {name: (folder / name).lstat().st_ino for name in names} == {
        name: each.st_ino for name, each in before.items()
    }
    assert precious.read_text() == "precious"
    assert kind != "file" or all((folder / name).read_text() == "kept" for name in names)
    assert {path.name for path in folder.iterdir()} == set(FILES) | {name.parts[0] for name in names}


@pytest.mark.parametrize("target", ["precious", "nowhere", "hard link"])
def test_results_take_the_place_of_links(main, tmp_path, target):
    """Where a result's name is a link, to a file elsewhere or to nothing, what it points to is not touched."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    for name in (bench.REPORT, bench.OUTPUT):
        if target == "hard link":
            (tmp_path / "out" / name).hardlink_to(tmp_path / "precious")
        else:
            (tmp_path / "out" / name).symlink_to(tmp_path / target)
    status, _, err = main(*quick(), "--quiet")
    assert (status, err) == (0, "")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    assert_complete(tmp_path / "out")


def test_track_file_name_that_is_no_unicode(main, tmp_path):
    """A file name of bytes that are no UTF-8 must not break the log after the training."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/tr\xff.py")
    Path(path).write_text(TINY)
    status, _, err = main(*quick(), "--track", path, "--quiet")
    assert (status, err) == (0, "")
    assert_complete(tmp_path / "out")


# Help, version and parser ---------------------------------------------------------------------------------------------


def test_version_names_script_and_libraries(main, tmp_path):
    """--version prints the script's version and those of Python and its libraries, and makes nothing."""
    status, out, err = main("--version")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert re.match(r"stage2_bench \d+\.\d+", out)
    for version in (platform.python_version(), torch.__version__, np.__version__, scipy.__version__):
        assert version in out
    assert not (tmp_path / "out").exists()


def test_help_survives_head(places):
    """`--help | head -1`: its line, exit status 0, no complaint of a broken pipe."""
    ended, folder = places["help"]
    assert (ended.status, ended.err) == (0, "")
    assert re.fullmatch(r"usage: stage2_bench\.py [^\n]*\n", ended.out)
    assert [path.name for path in folder.iterdir()] == [bench.REPORT]


def help_text(capfd):
    """Return what --help prints; it leaves with 0."""
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    assert not stop.value.code
    return capfd.readouterr().out


def test_help_shows_every_default(capfd):
    """--help prints each option once, with the default that the experiment has."""
    text = help_text(capfd)
    config = bench.Config()
    defaults = {
        "--seeds": len(config.seeds),
        "--sweep-seeds": config.sweep_seeds,
        "--lrs": " ".join(map(str, config.lrs)),
        "--h": config.hs[0][0],
        "--epochs": config.epochs,
        "--hidden": config.hidden,
        "--batch": config.batch,
        "--track": config.track,
        "--idea": config.idea,
        "--dtype": config.dtype,
        "--jobs": "the CPUs",
        "--resume": "",
        "--out-dir": ". or stage2_smoke",
        "--plot": "no",
        "--quiet": "",
        "--rtol": 0,
    }
    for option, default in defaults.items():
        (described,) = re.findall(rf"(?ms)^  {option} (.*?)(?=^  -|^\S|\Z)", text)
        assert f"(default: {default}" in " ".join(described.split()), option


@pytest.fixture
def configured(tmp_path, monkeypatch, capfd):
    """Return a function: the configuration that words give, from where the experiment would begin; None, status and
    stderr where it does not get there."""
    found = []

    def stop(config, *_, **__):
        found.append(config)
        raise bench.RunError("planted")

    data = bench.build_dataset(bench.Config(sizes=(8, 8, 8)), 0)
    monkeypatch.setattr(bench, "benchmark", stop)
    monkeypatch.setattr(bench, "build_dataset", lambda *_: data)
    monkeypatch.chdir(tmp_path)

    def go(*words):
        found.clear()
        capfd.readouterr()
        try:
            status = bench.main(["--out-dir", str(tmp_path / "out"), *words])
        except SystemExit as stopped:
            status = stopped.code or 0
        return (found or [None])[0], status, capfd.readouterr().err

    return go


def test_no_option_gives_the_specified_experiment(configured):
    """The command without options is Config's own: 8 seeds, 4 of them in the sweep, 16 epochs, the reference's grid."""
    config, _, _ = configured()
    assert config == bench.Config()
    assert (config.seeds, config.sweep_seeds, config.epochs) == (tuple(range(8)), 4, 16)
    assert config.lrs == tuple(json.loads(REFERENCE.read_text())["baseline"]["union_lr_grid"])
    assert (config.hidden, config.batch, config.hs, config.dtype) == (32, 64, ((0.08,),), "float64")
    assert bench.option_words(config) == ""


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--seeds 3", {"seeds": (0, 1, 2), "sweep_seeds": 3}),
        ("--seeds 8:11", {"seeds": (8, 9, 10), "sweep_seeds": 3}),
        ("--seeds 8:18", {"seeds": tuple(range(8, 18))}),
        ("--sweep-seeds 8", {"sweep_seeds": 8}),
        ("--lrs 1e-3 .5", {"lrs": (0.001, 0.5)}),
        ("--lrs auto", {"lr_search": "auto"}),
        ("--h 0.02+0.08 0 1e+0+1E-2", {"hs": ((0.02, 0.08), (0.0,), (1.0, 0.01))}),
        ("--hidden 7 --batch 9", {"hidden": 7, "batch": 9}),
        ("--smoke", {"seeds": (0, 1), "sweep_seeds": 2, "epochs": 2}),
        ("--smoke --epochs 5 --seeds 4 --sweep-seeds 1", {"seeds": (0, 1, 2, 3), "sweep_seeds": 1, "epochs": 5}),
        ("--track irregular --dtype float32", {"track": "irregular", "dtype": "float32"}),
        ("--track lorenz --jobs 3 --resume --quiet --plot x.png", {"track": "lorenz"}),
    ],
)
def test_options_become_configuration(configured, words, changes):
    """Each option changes its own field and no other."""
    assert configured(*words.split())[0] == bench.Config(**changes)


@pytest.mark.parametrize("words", ["--seeds 3", "--seeds 8:11", "--seeds 3 --sweep-seeds 2", "--sweep-seeds 3"])
def test_option_words_say_no_more_than_was_typed(configured, words):
    """What follows from few seeds, a sweep over all of them, is no option of its own."""
    assert bench.option_words(configured(*words.split())[0]) == words


RATES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=3, unique=True).map(tuple)
STEPS = st.lists(st.floats(0, 1e3), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    first=st.integers(0, 100),
    count=st.integers(1, 12),
    share=st.floats(0, 1),
    lrs=st.none() | RATES,
    hs=st.lists(STEPS, min_size=1, max_size=3, unique=True).map(tuple),
    numbers=st.fixed_dictionaries(
        {name: st.sampled_from([1, 16, 32, 64, 999]) for name in ("epochs", "hidden", "batch")}
    ),
    words=st.fixed_dictionaries(
        {"track": st.sampled_from(["dynamics", "lorenz"]), "dtype": st.sampled_from(["float32"])}
    ),
)
def test_option_words_give_the_configuration_back(configured, first, count, share, lrs, hs, numbers, words):
    """What a report says of how to run it again is the way to run it again."""
    rates = {"lr_search": "auto"} if lrs is None else {"lrs": lrs}
    seeds = {"seeds": tuple(range(first, first + count)), "sweep_seeds": 1 + int(share * (count - 1))}
    config = bench.Config(**seeds, **rates, hs=hs, **numbers, **words)
    assert configured(*bench.option_words(config).split())[0] == config


def test_smoke_has_its_own_folder(monkeypatch, tmp_path):
    """The smoke never overwrites the full report, unless --out-dir says so; the default is the working folder."""

    def stop(*_, **__):
        raise bench.RunError("planted")

    monkeypatch.setattr(bench, "benchmark", stop)
    monkeypatch.chdir(tmp_path)
    for name in (".", "stage2_smoke", "own"):
        (tmp_path / name / bench.REPORT).mkdir(parents=True)  # in the way, and named when it is
    for words, named in (((), bench.REPORT), (("--smoke",), "stage2_smoke"), (("--smoke", "--out-dir", "own"), "own")):
        with contextlib.redirect_stderr(sys.stdout) as err, monkeypatch.context() as patch:
            lines = []
            patch.setattr(err, "write", lines.append)
            assert bench.main(["--jobs", "1", "--track", tiny(), *words]) == 2
        assert named in "".join(lines)
        assert ("stage2_smoke" in "".join(lines)) == (words == ("--smoke",))


OPTIONS = [
    *(
        "--seeds",
        "--sweep-seeds",
        "--lrs",
        "--h",
        "--epochs",
        "--hidden",
        "--batch",
        "--track",
        "--idea",
        "--dtype",
        "--smoke",
    ),
    *("--jobs", "--resume", "--plot", "--quiet", "--version", "--diff", "--rtol", "--all", "--conclusions", "--help"),
]
VALUES = st.one_of(
    st.sampled_from(
        [
            "0",
            "1",
            "2",
            "-1",
            "1.5",
            "3:5",
            "1e-3",
            "0.02+0.08",
            "nan",
            "lorenz",
            "float32",
            "",
            "x.py:L",
            "auto",
            "x.png",
        ]
    ),
    st.text(alphabet=string.printable + "é٣\udcff", max_size=6),
    st.integers().map(str),
    st.floats().map(str),
)


def test_every_option_is_tried(capfd):
    """The list above is --help's."""
    assert set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", help_text(capfd), re.MULTILINE)) == {*OPTIONS, "--out-dir"}


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(st.one_of(st.sampled_from(OPTIONS), VALUES), max_size=8))
def test_parser_never_fails_otherwise_than_in_one_line(words, configured):
    """Any words give a sound configuration, the help, the version, or an error of one line."""
    config, status, err = configured(*words)
    if config is None:
        assert (status, len(err.splitlines())) in ((0, 0), (2, 1))
        assert status == 2 or {"--help", "--version"} & set(words) or "-h" in " ".join(words)
    else:
        assert (status, err) == (1, "stage2_bench.py: error: planted\n")
        assert 0 < config.sweep_seeds <= len(config.seeds)
        assert all(0 < lr < math.inf for lr in config.lrs)
        assert all(0 <= h < math.inf for stack in config.hs for h in stack)
        assert len(set(config.lrs)) == len(config.lrs)
        assert min(config.epochs, config.hidden, config.batch) > 0


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([0, 1, 1e308, -1e-308])
)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(sorted(COMMITTED)), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=8,
)


def places_in(value, path=()):
    """Return the paths of everything within a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [p for key in keys for p in ((*path, key), *places_in(value[key], (*path, key)))]


@functools.cache
def report_places():
    """Return the paths of everything in the committed report."""
    return places_in(COMMITTED)


@st.composite
def mutated_reports(draw):
    """Return the committed report with one to three places replaced or removed."""
    report = copy.deepcopy(COMMITTED)
    for path in draw(st.lists(st.sampled_from(report_places()), min_size=1, max_size=3)):
        place = report
        try:
            for key in path[:-1]:
                place = place[key]
            if draw(st.booleans()):
                place[path[-1]] = draw(DOCUMENTS)
            else:
                del place[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took that place away
    return report


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    document=st.one_of(DOCUMENTS, mutated_reports()), words=st.sampled_from([(), ("--rtol", "0.1"), ("--conclusions",)])
)
def test_diff_survives_any_document(document, words, tmp_path_factory, capfd):
    """Any JSON as a report: same, differs or trouble, on either side alike, and never a traceback or a warning."""
    folder = tmp_path_factory.getbasetemp() / "any_document"
    folder.mkdir(exist_ok=True)
    path = folder / bench.REPORT
    path.write_text(json.dumps(document))
    first = bench.main(["--diff", str(path), "--out-dir", str(folder), *words])
    second = bench.main(["--diff", str(SMOKE), "--out-dir", str(folder), *words])
    _, err = capfd.readouterr()
    assert first in (0, 1, 2)
    assert second in (0, 1, 2)
    assert (first == 2) == (second == 2)
    assert len(err.splitlines()) == 2 * (first == 2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.binary(max_size=40))
def test_diff_survives_any_bytes(data, tmp_path_factory, capfd):
    """Bytes that are no report are trouble, in one line."""
    path = tmp_path_factory.getbasetemp() / "any_bytes.json"
    path.write_bytes(data)
    assert bench.main(["--diff", str(path)]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
