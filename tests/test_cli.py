"""The command line: what is wrong is said in one line before anything is touched, and every terminal will do.

Bad input goes through `main` in this process, which is what the script calls; what depends on a terminal, a limit or
a place is a real process.  `start`, `finish` and the tiny track are those of test_runs.py.
"""

import copy
import dataclasses
import functools
import json
import os
import pty
import re
import resource
import select
import shutil
import string
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_runs import (
    CLEAN,
    PYTHON,
    SCRIPT,
    SMOKE,
    TINY,
    Later,
    finish,
    one_thread,
    report_of,
    script,
    start,
    start_early,
)

import stage2_bench as bench

COMMITTED = json.loads(SMOKE.read_text())
REFERENCE = SMOKE.with_name("reference_report.json")
QUICK = ("--epochs", "1", "--seeds", "1", "--lrs", "0.003", "--jobs", "1")
FILES = [bench.JOURNAL, bench.REPORT, bench.OUTPUT]


@pytest.fixture(scope="module", autouse=True)
def background(request):
    """Begin with all processes that the selected tests look at."""
    start_early(request, "places")
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def forget_user_files():
    """Let every test load its files anew, as a process would."""
    bench.load_file.cache_clear()
    bench.build_dataset.cache_clear()
    bench.idea_class.cache_clear()


@pytest.fixture
def refused(tmp_path, capfd):
    """Return a function: run with options; they must be refused in one line, which it returns, with nothing touched."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / bench.REPORT).write_text("earlier")

    def run(*options):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        status = bench.main(["--out-dir", str(folder), *map(str, options)])
        out, err = capfd.readouterr()
        assert status == 2
        assert out == ""
        assert re.fullmatch(r"stage2_bench\.py: error: [^\n]+\n", err)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        return err

    return run


# Bad input ------------------------------------------------------------------------------------------------------------

COUNTS = ["0", "-1", "1.5", "1e3", "three", "", "nan", "999999999999999999999"]
BAD_OPTIONS = [
    *[(option, value) for option in ("--seeds", "--sweep-seeds", "--epochs", "--jobs") for value in COUNTS],
    *[("--seeds", value) for value in ("3:3", "5:2", ":", "1:2:3", "-1:2", "0:2000000", "1:x")],
    *[(option, value) for option in ("--lrs", "--h") for value in ("nan", "inf", "-0.1", "x", "1e999", "0.1.2", "")],
    *[("--h", value) for value in ("0.1+", "+0.1", "0.1+nan", "0.1+-2", "1e-2+inf")],
    *[("--rtol", value) for value in ("nan", "-1", "inf")],
    ("--jobs", "100000"),
    ("--lrs", "0"),
    ("--lrs", "0.0"),
    ("--lrs", "1e-999"),
    ("--track", "pendulum"),
    ("--track", "none.py"),
    ("--idea", "Layer"),
    ("--idea", "none.py:"),
    ("--idea", "none.py"),
    ("--dtype", "float16"),
    ("--plot", "figure.gif"),
    ("--plot", "/nowhere/at/all/figure.png"),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS)
def test_bad_value_is_refused_by_name(refused, option, value):
    """One line that names the option and the value, exit status 2, before any file is touched."""
    line = refused(f"{option}={value}")
    assert f"{option}: " in line
    assert value in line


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
        (("--h", "0.02+0.08", "0.08", "0.02+8e-2"), ("--h", "0.02+0.08")),
        (("--seeds", "2", "--sweep-seeds", "3"), ("--sweep-seeds", "3", "2 seeds")),
        (("--sweep-seeds", "9"), ("--sweep-seeds", "9", "8 seeds")),
        (("--smoke", "--sweep-seeds", "3"), ("--sweep-seeds", "3", "2 seeds")),
        (("--rtol", "0.1"), ("--rtol", "--diff")),
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


@pytest.mark.parametrize("place", ["a_file", "a_file/below", "x" * 300, "/proc/nothing"])
def test_out_dir_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch, capfd, place):
    """A file, a place below a file, a name too long, a file system that takes no files: said before any training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "train", None)  # would be a TypeError, were it reached
    Path("a_file").write_text("precious")
    assert bench.main(["--jobs", "1", "--out-dir", place]) == 2
    line = capfd.readouterr().err
    assert line.startswith("stage2_bench.py: error: argument --out-dir: ")
    assert place in line
    assert len(line.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
    assert Path("a_file").read_text() == "precious"


def test_out_dir_with_folders_in_place_of_files_is_refused(tmp_path, capfd):
    """A folder named like a result could not be replaced at the end."""
    (tmp_path / bench.REPORT).mkdir()
    assert bench.main(["--jobs", "1", "--out-dir", str(tmp_path)]) == 2
    assert bench.REPORT in capfd.readouterr().err


def test_plot_name_too_long_is_refused(refused):
    """A name that no file can have is a bad value."""
    assert "--plot" in refused("--plot", "a" * 300 + ".png")


BAD_TRACKS = {
    "no make": ("x = 1", "make"),
    "make is no function": ("make = 3", "make"),
    "does not compile": ("def make(:", "SyntaxError"),
    "fails on import": ("import no_such_module_x", "no_such_module_x"),
    "leaves on import": ("raise SystemExit(0)", "SystemExit"),
    "make fails": ("def make(seed, split):\n    raise KeyError('planted')", "planted"),
    "make gives one thing": ("def make(seed, split):\n    return 1", "targets"),
    "make gives text": ("def make(seed, split):\n    return 'ab', 'cd'", "targets"),
    "tokens are flat": (TINY.replace("return tokens", "return tokens[0]"), "(8, 2)"),
    "one token": (TINY.replace("(24, 8, 2)", "(24, 1, 2)"), "(24, 1, 2)"),
    "no channel": (TINY.replace("(24, 8, 2)", "(24, 8, 0)").replace("[:, -1, 0]", "[:, 0].sum(1)"), "(24, 8, 0)"),
    "too few targets": (TINY.replace("tokens[:, -1, 0]", "tokens[1:, -1, 0]"), "(23,)"),
    "NaN in tokens": (TINY.replace("return", "tokens[3, 2, 1] = np.nan; return"), "tokens"),
    "infinity in targets": (TINY.replace("tokens[:, -1, 0]", "tokens[:, -1, 0] / 0"), "targets"),
    "constant targets": (TINY.replace("tokens[:, -1, 0]", "0 * tokens[:, -1, 0]"), "targets"),
    "seeds differ in shape": (TINY.replace("(24, 8, 2)", "(24 + seed, 8, 2)"), "(25, 8, 2)"),
    "splits differ in T": (TINY.replace("(24, 8, 2)", "(24, 4 + len(split), 2)"), "(24, 8, 2)"),
    "NaN at the last seed": (TINY.replace("return", "tokens[0] /= seed < 7; return"), "make(7, "),
}


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("fault", BAD_TRACKS)
def test_bad_track_file_is_refused(refused, tmp_path, fault):
    """A custom track that cannot be trained on: one line that names the file and the fault."""
    text, named = BAD_TRACKS[fault]
    path = tmp_path / "own.py"
    path.write_text(text)
    line = refused("--track", path, "--jobs", "1")
    assert "own.py: " in line
    assert named in line


LAYER = """
import torch

class Layer(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(channels))

    def forward(self, tokens):
        return tokens * self.scale

NotALayer = 3
"""
BAD_IDEAS = {
    "unknown class": (LAYER, "Nothing", "Nothing"),
    "no module": (LAYER, "NotALayer", "NotALayer"),
    "changes the length": (LAYER.replace("tokens * self.scale", "(tokens * self.scale)[:, 1:]"), "Layer", "31"),
    "changes the channels": (LAYER.replace("tokens * self.scale", "(tokens * self.scale)[..., :1]"), "Layer", "1)"),
    "gives no tensor": (LAYER.replace("tokens * self.scale", "None"), "Layer", "NoneType"),
    "changes the dtype": (LAYER.replace("* self.scale", "* self.scale.half()").replace("return ", "return (")
                          .replace("half()", "half()).half()"), "Layer", "float16"),
    "no parameters": (LAYER.replace("torch.nn.Parameter(torch.ones(channels))", "1.0"), "Layer", "parameters"),
    "unused parameter": (LAYER.replace("super().__init__()", "super().__init__(); self.extra = torch.nn.Parameter("
                                       "torch.ones(1))"), "Layer", "extra"),
    "output apart from its parameters": (LAYER.replace("* self.scale", "* 1.0"), "Layer", "depend"),
    "gives NaN": (LAYER.replace("* self.scale", "* self.scale * float('nan')"), "Layer", "NaN"),
    "fails": (LAYER.replace("return tokens", "raise KeyError('planted'); return tokens"), "Layer", "planted"),
    "cannot be built": (LAYER.replace("channels, length, h", "channels"), "Layer", "__init__"),
    "fails at the placebo's h": (LAYER.replace("super()", "1 / h; super()"), "Layer", "h=0.0"),
    "random": (LAYER.replace("tokens *", "torch.nn.functional.dropout(tokens) *"), "Layer", "dropout"),
    "mixes the batch": (LAYER.replace("tokens *", "(tokens - tokens.mean(0)) *"), "Layer", "batch"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_IDEAS)
def test_bad_idea_file_is_refused(refused, tmp_path, fault):
    """A layer that could not be compared fairly: one line that names the file and the fault, before training."""
    text, name, named = BAD_IDEAS[fault]
    path = tmp_path / "own.py"
    path.write_text(text)
    line = refused("--idea", f"{path}:{name}", "--jobs", "1")
    assert "own.py" in line
    assert named in line


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
    "NaN": (changed("comparison", "p_value", to=float("nan")), "NaN"),
    "infinity": (changed("comparison", "p_value", to=float("inf")), "Infinity"),
    "too large a number": (SMOKE.read_text().replace('"n_seeds": 2', '"n_seeds": 1e999'), "1e999"),
    "deeply nested": ("[" * 100_000, "nested"),
    "a list": ("[1, 2]", "bench_version"),
    "another version": (changed("bench_version", to=2), "bench_version is 2"),
    "version true": (changed("bench_version", to=True), "bench_version is true"),
    "no version": (changed("bench_version"), "bench_version"),
    "lacks a key": (changed("comparison", "verdict"), "comparison.verdict"),
    "lacks a block": (changed("idea"), "idea"),
    "a block is a number": (changed("baseline", to=3), "baseline."),
    "scores are text": (changed("idea", "per_seed", to=["a", "b"]), "malformed"),
    "no scores": (changed("idea", "per_seed", to=[]), "malformed"),
}


@pytest.mark.parametrize("fault", BAD_REPORTS)
def test_bad_report_is_refused_by_diff(refused, tmp_path, fault):
    """What is no report is trouble (2), on either side, in one line that names the file and the fault."""
    text, named = BAD_REPORTS[fault]
    path = tmp_path / bench.REPORT
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert named in refused("--diff", path)
    line = refused("--diff", SMOKE, "--out-dir", tmp_path)
    assert named in line
    assert str(path) in line


# Diverged -------------------------------------------------------------------------------------------------------------


def test_diverged_rate_is_flagged_and_loses(tmp_path, capfd):
    """`--lrs 0.003 1e6` finishes, says in log and extensions that 1e6 is no good, and picks 0.003."""
    assert bench.main(["--smoke", "--lrs", "0.003", "1e6", "--jobs", "1", "--out-dir", str(tmp_path), "--quiet"]) == 0
    report = bench.strict_json(report_of(tmp_path).decode())
    assert report["baseline"]["best_cfg"]["lr"] == report["best_idea_cfg"]["lr"] == 0.003
    flagged = {(row["model"], row["cfg"]["lr"]) for row in report["extensions"]["flagged"]}
    assert flagged == {("baseline", 1e6), ("idea", 1e6), ("placebo", 1e6)}
    rows = [line for line in capfd.readouterr().out.splitlines() if line.split()[1:2] == ["1000000.0"]]
    assert len(rows) == 3
    assert all("worse than" in row or "diverged" in row for row in rows)


@pytest.mark.parametrize("options", [("--lrs", "1e200"), ("--lrs", "1e20", "--dtype", "float32")])
def test_everything_diverged_is_null_and_status_1(tmp_path, capfd, tiny_file, options):
    """All runs beyond the number range: strict JSON with nulls, a verdict that says so, exit status 1."""
    words = ["--track", tiny_file, "--seeds", "2", "--epochs", "2", "--jobs", "1", "--quiet"]
    assert bench.main([*words, *options, "--out-dir", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert "diverged" in out
    report = bench.strict_json(report_of(tmp_path).decode())
    assert report["baseline"]["full"] == {"mean": None, "std": None, "per_seed": [None, None], "n": 2}
    assert report["comparison"]["p_value"] is None
    assert report["comparison"]["verdict"].startswith("not judged")
    assert "seed 0, 1" in report["comparison"]["verdict"]
    assert {row["mean"] for row in report["idea_sweep"]} == {None}
    assert len(report["extensions"]["flagged"]) == 3


# Terminals, places, full disks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    """The tiny track in a folder of its own."""
    path = tmp_path_factory.mktemp("track") / "tiny.py"
    path.write_text(TINY)
    return str(path)


def on_terminal(base, tiny_file):
    """Run with stderr on a pseudo-terminal and stdout in a pipe; returns (status, stdout, terminal's text)."""
    ours, theirs = pty.openpty()
    command = script("--track", tiny_file, "--seeds", "2", "--epochs", "1", "--jobs", "1", "--out-dir", base / "pty")
    process = subprocess.Popen(
        list(map(str, command)), env=CLEAN | {"TERM": "xterm-256color"}, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown, limit = b"", time.monotonic() + 60
    while time.monotonic() < limit and select.select([ours], [], [], 60)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # Linux: the other side is closed
            break
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, out.decode(), shown.decode()


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_file):
    """Runs in odd places: {name: what the test of that name looks at}."""
    base = tmp_path_factory.mktemp("places")
    quick = [*QUICK, "--track", tiny_file]
    strange = base / "a path with späces"
    strange.mkdir()
    shutil.copy(tiny_file, strange / "träck one.py")

    def shell(text, *words, **environment):
        return finish(start(["sh", "-c", text, "sh", *words], base, **environment))

    def c_locale():
        words = script(*QUICK, "--track", strange / "träck one.py", "--out-dir", strange / "ré sults")
        environment = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "NO_COLOR": "1"}
        return shell('exec "$@" <&-', *words, **environment)

    def head():
        words = script(*quick, "--quiet", "--out-dir", "head")
        return shell('("$@"; echo $? >status) | head -1', *words)

    def gone_reader():
        process = start(script(*quick, "--quiet", "--out-dir", base / "gone"), base)
        process.stdout.close()
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    def closed():
        words = script(*quick, "--jobs", "2", "--out-dir", base / "closed")  # the last --jobs counts
        return shell('exec "$@" <&- >&- 2>&-', *words)

    def full_output():
        return shell('exec "$@" >/dev/full', *script(*quick, "--quiet", "--out-dir", base / "full"))

    def file_limit():
        (base / "limit").mkdir()
        (base / "limit" / bench.REPORT).write_text("earlier")
        return shell('ulimit -f 8; exec "$@"', *script(*quick, "--quiet", "--out-dir", base / "limit"))

    def full_disk():
        disk = base / "disk"
        disk.mkdir()
        text = (
            'mount -t tmpfs -o size=64k tmpfs "$0" && echo earlier >"$0/bench_report.json" || exit 77\n'
            '"$@"; status=$?; cat "$0/bench_report.json"; ls -A "$0"; exit $status'
        )
        command = ["unshare", "-m", "sh", "-c", text, disk, *script(*quick, "--quiet", "--out-dir", disk)]
        return finish(start(command, base))

    def read_only():
        checkout = base / "checkout"
        checkout.mkdir()
        shutil.copy(SCRIPT, checkout)
        before = sorted(checkout.rglob("*"))
        text = (
            'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" || exit 77\n'
            'cd "$0" && ! touch x 2>/dev/null && exec "$@"'
        )
        words = [PYTHON, "stage2_bench.py", *quick, "--quiet", "--out-dir", base / "elsewhere"]
        ended = finish(start(["unshare", "-m", "sh", "-c", text, checkout, *words], base))
        return ended, before == sorted(checkout.rglob("*"))

    scenarios = {
        "terminal": lambda: on_terminal(base, tiny_file),
        "C locale": c_locale,
        "head": head,
        "gone reader": gone_reader,
        "closed": closed,
        "full output": full_output,
        "file limit": file_limit,
        "full disk": full_disk,
        "read only": read_only,
    }
    return Later(scenarios | {"base": lambda: base, "strange": lambda: strange})


def assert_complete(folder):
    """Check that all three files are there, and nothing else; the report is strict JSON, the log ends with one."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    report = bench.strict_json(report_of(folder).decode())
    log = (folder / bench.OUTPUT).read_text(encoding="ascii")
    assert json.loads(log[log.index("\n{") :])["bench_report"] == report


def test_terminal_gets_a_live_line_and_stdout_the_log_alone(places):
    """On a terminal progress is one line rewritten by \\r; stdout has what the log file has; no escape codes."""
    status, out, shown = places["terminal"]
    assert status == 0
    assert shown.count("\r") >= 3
    assert "\n" not in shown
    assert re.search(r"\r0 of 18 runs, 0 s", shown)
    assert re.search(r"\r\d+ of 18 runs, \d+ s, \d+ s left", shown)
    assert shown.endswith("\r")
    assert "\x1b" not in shown + out
    assert out == (places["base"] / "pty" / bench.OUTPUT).read_text()


def test_ascii_console_odd_path_and_closed_stdin(places):
    """LANG=C, an ASCII console, spaces and umlauts in paths, no stdin, another working directory: all complete."""
    ended = places["C locale"]
    assert ended.status == 0, ended.err
    assert ended.out.isascii()
    assert not set("\r\x1b") & set(ended.out + ended.err)
    assert_complete(places["strange"] / "ré sults")
    assert json.loads(report_of(places["strange"] / "ré sults"))["custom_track"]["file"] == "träck one.py"


def test_head_gets_its_line_and_the_files_are_complete(places):
    """`... | head -1` in another working directory, by a relative --out-dir."""
    ended = places["head"]
    assert ended.out.startswith("stage2_bench: ")
    assert len(ended.out.splitlines()) == 1
    assert ended.err == ""
    assert (places["base"] / "status").read_text() == "0\n"
    assert_complete(places["base"] / "head")


def test_gone_reader_is_no_error(places):
    """Nobody reads stdout at all: the files are complete, status 0, nothing on stderr (--quiet)."""
    assert places["gone reader"] == (0, "")
    assert_complete(places["base"] / "gone")


def test_closed_streams(places):
    """stdin, stdout and stderr closed, with spawned workers: the files are complete, and nothing leaks into them."""
    assert places["closed"].status == 0
    assert_complete(places["base"] / "closed")


def test_full_output_is_said_and_the_files_are_complete(places):
    """stdout on a full device: one line, exit status 1, but the files are whole."""
    ended = places["full output"]
    assert ended.status == 1
    assert ended.err == "stage2_bench.py: stdout: No space left on device\n"
    assert_complete(places["base"] / "full")


@pytest.mark.parametrize("name", ["file limit", "full disk"])
def test_full_disk_leaves_the_old_report_whole(places, name):
    """A file-size limit, or a file system of 64 KiB: one line, exit status 1, the old report as it was."""
    ended = places[name]
    if ended.status in (77, 127) or "unshare" in ended.err:
        pytest.skip("this machine allows no private mounts")
    assert ended.status == 1
    assert re.fullmatch(r"stage2_bench\.py: error: cannot write [^\n]+\n", ended.err)
    if name == "file limit":
        folder = places["base"] / "limit"
        assert (folder / bench.REPORT).read_text() == "earlier"
        assert {path.name for path in folder.iterdir()} <= {bench.REPORT, bench.JOURNAL}
    else:
        assert ended.out.startswith("earlier\n")
        assert ".part" not in ended.out


def test_files_are_all_written_or_none(tmp_path):
    """Where the second file does not fit, the first is not replaced either, and no part is left."""
    (tmp_path / "a").write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, hard))
    try:
        with pytest.raises(bench.RunError, match="cannot write a, b in"):
            bench.write_files(tmp_path, {"a": "new", "b": "x" * (9 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "earlier")]


def test_read_only_checkout(places):
    """The script's own folder is mounted read-only: with --out-dir elsewhere all works, and nothing is put there."""
    ended, untouched = places["read only"]
    if ended.status in (77, 127) or "unshare" in ended.err:
        pytest.skip("this machine allows no private mounts")
    assert ended.status == 0, ended.err
    assert untouched
    assert_complete(places["base"] / "elsewhere")


def test_track_file_name_that_is_no_unicode(tmp_path, capfd):
    """A file name of bytes that are no UTF-8 must not break the log after the training."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/tr\xff.py")
    Path(path).write_text(TINY)
    assert bench.main(["--track", path, *QUICK, "--quiet", "--out-dir", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().err == ""
    assert_complete(tmp_path / "out")


def test_closed_stderr_sends_no_complaint_to_stdout(tmp_path):
    """stdout carries the log only, even where stderr is closed."""
    ended = finish(start(["sh", "-c", 'exec "$@" 2>&-', "sh", *script("--seeds", "0")], tmp_path))
    assert (ended.status, ended.out) == (2, "")


def test_progress_without_a_terminal_is_plain_lines_now_and_then(capfd, monkeypatch):
    """Off a terminal: whole lines, with an estimate, no more often than the interval, nothing where quiet."""
    clock = [100.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: clock[0])
    for quiet in (False, True):
        progress = bench.Progress(40, quiet)
        for _ in range(40):
            clock[0] += 1.0
            progress.advance(1)
        progress.close()
        out, err = capfd.readouterr()
        assert out == ""
        assert err == "" if quiet else err.splitlines() == [
            f"stage2_bench: {n} of 40 runs, {n} s" + (f", {40 - n} s left" if n < 40 else "") for n in (10, 20, 30, 40)
        ]  # fmt: skip


IMPORT = """
import os, signal, sys, threading
signals = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
import numpy, scipy, torch
from scipy import integrate, optimize, stats
state = torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), threading.active_count()
import stage2_bench
assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == signals
assert state == (torch.get_num_threads(), torch.initial_seed(), torch.get_default_dtype(), threading.active_count())
assert not os.listdir()
print(len(os.listdir("/proc/self/task")), open(f"/proc/self/task/{os.getpid()}/children").read())
"""


def test_importing_does_nothing(tmp_path):
    """As a module the script starts no work: no output, file, process or thread, and no global state is changed."""
    ended = finish(start([PYTHON, "-B", "-c", IMPORT], tmp_path, PYTHONPATH=str(SCRIPT.parent)))
    assert (ended.status, ended.err) == (0, "")
    assert len(ended.out.split()) == 1  # the count of threads, no child


# Help and parser ------------------------------------------------------------------------------------------------------


def test_help_shows_every_default(capfd):
    """--help leaves with 0 and prints each option, once, with the default that Config has."""
    with pytest.raises(SystemExit) as stop:
        bench.main(["--help"])
    assert not stop.value.code
    text = " ".join(capfd.readouterr().out.split())
    config = bench.Config()
    for option, default in {
        "--seeds N|A:B": len(config.seeds),
        "--sweep-seeds N": config.sweep_seeds,
        "--lrs LR": " ".join(map(str, config.lrs)),
        "--h H": config.hs[0][0],
        "--epochs N": config.epochs,
        "--track NAME": config.track,
        "--idea FILE.py:Class": config.idea,
        "--dtype {float64,float32}": config.dtype,
        "--jobs N": "the CPUs",
        "--resume": "start afresh",
        "--out-dir DIR": ". or stage2_smoke",
        "--quiet": "show it",
        "--plot FILE": "no",
        "--rtol X": 0,
    }.items():
        described = text[text.rindex(f" {option}") :]
        assert f"(default: {default}" in described[: described.index("(default: ") + 60]


def test_no_option_gives_the_specified_experiment():
    """The command without options is Config's own: 8 seeds, 4 of them in the sweep, the reference's grid."""
    config = bench.config_from(bench.build_parser().parse_args([]))
    assert config == bench.Config()
    assert (config.seeds, config.sweep_seeds, config.epochs) == (tuple(range(8)), 4, 16)
    assert config.lrs == tuple(json.loads(REFERENCE.read_text())["baseline"]["union_lr_grid"])


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--seeds 3", {"seeds": (0, 1, 2), "sweep_seeds": 3}),
        ("--seeds 8:11", {"seeds": (8, 9, 10), "sweep_seeds": 3}),
        ("--lrs 1e-3 .5", {"lrs": (0.001, 0.5)}),
        ("--h 0.02+0.08 0 1e+0+1E-2", {"hs": ((0.02, 0.08), (0.0,), (1.0, 0.01))}),
        ("--smoke", {"seeds": (0, 1), "sweep_seeds": 2, "epochs": 2}),
        ("--smoke --epochs 5 --seeds 4 --sweep-seeds 1", {"seeds": (0, 1, 2, 3), "sweep_seeds": 1, "epochs": 5}),
        ("--track irregular --dtype float32", {"track": "irregular", "dtype": "float32"}),
    ],
)
def test_options_become_configuration(words, changes):
    """Each option changes its own field and no other."""
    config = bench.config_from(bench.build_parser().parse_args(words.split()))
    assert config == dataclasses.replace(bench.Config(), **changes)


def test_smoke_has_its_own_folder():
    """The smoke never overwrites the full report, unless --out-dir says so."""
    parse = bench.build_parser().parse_args
    folders = [bench.output_folder(parse(words.split())) for words in ("", "--smoke", "--smoke --out-dir x")]
    assert folders == [Path("."), Path("stage2_smoke"), Path("x")]


OPTIONS = re.findall(r"^  (--[a-z-]+)", bench.build_parser().format_help(), re.MULTILINE)
VALUES = st.one_of(
    st.sampled_from(["0", "1", "2", "-1", "1.5", "3:5", "1e-3", "0.02+0.08", "nan", "lorenz", "float32", "", "x.py:L"]),
    st.text(alphabet=string.printable + "é٣\udcff", max_size=6),
    st.integers().map(str),
    st.floats().map(str),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(st.one_of(st.sampled_from(OPTIONS), VALUES), max_size=8))
def test_parser_never_fails_otherwise_than_in_one_line(words, capfd):
    """Any words give a sound configuration, the help, or a UsageError of one line."""
    try:
        config = bench.config_from(bench.build_parser().parse_args(words))
    except SystemExit as stop:
        assert not stop.code
        assert "--help" in words or "-h" in " ".join(words)
    except bench.UsageError as error:
        bench.complain(f"error: {error}")
        assert len(capfd.readouterr().err.splitlines()) == 1
    else:
        assert 0 < config.sweep_seeds <= len(config.seeds)
        assert all(0 < lr < float("inf") for lr in config.lrs)
        assert all(0 <= h < float("inf") for stack in config.hs for h in stack)
        assert len(set(config.lrs)) == len(config.lrs)
        assert config.epochs > 0


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


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(document=st.one_of(DOCUMENTS, mutated_reports()), rtol=st.sampled_from(["0", "0.1"]))
def test_diff_survives_any_document(document, rtol, tmp_path_factory, capfd):
    """Any JSON as a report: same, differs or trouble, on either side, and never a traceback or a warning."""
    folder = tmp_path_factory.getbasetemp() / "any_document"
    folder.mkdir(exist_ok=True)
    path = folder / bench.REPORT
    path.write_text(json.dumps(document))
    first = bench.main(["--diff", str(path), "--out-dir", str(folder), "--rtol", rtol])
    second = bench.main(["--diff", str(SMOKE), "--out-dir", str(folder), "--rtol", rtol])
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


def test_idea_that_fails_only_while_training_is_one_line(tmp_path, capfd):
    """A layer that passes the check on four sequences and fails on a whole batch ends the run in one line."""
    path = tmp_path / "late.py"
    path.write_text(
        "import torch\nclass Late(torch.nn.Linear):\n"
        "    def __init__(self, channels, length, h):\n        super().__init__(channels, channels)\n"
        "    def forward(self, tokens):\n        if len(tokens) > 4:\n            raise ValueError('too many')\n"
        "        return super().forward(tokens)\n"
    )
    words = ["--idea", f"{path}:Late", "--seeds", "1", "--epochs", "1", "--jobs", "1", "--quiet"]
    assert bench.main([*words, "--out-dir", str(tmp_path / "out")]) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1 and "too many" in err and "lost: " in err
