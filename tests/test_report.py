"""The report, its files and --diff: every number from its own scores, every change of one leaf found.

Four reports are committed: the default one, the smoke, and small ones of the tracks `lorenz` and `irregular`, which
`python stage2_bench.py OPTIONS --out-dir SOMEWHERE` makes with the OPTIONS that stand below.
"""

import contextlib
import copy
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import resource
import statistics
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import plain_loop
import pytest

import stage2_bench as bench

HERE, ROOT = Path(__file__).parent, Path(bench.__file__).parent
SMALL_OPTIONS = {
    "lorenz": "--track lorenz --seeds 2 --sweep-seeds 1 --epochs 2 --lrs 0.003 0.006 --hidden 16 --batch 128",
    "irregular": "--track irregular --seeds 3:5 --sweep-seeds 1 --epochs 1 --lrs 0.006 --h 0.02+0.08",
}
FILES = {"default": ROOT / bench.REPORT} | {name: HERE / f"{name}_report.json" for name in ("smoke", *SMALL_OPTIONS)}
REFERENCE_FILE = HERE / "reference_report.json"
REFERENCE = json.loads(REFERENCE_FILE.read_text())
REPORTS = {name: json.loads(path.read_text()) for name, path in FILES.items()}
DEFAULT, SMOKE = REPORTS["default"], REPORTS["smoke"]
ARMS = ("baseline", "idea", "placebo")


# Trees ----------------------------------------------------------------------------------------------------------------


def leaves(value, path=()):
    """Return {path: leaf} of a report; an empty list or object is a leaf."""
    if not isinstance(value, dict | list) or not value:
        return {path: value}
    keys = value if isinstance(value, dict) else range(len(value))
    return {inner: leaf for key in keys for inner, leaf in leaves(value[key], (*path, key)).items()}


def changed(report, *path, to=None, gone=False):
    """Return a report with one place changed or removed; `to` may be a function of the old value.  What does not lie on
    the way is shared with the old report."""
    first, *rest = path
    report = copy.copy(report)
    if rest:
        report[first] = changed(report[first], *rest, to=to, gone=gone)
    elif gone:
        del report[first]
    else:
        report[first] = to(report[first]) if callable(to) else to
    return report


def kind(path):
    """Return a path as text, every position in a list as #."""
    return ".".join("#" if isinstance(key, int) else key for key in path)


def slightly(leaf):
    """Return a leaf changed as little as its kind allows: by one in its last printed digit."""
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return leaf + 1
    if isinstance(leaf, float):
        return round(leaf + 1e-10, 10) if abs(leaf) < 1e5 else leaf * 1.1
    if isinstance(leaf, str):
        return f"{leaf}."
    return 0.5 if leaf is None else ["kinetic"] if isinstance(leaf, list) else {"x": 1}


def samples(report):
    """Return the paths of a report's leaves, of long lists the first place only, but of every row of a sweep."""
    return [path for path in leaves(report) if all(key == 0 for key in path if isinstance(key, int)) or "cfg" in path
            or (path[-1] == "mean" and len(path) > 2)]  # fmt: skip


MORE = [path for path in samples(DEFAULT) if leaves(SMOKE).get(path) is None]  # the interval, for one
MORE += [(*path, "per_seed", 7) for path in (("baseline", "full"), ("idea",), ("extensions", "floors", "linear"))]


# The form of the file -------------------------------------------------------------------------------------------------

ARM = ["mean", "std", "per_seed", "n"]
VERSUS = ["delta_mean", "placebo_wins", "p_exact", "p_value"]
EXTENSIONS = {
    "options": ["seeds", "sweep_seeds", "epochs", "hidden", "batch", "dtype", "lr_search", "idea"],
    "data": ["train", "val", "test", "distinct_test_sets", "test_in_train"],
    "floors": {
        **dict.fromkeys(("predict_mean", "repeat_last", "linear"), ("mean", "per_seed")),
        "best": None,
        "beaten_by": None,
    },
    "statistics": [
        "p_exact", "p_floor", "interval_95", "interval_coverage", "effect_size_dz", "detectable_difference",
        "share_won", "reason_for_null",
    ],
    "selection": {
        "baseline": ["edge", "configurations", "validation_choice", "agrees"],
        "idea": ["edge", "h_edge", "configurations", "validation_choice", "agrees"],
        "placebo": ["edge", "configurations"],
    },
    "flagged": None,
    "learning_curve": [["epoch", *ARMS, "per_seed", "p_exact"]],
    "still_learning": ARMS,
    "placebo": {
        "best_cfg": ["lr", "h"],
        "sweep": [["cfg", "mean"]],
        "full": ARM,
        "versus_baseline": VERSUS,
        "versus_idea": VERSUS,
        "parameters": None,
    },
    "knockout": ["mean", "per_seed", "ratio"],
    "isolated_mechanism": [
        "h", "attenuation", "attenuation_max_relative_error", "attenuation_confirmed", "displacement",
        "displacement_slope", "displacement_max_error",
    ],
    "transport_confirmed": None,
    "mechanism_untrained": ["observed_fourier_attenuation", "observed_transport_displacement"],
    "rollout": [["horizon", "floor", "predict_mean", "baseline", "idea", "per_seed", "p_exact", "p_holm"]],
}  # fmt: skip


def assert_keys(block, keys):
    """Check keys and their order: a list or tuple has an object's names; [[...]] those of a list's every object."""
    if isinstance(keys, dict):
        assert list(block) == list(keys)
        for name, inner in keys.items():
            assert_keys(block[name], inner)
    elif keys is not None and isinstance(keys[0], list):
        assert block and all(list(row) == keys[0] for row in block)
    elif keys is not None:
        assert list(block) == list(keys)


def strict(text):
    """Parse JSON, without NaN and infinities."""
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))


@pytest.mark.parametrize("name", FILES)
def test_form_of_the_committed_reports(name):
    """Strict JSON, two spaces, a final newline; keys and their order are the reference's, then the extensions."""
    text = FILES[name].read_bytes().decode("utf-8")
    report = strict(text)
    assert text == json.dumps(report, indent=2) + "\n"
    assert list(report) == [*REFERENCE, "extensions"]
    for key, block in REFERENCE.items():
        if isinstance(block, dict):
            assert_keys(report[key], {inner: list(x) if isinstance(x, dict) else None for inner, x in block.items()})
    assert_keys(report["extensions"], EXTENSIONS)
    for path, leaf in leaves(report).items():
        digits = (
            7 if {"mechanism_signature", "mechanism_untrained", "isolated_mechanism", "rollout"} & set(path) else 10
        )
        if isinstance(leaf, float) and path[-1] not in ("p_exact", "p_floor", "p_holm"):
            assert leaf == round(leaf, digits), path


def test_a_plain_diff_with_the_reference_lines_up():
    """Line by line the same keys, up to the extensions; what has no reason to differ is the same."""
    ours, theirs = (path.read_text().splitlines() for path in (FILES["default"], REFERENCE_FILE))
    assert [line.split(":")[0] for line in theirs if '":' in line] == [
        line.split(":")[0] for line in ours[: len(theirs) - 1] if '":' in line
    ]
    assert ours[len(theirs) - 1] == '  "extensions": {'
    same = {key for key in REFERENCE if REFERENCE[key] == DEFAULT[key]}
    assert same >= {
        "bench_version",
        "track",
        "model",
        "metric_direction",
        "n_seeds",
        "parameter_parity",
        "custom_track",
    }
    assert DEFAULT["best_idea_cfg"] == REFERENCE["best_idea_cfg"]
    assert DEFAULT["comparison"]["verdict"] == REFERENCE["comparison"]["verdict"]


# Every number from its own scores, computed anew ----------------------------------------------------------------------


def units(scores, digits=10):
    """Return printed numbers as exact whole units of their last digit."""
    return [int(Decimal(repr(score)).scaleb(digits)) for score in scores]


def mean(scores, digits=10):
    """Return the exact mean, rounded to the nearest, halves to even."""
    return round(Fraction(sum(units(scores, digits)), len(scores))) / 10**digits


def exact_p(first, second, digits=10):
    """Return the share of all sign patterns whose sum is as far from 0, by enumeration."""
    d = [b - a for a, b in zip(units(first, digits), units(second, digits), strict=True)]
    sums = [sum(s * x for s, x in zip(signs, d, strict=True)) for signs in itertools.product((-1, 1), repeat=len(d))]
    return sum(abs(total) >= abs(sum(d)) for total in sums) / len(sums)


def sampled_p(first, second):
    """Return the share of 20,000 sampled sign flips whose sum is as far from 0."""
    d = np.array(units(second)) - np.array(units(first))
    flips = np.random.default_rng(0).choice([-1, 1], size=(20_000, len(d)))
    return float(np.mean(np.abs(flips @ d) >= abs(d.sum())))


def assert_arm(sweep, full, best_cfg, sweep_seeds):
    """Check an arm's summary, its winner, and the winner's row, which the first seeds give."""
    scores = full["per_seed"]
    assert full["mean"] == mean(scores) and full["n"] == len(scores)
    assert full["std"] == pytest.approx(statistics.pstdev(scores), abs=6e-11)
    winner = min(sweep, key=lambda row: (row["mean"], row["cfg"]["lr"]))
    assert winner["cfg"] == best_cfg
    assert winner["mean"] == mean(scores[:sweep_seeds])


@pytest.mark.parametrize("name", ["reference", *FILES])
def test_contract_numbers_follow_from_the_scores(name):
    """Means, deviations, winners, differences, wins and the sampled p (the reference's is 993 / 20,000)."""
    report = REPORTS.get(name, REFERENCE)
    first, second, block = report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"], report["comparison"]
    seeds = report.get("extensions", {"options": {"sweep_seeds": 4}})["options"]["sweep_seeds"]
    assert_arm(report["baseline"]["sweep"], report["baseline"]["full"], report["baseline"]["best_cfg"], seeds)
    assert_arm(report["idea_sweep"], report["idea"], report["best_idea_cfg"], seeds)
    assert report["baseline"]["union_lr_grid"] == [row["cfg"]["lr"] for row in report["baseline"]["sweep"]]
    assert block["delta_mean"] == round(Fraction(sum(units(second)) - sum(units(first)), len(first))) / 1e10
    assert block["idea_wins"] == sum(b < a for a, b in zip(first, second, strict=True))
    assert block["n_pairs"] == report["n_seeds"] == len(first) == len(second)
    assert block["p_value"] == sampled_p(first, second)
    significant = block["p_value"] < 0.05
    word = "worse" if sum(second) > sum(first) else "better"
    assert block["verdict"] == (f"idea {word} (significant)" if significant else "no significant difference")
    assert block["system_worked"] is (significant and word == "better")


@pytest.mark.parametrize("name", FILES)
def test_extensions_follow_from_the_scores(name):
    """Floors, statistics, learning curve, placebo, knockout and closed loop, each by its formula."""
    report = REPORTS[name]
    extra = report["extensions"]
    arms = {
        "baseline": report["baseline"]["full"]["per_seed"],
        "idea": report["idea"]["per_seed"],
        "placebo": extra["placebo"]["full"]["per_seed"],
    }
    n, sweep_seeds = len(arms["idea"]), extra["options"]["sweep_seeds"]
    assert extra["options"]["seeds"][1] - extra["options"]["seeds"][0] == n
    floors = {key: block for key, block in extra["floors"].items() if isinstance(block, dict)}
    assert {key: block["mean"] for key, block in floors.items()} == {
        key: mean(block["per_seed"]) for key, block in floors.items()
    }
    lowest = min(block["mean"] for block in floors.values())
    assert extra["floors"][extra["floors"]["best"]]["mean"] == lowest
    assert extra["floors"]["beaten_by"] == [arm for arm, scores in arms.items() if mean(scores) < lowest]
    found = extra["statistics"]
    d = np.array(units(arms["idea"])) - np.array(units(arms["baseline"]))
    assert found["p_exact"] == exact_p(arms["baseline"], arms["idea"]) and found["p_floor"] == 2.0 ** (1 - n)
    assert found["effect_size_dz"] == pytest.approx(d.mean() / d.std(ddof=1), abs=1e-9)
    assert found["share_won"] == report["comparison"]["idea_wins"] / n
    assert_arm(extra["placebo"]["sweep"], extra["placebo"]["full"], extra["placebo"]["best_cfg"], sweep_seeds)
    for other in ("baseline", "idea"):
        versus = extra["placebo"][f"versus_{other}"]
        pair = arms[other], arms["placebo"]
        assert versus["p_exact"] == exact_p(*pair) and versus["p_value"] == sampled_p(*pair)
        assert versus["placebo_wins"] == sum(b < a for a, b in zip(*pair, strict=True))
        assert versus["delta_mean"] == pytest.approx(mean(pair[1]) - mean(pair[0]), abs=2e-10)
    assert extra["knockout"]["mean"] == mean(extra["knockout"]["per_seed"])
    assert extra["knockout"]["ratio"] == round(extra["knockout"]["mean"] / report["idea"]["mean"], 10)
    epochs = extra["options"]["epochs"]
    assert [row["epoch"] for row in extra["learning_curve"]] == [e for e in (1, 2, 4, 8, 16) if e <= epochs]
    for row in extra["learning_curve"]:
        assert {arm: row[arm] for arm in ARMS} == {arm: mean(row["per_seed"][arm]) for arm in ARMS}
        assert row["p_exact"] == exact_p(row["per_seed"]["baseline"], row["per_seed"]["idea"])
    half = {row["epoch"]: row for row in extra["learning_curve"]}.get(epochs // 2)
    last = extra["learning_curve"][-1]
    assert extra["still_learning"] == {arm: half and last[arm] < 0.9 * half[arm] for arm in ARMS}
    ps = []
    for row in extra["rollout"]:
        pair = row["per_seed"]["baseline"], row["per_seed"]["idea"]
        assert [row["baseline"], row["idea"]] == [mean(scores, 7) for scores in pair]
        assert row["p_exact"] == exact_p(*pair, 7)
        ps.append(row["p_exact"])
    assert [row["p_holm"] for row in extra["rollout"]] == holm(ps)
    assert [row["horizon"] for row in extra["rollout"]] == [1, 4, 16, 64]


@pytest.mark.parametrize("name", FILES)
def test_the_script_says_so_too(tmp_path, name):
    """--diff rebuilds every derived field of a committed report to the digit."""
    assert diff(tmp_path, REPORTS[name], REPORTS[name]) == 0


def holm(ps):
    """Return Holm's adjusted p: the largest of (how many ps are as large) * p over all that are as small."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    steps = {index: min(1.0, (len(ps) - rank) * ps[index]) for rank, index in enumerate(order)}
    return [max(steps[other] for other in order[: order.index(index) + 1]) for index in range(len(ps))]


def test_interval_and_power_of_the_default_report():
    """At eight pairs: from the 6th smallest to the 6th largest of the means of all 255 subsets (Hartigan 1969), which
    covers 1 - 12 / 256; the detectable difference is known from an independent computation."""
    found = DEFAULT["extensions"]["statistics"]
    first, second = DEFAULT["baseline"]["full"]["per_seed"], DEFAULT["idea"]["per_seed"]
    d = [b - a for a, b in zip(units(first), units(second), strict=True)]
    means = sorted(Fraction(sum(s), len(s)) for k in range(1, 9) for s in itertools.combinations(d, k))
    assert found["interval_95"] == [round(means[5]) / 1e10, round(means[-6]) / 1e10] == [0.0001161098, 0.000474359]
    assert found["interval_coverage"] == 1 - 12 / 256
    assert found["detectable_difference"] == 0.0002490816
    assert found["reason_for_null"] is None
    for name in ("smoke", *SMALL_OPTIONS):
        few = REPORTS[name]["extensions"]["statistics"]
        assert few["interval_95"] is few["interval_coverage"] is few["detectable_difference"] is None
        assert few["reason_for_null"] == "five pairs or fewer"


def test_the_published_calibration_holds():
    """What is known of the default run: the baseline's sweep, the floors, how far the knockout falls behind."""
    sweep = [row["mean"] for row in DEFAULT["baseline"]["sweep"]]
    assert sweep == pytest.approx([0.00352, 0.00190, 0.00107], abs=5e-6)
    assert [row["mean"] for row in DEFAULT["idea_sweep"]] == pytest.approx([0.0052, 0.0025, 0.0012], abs=5e-5)
    floors = DEFAULT["extensions"]["floors"]
    assert floors["linear"]["mean"] == 0.0001697728 and floors["best"] == "linear" and floors["beaten_by"] == []
    assert [floors["predict_mean"]["mean"], floors["repeat_last"]["mean"]] == pytest.approx([0.97, 0.0069], rel=0.01)
    assert DEFAULT["comparison"]["delta_mean"] == pytest.approx(0.000293, abs=5e-7)
    assert DEFAULT["extensions"]["knockout"]["ratio"] == pytest.approx(2.7, abs=0.05)


# Every measured number, from the plain loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_small_reports_are_those_of_a_fresh_run(name, tmp_path):
    """To the byte; and the folder has the two files and the store, nothing else."""
    words = [*SMALL_OPTIONS[name].split(), "--jobs", "1", "--quiet", "--out-dir", str(tmp_path)]
    assert bench.main(words) == 0
    assert (tmp_path / bench.REPORT).read_bytes() == FILES[name].read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {bench.REPORT, bench.OUTPUT, bench.STORE}


@functools.cache
def plain_data(seed, track):
    """Return the plain loop's data of a seed."""
    return plain_loop.make_data(seed, track=track)


@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_small_reports_are_those_of_the_plain_loop(name):
    """Scores, learning curve, floors, knockout, and mechanism before and after training of all seeds, and the closed
    loop of the baseline on one and of the idea on the other, agree with one run at a time on torch.nn.GRU."""
    report = REPORTS[name]
    extra, options = report["extensions"], report["extensions"]["options"]
    h = report["best_idea_cfg"]["h"]
    steps = {"baseline": None, "idea": tuple(h) if isinstance(h, list) else (h,)}
    steps["placebo"] = (0.0,) * len(steps["idea"])
    lr, shape = report["best_idea_cfg"]["lr"], {"batch": options["batch"], "hidden": options["hidden"]}
    signatures, untrained, rollouts = [], [], {"floor": [], "predict_mean": []}
    curves = {row["epoch"]: row["per_seed"] for row in extra["learning_curve"]}
    scores = {"baseline": report["baseline"]["full"], "idea": report["idea"], "placebo": extra["placebo"]["full"]}
    columns = np.array([1, 4, 16, 64]) - 1
    for i, seed in enumerate(range(*options["seeds"])):
        ready, raw, scales = plain_data(seed, report["track"])
        seen, clock = ready["test"][0][:256], ready["angles"]
        for arm, h in steps.items():
            model, score = plain_loop.train(seed, lr, h, options["epochs"], ready, **shape)
            assert scores[arm]["per_seed"][i] == pytest.approx(score, abs=1e-10)
            for epoch, value in model.curve.items():
                assert curves[epoch][arm][i] == pytest.approx(value, abs=1e-10)
            if arm == ARMS[i]:
                found = [row["per_seed"][arm][i] for row in extra["rollout"]]
                assert found == pytest.approx(plain_loop.closed_loop(model, ready, raw, scales)[columns], abs=1e-7)
            if arm == "idea":
                assert extra["knockout"]["per_seed"][i] == pytest.approx(plain_loop.knockout(model, ready), abs=1e-10)
                signatures.append(plain_loop.signature(model, seen, clock))
                untrained.append(plain_loop.signature(plain_loop.Model(seed, h, hidden=shape["hidden"]), seen, clock))
        for key, value in plain_loop.floors(ready, raw, scales).items():
            assert extra["floors"][key]["per_seed"][i] == pytest.approx(value, abs=1e-10)
        for key, values in zip(rollouts, plain_loop.closed_loop_floors(raw, scales), strict=True):
            rollouts[key].append(values[columns])
    for key, values in rollouts.items():
        assert [row[key] for row in extra["rollout"]] == pytest.approx(np.mean(values, 0), abs=1.5e-7)
    names = ("observed_fourier_attenuation", "observed_transport_displacement")
    for block, values in ((report["mechanism_signature"], signatures), (extra["mechanism_untrained"], untrained)):
        assert [block[key] for key in names] == pytest.approx(np.mean(values, 0), abs=1e-7)


def test_the_other_rows_of_a_sweep_are_those_of_the_plain_loop():
    """The rate that lost, of all arms, on the sweep's one seed; and what validation would have chosen."""
    report = REPORTS["lorenz"]
    extra = report["extensions"]
    ready = plain_data(0, "lorenz")[0]
    sweeps = {None: report["baseline"]["sweep"], 0.08: report["idea_sweep"], 0.0: extra["placebo"]["sweep"]}
    choices = {None: extra["selection"]["baseline"], 0.08: extra["selection"]["idea"]}
    for h, sweep in sweeps.items():
        validation = {}
        for row in sweep:
            model, score = plain_loop.train(0, row["cfg"]["lr"], h, 2, ready, batch=128, hidden=16)
            assert row["mean"] == pytest.approx(score, abs=1e-10)
            validation[row["cfg"]["lr"]] = plain_loop.mse(model, ready, "val")
        if h in choices:
            best = min(validation, key=validation.get)
            assert choices[h]["validation_choice"] == {"lr": best, "h": h}
            assert choices[h]["agrees"] is (best == 0.006)


# What a run's options change ------------------------------------------------------------------------------------------

TRACK = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.standard_normal((24, 8, 3))
    return tokens, tokens[:, -1, 0]
"""
OVERLAP = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed if split != "test" else min(seed, 1), len(split)])
    tokens = rng.standard_normal((24, 8, 3))
    if split == "test" and seed == 0:
        tokens[3:9] = make(0, "train")[0][10:16]
    return tokens, tokens[:, -1, :2]
"""
# One test target of seed 1 is so large that its squared error is beyond float64.
HUGE = TRACK.replace("tokens[:, -1, 0]", "tokens[:, -1, 0] * (1e99 if split == 'test' and seed == 1 else 1e-99)")
IDEAS = """
import torch

class Indifferent(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.mix = torch.nn.Linear(channels, channels)
    def forward(self, tokens):
        return self.mix(tokens)

class Own(Indifferent):
    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        self.h = h
    def forward(self, tokens):
        return self.mix(tokens) * (1 + self.h)
    def signature(self, tokens):
        return {"predicted_gain": 1 + self.h, "observed_gain": 1.0, "observed_size": 2.0, "note": 3.5}

class Fragile(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.gain = 1 + h + (float("nan") if torch.initial_seed() == 1 else 0)
    def forward(self, tokens):
        return tokens * self.gain
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the tracks and ideas of these tests."""
    folder = tmp_path_factory.mktemp("base")
    for name, text in (("track", TRACK), ("overlap", OVERLAP), ("huge", HUGE), ("ideas", IDEAS)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tiny(base):
    """Return a function: run the command in this process on 24 short sequences; returns the report.  Same options give
    the same run."""
    made = {}

    def run(*options, track="track", status=0):
        key = (track, *options)
        if key not in made:
            folder = base / f"out {len(made)}"
            words = ["--track", base / f"{track}.py", "--epochs", 2, "--hidden", 4, "--seeds", 2, "--sweep-seeds", 1]
            words += ["--lrs", 0.003, 0.006, "--jobs", 1, "--quiet", "--out-dir", folder, *options]
            with contextlib.redirect_stdout(io.StringIO()):
                assert bench.main([str(word) for word in words]) == status
            made[key] = strict((folder / bench.REPORT).read_text())
        return copy.deepcopy(made[key])

    return run


def diff(folder, theirs, ours, *options):
    """Write both reports (dicts, or text) and return the exit status of --diff in this process."""
    for name, report in (("theirs.json", theirs), (bench.REPORT, ours)):
        (folder / name).write_text(report if isinstance(report, str) else json.dumps(report))
    return bench.main(["--diff", str(folder / "theirs.json"), "--out-dir", str(folder), *options])


RUNS = {
    "usual": (),
    "one seed": ("--seeds", "1"),
    "fresh seeds": ("--seeds", "5:8"),
    "one rate": ("--lrs", "0.01"),
    "a grown grid": ("--lrs", "auto"),
    "several h": ("--h", "0.3", "0.08", "0.02+0.08"),
    "float32": ("--dtype", "float32"),
    "one epoch": ("--epochs", "1"),
    "seven epochs": ("--epochs", "7"),
    "seven pairs": ("--seeds", "7"),
    "h of 0": ("--h", "0"),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_report_follows_from_its_own_scores(tiny, tmp_path, capsys, name):
    """Whatever the options, --diff of a report with itself finds nothing, and all fields the same."""
    report = tiny(*RUNS[name])
    assert diff(tmp_path, report, report) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"(\d+) fields: \1 same, 0 within rtol, 0 derived, 0 differing, 0 not compared", last)


def test_options_are_those_of_the_run(tiny):
    """Each option in its place."""
    words = "--seeds 5:8 --sweep-seeds 2 --epochs 3 --hidden 5 --batch 7 --dtype float32"
    report = tiny(*words.split())
    assert report["extensions"]["options"] == {
        "seeds": [5, 8],
        "sweep_seeds": 2,
        "epochs": 3,
        "hidden": 5,
        "batch": 7,
        "dtype": "float32",
        "lr_search": "grid",
        "idea": "kinetic",
    }
    assert report["n_seeds"] == 3
    assert [row["epoch"] for row in report["extensions"]["learning_curve"]] == [1, 2, 3]
    assert tiny()["extensions"]["options"]["seeds"] == [0, 2]


def test_files_are_named_without_folders_and_by_their_bytes(tiny, base):
    """Name, SHA-256 of the contents, and class; the model and the track are called after them."""
    report = tiny("--idea", f"{base / 'ideas.py'}:Indifferent")
    assert report["extensions"]["options"]["idea"] == {
        "file": "ideas.py",
        "sha256": hashlib.sha256(IDEAS.encode()).hexdigest(),
        "class": "Indifferent",
    }
    assert report["custom_track"] == {"file": "track.py", "sha256": hashlib.sha256(TRACK.encode()).hexdigest()}
    assert (report["track"], report["model"]) == ("track", "rnn_small_Indifferent_vs_raw")


def test_a_report_is_a_function_of_its_options(tiny, base, tmp_path):
    """From another folder, with a copy of the track, at another time: the same bytes."""
    (tmp_path / "track.py").write_text(TRACK)
    words = ["--track", tmp_path / "track.py", "--epochs", 2, "--hidden", 4, "--seeds", 2, "--sweep-seeds", 1]
    words += ["--lrs", 0.003, 0.006, "--jobs", 1, "--quiet", "--out-dir", tmp_path / "elsewhere"]
    assert bench.main([str(word) for word in words]) == 0
    text = (tmp_path / "elsewhere" / bench.REPORT).read_text()
    assert json.loads(text) == tiny()
    assert str(tmp_path) not in text and str(base) not in text


def test_data_are_counted_and_compared(tiny):
    """6 of 24 test sequences of seed 0 are trained on, none of the others': the largest share counts; seeds 1 and 2
    share their test set.  Two targets have no last value to repeat."""
    report = tiny("--seeds", "3", track="overlap")
    assert report["extensions"]["data"] == {
        "train": 24, "val": 24, "test": 24, "distinct_test_sets": 2, "test_in_train": 0.25,
    }  # fmt: skip
    assert report["extensions"]["floors"]["repeat_last"] is None
    data = tiny()["extensions"]["data"]
    assert (data["distinct_test_sets"], data["test_in_train"]) == (2, 0.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("--idea", "Indifferent"), "output does not depend on h"), (("--h", "0"), "only step is h = 0")],
)
def test_without_a_placebo_its_places_are_null(tiny, base, tmp_path, options, reason):
    """An idea without h in its output has the reason alone; no arm, no knockout; and the report follows from itself."""
    options = [f"{base / 'ideas.py'}:{word}" if word == "Indifferent" else word for word in options]
    report = tiny(*options)
    extra = report["extensions"]
    assert list(extra["placebo"]) == ["reason"] and reason in extra["placebo"]["reason"]
    assert extra["knockout"] is extra["selection"]["placebo"] is extra["still_learning"]["placebo"] is None
    for row in extra["learning_curve"]:
        assert row["placebo"] is row["per_seed"]["placebo"] is None
    assert "placebo" not in extra["floors"]["beaten_by"]
    assert list(extra) == list(EXTENSIONS)
    assert diff(tmp_path, report, report) == 0
    assert diff(tmp_path, changed(report, "extensions", "placebo", "reason", to="none"), report) == 1


def test_a_diverged_pair_is_null_and_not_judged(tiny, base, tmp_path):
    """Of three seeds the idea loses seed 1: no mean, std, delta or p where this run enters; the rest stands."""
    report = tiny("--idea", f"{base / 'ideas.py'}:Fragile", "--seeds", "3")
    assert [score is None for score in report["idea"]["per_seed"]] == [False, True, False]
    assert report["idea"]["mean"] is report["idea"]["std"] is None and report["idea"]["n"] == 3
    block, extra = report["comparison"], report["extensions"]
    assert block["delta_mean"] is block["p_value"] is None
    assert block["verdict"] == "not judged: idea diverged at seed 1" and block["system_worked"] is False
    found = extra["statistics"]
    assert found["reason_for_null"] == "a pair diverged"
    assert found["p_exact"] is found["interval_95"] is found["effect_size_dz"] is found["share_won"] is None
    assert extra["still_learning"]["idea"] is None and extra["learning_curve"][-1]["idea"] is None
    assert extra["knockout"]["mean"] is extra["knockout"]["ratio"] is None
    for name in ("versus_baseline", "versus_idea"):
        assert extra["placebo"][name] == dict.fromkeys(("delta_mean", "placebo_wins", "p_exact", "p_value"))
    assert report["baseline"]["full"]["mean"] == tiny("--seeds", "3")["baseline"]["full"]["mean"]
    assert diff(tmp_path, report, report) == 0


def with_curve(report, scores):
    """Return a report whose placebo has these scores at the checkpoints, the same for every seed, and those means."""
    for row, score in enumerate(scores):
        place = ("extensions", "learning_curve", row)
        n = report["n_seeds"]
        report = changed(changed(report, *place, "placebo", to=score), *place, "per_seed", "placebo", to=[score] * n)
    return report


@pytest.mark.parametrize(
    ("epochs", "scores", "still"),
    [
        (2, (0.4, 0.3599), True),
        (2, (0.4, 0.3601), False),
        (2, (1.0, 0.9), False),
        (16, (0.9, 0.8, 0.7, 0.2, 0.1999), False),
        (16, (0.2, 0.2, 0.2, 0.3, 0.2), True),
        (7, (0.2, 0.4, 0.2, 0.2), True),
        (7, (0.4, 0.2, 0.4, 0.2), False),
        (1, (0.4,), None),
    ],
)
def test_still_learning_compares_the_last_mean_with_that_at_half_the_epochs(tiny, tmp_path, epochs, scores, still):
    """Below 0.9 of it: true.  Half of 16 is checkpoint 8, half of 7 is 2, the largest up to 3.5; one epoch has
    none."""
    reports = {2: SMOKE, 16: DEFAULT}
    report = with_curve(reports.get(epochs) or tiny("--epochs", str(epochs)), scores)
    assert [row["epoch"] for row in report["extensions"]["learning_curve"]][-1] == epochs
    for said in (True, False, None):
        claim = changed(report, "extensions", "still_learning", "placebo", to=said)
        assert diff(tmp_path, claim, claim) == (said is not still)


def test_a_row_as_good_as_predicting_the_mean_is_not_flagged(tmp_path):
    """Only a larger mean is worse than predicting the training mean: a unit of the last digit decides."""
    floor = SMOKE["extensions"]["floors"]["predict_mean"]["mean"]
    row = next(i for i, row in enumerate(SMOKE["baseline"]["sweep"]) if row["cfg"] != SMOKE["baseline"]["best_cfg"])
    for mean, status in ((floor, 0), (floor + 1e-10, 1)):
        report = changed(SMOKE, "baseline", "sweep", row, "mean", to=mean)
        assert diff(tmp_path, report, report) == status


def test_a_floor_as_low_as_a_model_is_not_beaten_by_it(tmp_path):
    """The best floor has the idea's own scores: baseline and placebo, which are lower, beat it, the idea does not."""
    scores, placebo = SMOKE["idea"]["per_seed"], SMOKE["extensions"]["placebo"]
    assert max(SMOKE["baseline"]["full"]["mean"], placebo["full"]["mean"]) < SMOKE["idea"]["mean"]
    floors = {"repeat_last": None, "linear": {"mean": SMOKE["idea"]["mean"], "per_seed": scores}, "best": "linear"}
    for beaten_by, status in ((["baseline", "placebo"], 0), (["baseline", "idea", "placebo"], 1)):
        all_floors = SMOKE["extensions"]["floors"] | floors | {"beaten_by": beaten_by}
        report = changed(SMOKE, "extensions", "floors", to=all_floors)
        assert diff(tmp_path, report, report) == status


def test_a_lost_closed_loop_leaves_no_corrected_p(tmp_path):
    """A seed without a closed loop at one horizon: no mean and no p there, and no p by Holm anywhere, as it would need
    them all."""
    report = changed(SMOKE, "extensions", "rollout", 1, "per_seed", "idea", 0, to=None)
    assert diff(tmp_path, report, report) == 1
    for name in ("idea", "p_exact"):
        report = changed(report, "extensions", "rollout", 1, name, to=None)
    for row in range(4):
        assert diff(tmp_path, report, report) == 1
        report = changed(report, "extensions", "rollout", row, "p_holm", to=None)
    assert diff(tmp_path, report, report) == 0


def test_every_layer_counts_its_parameters():
    """A layer of three channels has 24: a stack of two 48, and so has its placebo, which is as deep."""
    report = REPORTS["irregular"]
    assert report["best_idea_cfg"] == {"lr": 0.006, "h": [0.02, 0.08]}
    assert report["parameter_parity"] == {"baseline": 3585, "idea": 3585 + 2 * 24}
    assert report["extensions"]["placebo"]["parameters"] == 3585 + 2 * 24
    assert report["extensions"]["placebo"]["best_cfg"]["h"] == [0.0, 0.0]
    assert SMOKE["extensions"]["placebo"]["parameters"] == SMOKE["parameter_parity"]["idea"] == 3609


@pytest.mark.parametrize("options", [("--lrs", "1e200"), ("--lrs", "1e20", "--dtype", "float32")])
def test_where_everything_diverged_all_is_null(tiny, tmp_path, options):
    """Strict JSON, a verdict that names the seeds, exit status 1."""
    report = tiny(*options, status=1)
    assert report["baseline"]["full"] == {"mean": None, "std": None, "per_seed": [None, None], "n": 2}
    assert report["comparison"]["verdict"] == "not judged: baseline diverged at seed 0, 1; idea diverged at seed 0, 1"
    assert {row["mean"] for row in report["idea_sweep"]} == {None}
    assert report["extensions"]["floors"]["beaten_by"] == []
    assert report["mechanism_signature"]["confirmed"] is False
    assert diff(tmp_path, report, report) == 0


def test_floors_beyond_the_number_range_are_null(tiny, tmp_path):
    """Finite test targets whose standardised squares overflow: no floor, no best one, no traceback; the seed's runs
    have no score either."""
    report = tiny(track="huge")
    floors = report["extensions"]["floors"]
    assert floors == {"predict_mean": None, "repeat_last": None, "linear": None, "best": None, "beaten_by": []}
    assert report["comparison"]["verdict"] == "not judged: baseline diverged at seed 1; idea diverged at seed 1"
    assert diff(tmp_path, report, report) == 0


# The files ------------------------------------------------------------------------------------------------------------


def test_all_files_are_written_or_none(tiny, base, tmp_path, capsys):
    """Where the output does not fit (a limit on the size of files), the report, which does, is not replaced either:
    both old files are whole, no part is left, one line, exit status 1."""
    for name in (bench.REPORT, bench.OUTPUT):
        (tmp_path / name).write_text(f"earlier {name}")
    words = ["--track", base / "track.py", "--epochs", 1, "--hidden", 2, "--seeds", 1, "--lrs", 0.003, "--jobs", 1]
    words = [str(word) for word in (*words, "--quiet", "--out-dir")]
    assert bench.main([*words, str(tmp_path / "fits")]) == 0
    report, output = ((tmp_path / "fits" / name).stat().st_size for name in (bench.REPORT, bench.OUTPUT))
    limit = (report + output) // 2
    assert max(path.stat().st_size for path in (tmp_path / "fits" / bench.STORE).iterdir()) < report < limit < output
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        assert bench.main([*words, str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "cannot write" in err
    assert {path.name for path in tmp_path.iterdir()} == {bench.REPORT, bench.OUTPUT, bench.STORE, "fits"}
    for name in (bench.REPORT, bench.OUTPUT):
        assert (tmp_path / name).read_text() == f"earlier {name}"


def test_both_files_are_on_disk_before_either_takes_its_place(base, tmp_path, monkeypatch):
    """Nothing of them may still be in a buffer, however large (it has the file system's block size), when the first is
    renamed: what cannot be written then would come too late."""
    folder, sizes, plain_open = tmp_path / "out", [], open

    def large_blocks(file, mode="r", buffering=-1, *rest, **named):
        return plain_open(file, mode, 1 << 20 if "b" in mode and buffering == -1 else buffering, *rest, **named)

    def watched(move):
        def look(old, new, *rest, **named):
            if Path(new).name in (bench.REPORT, bench.OUTPUT):
                sizes.append(sorted(path.stat().st_size for path in folder.iterdir() if path.is_file()))
            return move(old, new, *rest, **named)

        return look

    monkeypatch.setattr("builtins.open", large_blocks)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    words = ["--track", base / "track.py", "--epochs", 1, "--hidden", 2, "--seeds", 1, "--lrs", 0.003, "--jobs", 1]
    assert bench.main([str(word) for word in (*words, "--quiet", "--out-dir", folder)]) == 0
    final = sorted((folder / name).stat().st_size for name in (bench.REPORT, bench.OUTPUT))
    assert sizes == [final, final]


def test_taken_names_of_parts_are_no_hindrance(base, tmp_path):
    """A folder, and a link to a file elsewhere, where a part might be written: the run is well, and both stay."""
    (tmp_path / "precious").write_text("precious")
    for part in (f".{bench.REPORT}.part", f"{bench.REPORT}.part", f"{bench.REPORT}.tmp"):
        (tmp_path / part).mkdir()
    for part in (f".{bench.OUTPUT}.part", f"{bench.OUTPUT}.part", f"{bench.OUTPUT}.tmp"):
        (tmp_path / part).symlink_to(tmp_path / "precious")
    words = ["--track", base / "track.py", "--epochs", 1, "--hidden", 2, "--seeds", 1, "--lrs", 0.003, "--jobs", 1]
    before = {path.name for path in tmp_path.iterdir()}
    assert bench.main([str(word) for word in (*words, "--quiet", "--out-dir", tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == before | {bench.REPORT, bench.OUTPUT, bench.STORE}
    assert (tmp_path / "precious").read_text() == "precious"
    strict((tmp_path / bench.REPORT).read_text())


# --diff: nothing is trusted -------------------------------------------------------------------------------------------


@pytest.fixture
def remembered(monkeypatch):
    """Let equal pairs be tested once only: thousands of diffs ask for the same p-values."""
    plain, known = bench.Pairs, {}

    def pairs(first, second, config):
        key = tuple(first), tuple(second), config
        if key not in known:
            known[key] = plain(first, second, config)
        return known[key]

    monkeypatch.setattr(bench, "Pairs", pairs)


def unfound(folder, report, paths=None):
    """Return the leaves whose change by one in the last digit --diff does not find: exit status 1, or where a number
    stands in the place of an object or a list, or it is another version's, perhaps 2: no report."""
    wrong, known = [], leaves(report)
    for path in paths or known:
        status = diff(folder, changed(report, *path, to=slightly), report)
        unfit = known[path] in (None, []) or path == ("bench_version",)
        if status != 1 and not (status == 2 and unfit):
            wrong.append(path)
    return wrong


def test_changing_any_leaf_is_a_difference(tmp_path, capsys, remembered):
    """Of the smoke report all, of the default one those that the smoke with its two pairs has not, and some seeds."""
    assert unfound(tmp_path, SMOKE) == []
    assert "theirs not from own scores" in capsys.readouterr().out
    assert unfound(tmp_path, DEFAULT, MORE) == []


@pytest.mark.parametrize("idea", ["Indifferent", "Own"])
def test_changing_any_leaf_of_an_own_ideas_report_is_a_difference(tiny, base, tmp_path, remembered, idea):
    """Also of a report with a reason in the placebo's place, and of one with a signature of its own."""
    report = tiny("--idea", f"{base / 'ideas.py'}:{idea}")
    assert ("reason" in report["extensions"]["placebo"]) == (report["mechanism_signature"] is None) == (idea != "Own")
    assert unfound(tmp_path, report, samples(report)) == []


@pytest.mark.parametrize("gone", [False, True], ids=["null", "gone"])
def test_a_leaf_that_is_null_or_gone_is_a_difference(tmp_path, remembered, gone):
    """On our side: exit status 1, or 2 where what is left is no report; never 0."""
    known = leaves(SMOKE)
    for path in samples(SMOKE):
        ours = changed(SMOKE, *path, to=1 if known[path] is None else None, gone=gone)
        assert diff(tmp_path, SMOKE, ours) in (1, 2), path


# What must follow from a report's own scores; all else is what was run, or was measured.
DERIVED = re.compile(
    r"baseline\.(best_cfg\..*|full\.(mean|std|n)|union_lr_grid\.#)|idea\.(mean|std|n)|best_idea_cfg\..*|comparison\..*"
    r"|mechanism_signature\.(attenuation_relative_error|confirmed)"
    r"|extensions\.(floors\.(\w+\.mean|best|beaten_by)|statistics\..*|flagged"
    r"|selection\.\w+\.(edge|h_edge|configurations|agrees)|still_learning\.\w+"
    r"|learning_curve\.#\.(baseline|idea|placebo|p_exact)"
    r"|placebo\.(best_cfg\..*|full\.(mean|std|n)|versus_\w+\..*)|knockout\.(mean|ratio)"
    r"|rollout\.#\.(baseline|idea|p_exact|p_holm))"
)
MEASURED = re.compile(
    r"(baseline\.sweep|idea_sweep|extensions\.placebo\.sweep)\.#\.mean"
    r"|mechanism_signature\.observed_transport_displacement|extensions\.mechanism_untrained\..*"
    r"|extensions\.isolated_mechanism\.((attenuation|displacement)\.#|attenuation_max_relative_error"
    r"|displacement_slope|displacement_max_error)"
    r"|extensions\.rollout\.#\.(floor|predict_mean)"
)


def winning_rows(report):
    """Return the paths of the sweeps' means that follow from the pairs' scores."""
    arms = [
        (("baseline", "sweep"), report["baseline"]["best_cfg"], report["baseline"]["sweep"]),
        (("idea_sweep",), report["best_idea_cfg"], report["idea_sweep"]),
        (("extensions", "placebo", "sweep"), *(report["extensions"]["placebo"][key] for key in ("best_cfg", "sweep"))),
    ]
    return {
        (*path, i, "mean") for path, best, sweep in arms for i, row in enumerate(sweep) if row["cfg"] == best
    }  # fmt: skip


def test_derived_fields_must_follow_from_their_own_report(tmp_path, capsys, remembered):
    """Both sides alike hold a statistic that their scores contradict: that is no agreement."""
    row = {"model": "idea", "cfg": {"lr": 0.003, "h": 0.08}, "reason": "diverged", "diverged_seeds": [1]}
    count = 0
    for report, paths in ((SMOKE, leaves(SMOKE)), (DEFAULT, MORE)):
        for path in paths:
            if DERIVED.fullmatch(kind(path)) or path in winning_rows(report):
                false = changed(report, *path, to=[row] if path[-1] == "flagged" else slightly)
                assert diff(tmp_path, false, false) == 1, path
                count += 1
    assert count > 90
    assert "theirs and ours not from own scores" in capsys.readouterr().out


def test_rtol_forgives_measured_numbers_alone(tmp_path, remembered):
    """Not what was run, and not what follows from scores, the sweeps' winning rows included; --rtol 9 allows a measured
    number anything."""
    forgiven, known = set(), leaves(SMOKE)
    for path in samples(SMOKE):
        other = known[path] * 1.1 + 0.01 if isinstance(known[path], float) else slightly(known[path])
        if diff(tmp_path, changed(SMOKE, *path, to=other), SMOKE, "--rtol", "9") == 0:
            forgiven.add(path)
    measured = {path for path in samples(SMOKE) if MEASURED.fullmatch(kind(path))}
    assert forgiven == measured - winning_rows(SMOKE)


@pytest.mark.parametrize("factor", [1.01, 0.99])
@pytest.mark.parametrize(
    "path",
    [
        ("baseline", "sweep", 0, "mean"),
        ("extensions", "rollout", 2, "floor"),
        ("extensions", "mechanism_untrained", "observed_transport_displacement"),
    ],
)
def test_rtol_is_a_relative_difference(tmp_path, path, factor):
    """One per cent off: inside 1.05 %, outside 0.95 %, in either direction, and outside without --rtol."""
    theirs = changed(SMOKE, *path, to=lambda value: value * factor)
    for pair in ((theirs, SMOKE), (SMOKE, theirs)):
        assert diff(tmp_path, *pair) == 1
        assert diff(tmp_path, *pair, "--rtol", "0.0095") == 1
        assert diff(tmp_path, *pair, "--rtol", "0.0105") == 0


def test_what_follows_from_forgiven_scores_is_forgiven(tiny, tmp_path, capsys):
    """The same run in float32 has other last digits everywhere: with --rtol the one difference is the option itself, as
    statistics, curves and closed loops follow from scores that are near enough; without it there are many."""
    words = ["--seeds", "7", "--epochs", "3", "--lrs", "0.003", "0.006"]
    exact, rough = tiny(*words), tiny(*words, "--dtype", "float32")
    assert diff(tmp_path, exact, rough, "--rtol", "0.01") == 1
    _, fields, counts = shown(capsys.readouterr().out)
    assert [row[0] for row in fields[1:]] == ["extensions.options.dtype"]
    assert counts["derived"] > 15 and counts["within rtol"] > 30
    assert diff(tmp_path, exact, changed(rough, "extensions", "options", "dtype", to="float64"), "--rtol", "0.01") == 0
    assert diff(tmp_path, exact, rough, "--conclusions") == 0
    assert diff(tmp_path, exact, rough) == 1


TAMPERED = {
    "a placebo's mean": changed(DEFAULT, "extensions", "placebo", "full", "mean", to=99),
    "no closed loop": changed(DEFAULT, "extensions", "rollout", to=None),
    "no statistics": changed(DEFAULT, "extensions", "statistics", gone=True),
    "null statistics": changed(DEFAULT, "extensions", "statistics", to=None),
    "no knockout": changed(DEFAULT, "extensions", "knockout", to=None),
    "a flagged row": changed(
        DEFAULT, "extensions", "flagged",
        to=[{"model": "idea", "cfg": {"lr": 0.003, "h": 0.08}, "reason": "diverged", "diverged_seeds": [1]}],
    ),
    "better": changed(DEFAULT, "comparison", "verdict", to="idea better (significant)"),
    "one seed hidden": changed(DEFAULT, "idea", "per_seed", 3, to=None),
    "another floor": changed(DEFAULT, "extensions", "floors", "best", to="predict_mean"),
    "one more key": DEFAULT | {"more": 1},
    "one more key inside": changed(DEFAULT, "extensions", "data", to=lambda block: block | {"more": None}),
    "other order of keys": dict(reversed(DEFAULT.items())),
    "other order inside": changed(DEFAULT, "comparison", to=lambda block: dict(reversed(block.items()))),
    "true for one": changed(DEFAULT, "comparison", "idea_wins", to=True),
    "one for true": changed(DEFAULT, "mechanism_signature", "confirmed", to=1),
    "a key twice": json.dumps(DEFAULT).replace('"n_seeds": 8', '"n_seeds": 8, "n_seeds": 8', 1),
    "a key twice inside": json.dumps(DEFAULT).replace('"p_exact": ', '"p_exact": 0.5, "p_exact": ', 1),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_report_is_a_difference(tmp_path, capsys, case):
    """Whichever side it is on, and whatever --rtol; the differing field is shown."""
    assert DEFAULT["comparison"]["idea_wins"] == 1 and DEFAULT["extensions"]["flagged"] == []
    for pair in ((TAMPERED[case], DEFAULT), (DEFAULT, TAMPERED[case])):
        assert diff(tmp_path, *pair, "--rtol", "9") == 1
        assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", [("more",), ("extensions", "more"), ("extensions", "statistics", "more"), ("mechanism_signature", "gain")]
)
def test_what_nobody_knows_must_be_equal(tmp_path, path):
    """A key that neither the scores give nor the format names, such as one of a user's own signature, is not derived:
    where both sides have it, it differs if its value does, whatever --rtol."""
    ours = changed(SMOKE, *path, to=1.0)
    for value in (2.0, None, [1.0], {"x": 1.0}):
        assert diff(tmp_path, changed(SMOKE, *path, to=value), ours) == 1
    assert diff(tmp_path, changed(SMOKE, *path, to="words"), ours, "--rtol", "9") == 1


# --diff: what it shows ------------------------------------------------------------------------------------------------


def shown(text):
    """Return the lines of --diff as lists of cells: those of the conclusions, those of the fields; and the counts."""
    head, *middle, last = text.rstrip("\n").split("\n\n")
    counts = {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", last)}
    cells = [[re.split(r" {2,}", line) for line in part.splitlines()] for part in (head, *middle)]
    return cells[0], cells[1] if middle else [], counts


def statuses(text):
    """Return {path: status} of the fields that --diff shows."""
    return {row[0]: row[-1] for row in shown(text)[1][1:]}


def test_conclusions_come_first_then_what_differs_then_the_count(tmp_path, capsys):
    """Of two unequal reports, and of equal ones, which have no fields to show."""
    assert diff(tmp_path, SMOKE, DEFAULT) == 1
    table, fields, counts = shown(capsys.readouterr().out)
    assert [row[0] for row in table] == [
        "conclusion", "verdict", "best configuration, baseline", "best configuration, idea",
        "best configuration, placebo", "mechanism confirmed", "parameters", "baseline, mean +- std",
        "idea, mean +- std",
    ]  # fmt: skip
    assert table[0][:3] == ["conclusion", "theirs", "ours"]
    assert table[1][1:] == ["no significant difference", "idea worse (significant)", "DIFFERS"]
    assert [row[-1] for row in table[2:7]] == ["same"] * 5
    assert all("DIFFERS" in row[-1] for row in fields[1:])
    assert list(counts) == ["fields", "same", "within rtol", "derived", "differing", "not compared"]
    assert counts["differing"] == len(fields) - 1 > 10
    assert counts["fields"] == sum(counts.values()) - counts["fields"]
    assert diff(tmp_path, SMOKE, SMOKE) == 0
    _, fields, counts = shown(capsys.readouterr().out)
    assert fields == [] and counts["same"] == counts["fields"] == len(leaves(SMOKE))


def test_all_lists_every_field(tmp_path, capsys):
    """Also those that are the same, within rtol, derived, or not compared."""
    assert diff(tmp_path, SMOKE, DEFAULT, "--rtol", "0.5", "--all") == 1
    _, fields, counts = shown(capsys.readouterr().out)
    assert len(fields) - 1 == counts["fields"] >= len(leaves(DEFAULT))
    found = [re.match("same|within rtol|derived|DIFFERS|not compared", row[-1])[0] for row in fields[1:]]
    for name, count in counts.items():
        if name != "fields":
            assert found.count(name.replace("differing", "DIFFERS")) == count > 0


def test_means_are_compared_in_standard_errors(tmp_path, capsys):
    """Ratio ours to theirs, and the difference over the root of both squared standard errors (s / sqrt(n), ddof 1)."""
    for pair in ((REFERENCE, DEFAULT), (DEFAULT, SMOKE)):
        diff(tmp_path, *pair)
        table, _, _ = shown(capsys.readouterr().out)
        for row, pick in zip(table[-2:], (lambda r: r["baseline"]["full"], lambda r: r["idea"]), strict=True):
            theirs, ours = map(pick, pair)
            assert row[1:3] == [f"{one['mean']:.4g} +- {one['std']:.4g}" for one in (theirs, ours)]
            errors = [statistics.stdev(one["per_seed"]) / math.sqrt(one["n"]) for one in (theirs, ours)]
            apart = abs(ours["mean"] - theirs["mean"]) / math.hypot(*errors)
            assert row[3] == f"ratio {ours['mean'] / theirs['mean']:.4g}, {apart:.1f} standard errors apart"


def test_the_reference_has_the_same_conclusions(capsys):
    """The committed report against the reference: conclusions 0, numbers 1; the extensions, which the reference lacks
    altogether, are not compared; with every measured number forgiven nothing differs."""
    command = ["--diff", str(REFERENCE_FILE), "--out-dir", str(ROOT)]
    assert bench.main([*command, "--conclusions"]) == 0
    assert bench.main(command) == 1
    capsys.readouterr()
    assert bench.main([*command, "--rtol", "1", "--all"]) == 0
    _, fields, counts = shown(capsys.readouterr().out)
    assert counts["differing"] == 0 and counts["derived"] > 5 and counts["within rtol"] > 15
    lacking = [row for row in fields if row[0].startswith("extensions.")]
    assert len(lacking) == counts["not compared"] == len(leaves(DEFAULT["extensions"]))


def test_the_reference_follows_from_its_own_scores(tmp_path):
    """All its statistics, p-value, verdict, error of the attenuation and winners are rebuilt to the digit."""
    assert diff(tmp_path, REFERENCE, REFERENCE) == 0
    for path in leaves(REFERENCE):
        if DERIVED.fullmatch(kind(path)):
            assert diff(tmp_path, *[changed(REFERENCE, *path, to=slightly)] * 2) == 1


@pytest.mark.parametrize("odd", [[{}], [[1.0]], {"a": [{}]}, "}]"])
def test_odd_step_of_a_sweep_is_a_difference_or_no_report(tmp_path, capfd, odd):
    """A row's name is its configuration, whatever that holds: no traceback from brackets in it."""
    report = copy.deepcopy(SMOKE)
    report["idea_sweep"][0]["cfg"]["h"] = odd
    for pair in ((report, SMOKE), (SMOKE, report)):
        assert diff(tmp_path, *pair) in (1, 2)
    assert len(capfd.readouterr().err.splitlines()) <= 2


def test_order_of_a_configuration_s_keys_is_no_conclusion(tmp_path, capsys):
    """A foreign report that names h before the rate concludes the same."""
    turned = copy.deepcopy(SMOKE)
    for row in turned["idea_sweep"]:
        row["cfg"] = dict(reversed(row["cfg"].items()))
    assert diff(tmp_path, turned, SMOKE, "--conclusions") == 0


def test_conclusions_are_rebuilt_and_not_read(tmp_path, capsys):
    """A verdict that says the same against its own scores is not the same."""
    false = changed(SMOKE, "comparison", "verdict", to=DEFAULT["comparison"]["verdict"])
    assert diff(tmp_path, false, DEFAULT, "--conclusions") == 1
    first = shown(capsys.readouterr().out)[0][1]
    assert first[1] == SMOKE["comparison"]["verdict"] and "not from own scores" in first[-1]
    for path in (("best_idea_cfg", "lr"), ("baseline", "best_cfg", "lr"), ("extensions", "placebo", "best_cfg", "lr")):
        assert diff(tmp_path, changed(SMOKE, *path, to=0.003), SMOKE, "--conclusions") == 1
    assert diff(tmp_path, changed(SMOKE, "mechanism_signature", "confirmed", to=False), SMOKE, "--conclusions") == 1


def test_each_conclusion_counts(tiny, tmp_path):
    """Another verdict, best configuration, confirmation or number of parameters is another conclusion; other scores,
    options and rows that lost are not."""
    assert diff(tmp_path, SMOKE, DEFAULT, "--conclusions") == 1
    assert diff(tmp_path, tiny("--lrs", "0.003"), tiny("--lrs", "0.006"), "--conclusions") == 1
    assert diff(tmp_path, changed(SMOKE, "parameter_parity", "idea", to=3610), SMOKE, "--conclusions") == 1
    block = SMOKE["mechanism_signature"] | {"observed_fourier_attenuation": 0.25, "confirmed": False}
    block["attenuation_relative_error"] = round(1 - 0.25 / block["predicted_fourier_attenuation"], 7)
    unconfirmed = SMOKE | {"mechanism_signature": block}
    assert diff(tmp_path, unconfirmed, unconfirmed) == 0
    assert diff(tmp_path, unconfirmed, SMOKE, "--conclusions") == 1
    harmless = changed(changed(SMOKE, "idea_sweep", 0, "mean", to=0.7), "extensions", "options", "epochs", to=3)
    assert diff(tmp_path, harmless, SMOKE) == 1
    assert diff(tmp_path, harmless, SMOKE, "--conclusions") == 0


def test_seeds_are_matched_by_number(tiny, tmp_path, capsys):
    """Two seeds against three, either way round: shared seeds are compared, the third is said and not compared, what
    follows from it is derived, and the number of seeds differs."""
    few, many = tiny("--seeds", "2"), tiny("--seeds", "3")
    for pair in ((few, many), (many, few)):
        assert diff(tmp_path, *pair, "--all") == 1
        found = statuses(capsys.readouterr().out)
        for path in ("baseline.full.per_seed", "idea.per_seed", "extensions.placebo.full.per_seed"):
            assert [found[f"{path}[seed {seed}]"] for seed in range(3)] == ["same", "same", "not compared"]
        assert found["n_seeds"] == found["extensions.options.seeds[1]"] == "DIFFERS"
        assert found["idea.mean"] == found["comparison.n_pairs"] == "derived"
        wrong = {path for path, status in found.items() if status.startswith("DIFFERS") and "mechanism" not in path}
        assert {path for path in wrong if not path.endswith(".n")} == {
            "n_seeds", "extensions.options.seeds[1]", "extensions.data.distinct_test_sets",
        }  # fmt: skip


def test_fresh_seeds_share_what_they_share(tiny, tmp_path, capsys):
    """Seeds 0 to 1 against 1 to 2: seed 1 alone is compared, and a change of it is found."""
    first, later = tiny("--seeds", "2"), tiny("--seeds", "1:3")
    assert first["idea"]["per_seed"][1] == later["idea"]["per_seed"][0]
    diff(tmp_path, first, later, "--all")
    found = statuses(capsys.readouterr().out)
    assert [found[f"idea.per_seed[seed {seed}]"] for seed in range(3)] == ["not compared", "same", "not compared"]
    diff(tmp_path, first, changed(later, "extensions", "floors", "linear", "per_seed", 0, to=0.5), "--all")
    assert statuses(capsys.readouterr().out)["extensions.floors.linear.per_seed[seed 1]"].startswith("DIFFERS")


def test_rows_are_matched_by_configuration(tiny, tmp_path, capsys):
    """A rate that only one side swept is said and not compared, the grid's difference is one; a row that is missing
    although its rate was swept is a difference."""
    some, more = tiny("--lrs", "0.003", "0.006"), tiny("--lrs", "0.003", "0.0045", "0.006")
    for pair in ((some, more), (more, some)):
        assert diff(tmp_path, *pair, "--all") == 1
        found = statuses(capsys.readouterr().out)
        rows = {lr: found[f'idea_sweep[{{"lr": {lr}, "h": 0.08}}].mean'] for lr in (0.003, 0.0045, 0.006)}
        assert rows == {0.003: "same", 0.0045: "not compared", 0.006: "same"}
        assert any(found[path] != "same" for path in found if path.startswith("baseline.union_lr_grid"))
    for sweep in (("idea_sweep",), ("extensions", "placebo", "sweep")):
        fewer, path = changed(some, *sweep, to=lambda rows: rows[1:]), ".".join(sweep)
        for pair in ((fewer, some), (some, fewer)):
            assert diff(tmp_path, *pair) == 1
            rows = [row for row in shown(capsys.readouterr().out)[1] if row[0].startswith(f'{path}[{{"lr": 0.003,')]
            assert len(rows) == 3 and all("lacks it" in row[-1] for row in rows)


def test_extensions_may_be_missing_as_a_whole_only(tmp_path):
    """As the reference's are; a single missing block is a difference, whichever side lacks it."""
    bare = {key: value for key, value in SMOKE.items() if key != "extensions"}
    assert diff(tmp_path, bare, SMOKE) == diff(tmp_path, SMOKE, bare) == 0
    for block in SMOKE["extensions"]:
        lacking = changed(SMOKE, "extensions", block, gone=True)
        assert diff(tmp_path, lacking, SMOKE) in (1, 2) and diff(tmp_path, SMOKE, lacking) in (1, 2)


# --diff: what is no report --------------------------------------------------------------------------------------------

TROUBLE = {
    "missing": (None, "No such file"),
    "empty": ("", "not a JSON"),
    "text": ("hello", "not a JSON"),
    "truncated": (FILES["smoke"].read_text()[:1000], "not a JSON"),
    "not UTF-8": (b"\xff\xfe{}", "not a JSON"),
    "NaN": (json.dumps(changed(SMOKE, "comparison", "p_value", to=math.nan)), "NaN"),
    "infinity": (json.dumps(changed(SMOKE, "comparison", "p_value", to=math.inf)), "Infinity"),
    "infinity by exponent": (FILES["smoke"].read_text().replace('"n_seeds": 2', '"n_seeds": 1e999'), "1e999"),
    "deep": ("[" * 100_000, "not a JSON"),
    "a list": ("[1, 2]", "bench_version"),
    "other version": (json.dumps(SMOKE | {"bench_version": 2}), "bench_version is 2"),
    "version true": (json.dumps(SMOKE | {"bench_version": True}), "bench_version is true"),
    "no version": (json.dumps(changed(SMOKE, "bench_version", gone=True)), "bench_version"),
    "lacks a block": (json.dumps(changed(SMOKE, "idea", gone=True)), "idea"),
    "a block is a number": (json.dumps(changed(SMOKE, "baseline", to=3)), "malformed"),
    "beyond float64": (json.dumps(changed(SMOKE, "parameter_parity", "idea", to=10**400)), "not a JSON number"),
    "a mean beyond it": (json.dumps(changed(SMOKE, "baseline", "sweep", 0, "mean", to=10**400)), "not a JSON number"),
    "scores are text": (json.dumps(changed(SMOKE, "idea", "per_seed", to=["a", "b"])), "malformed"),
    "scores are a word": (json.dumps(changed(SMOKE, "idea", "per_seed", to="none")), "malformed"),
    "uneven pairs": (json.dumps(changed(SMOKE, "idea", "per_seed", to=[0.1])), "malformed"),
    "no scores": (json.dumps(changed(SMOKE, "idea", "per_seed", to=[])), "malformed"),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_what_is_no_report_is_trouble(tmp_path, capsys, case):
    """On either side: one line on stderr that names the file and the fault, exit status 2, nothing on stdout."""
    text, named = TROUBLE[case]
    path = tmp_path / bench.REPORT
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for words in (["--diff", path, "--out-dir", HERE.parent], ["--diff", FILES["smoke"], "--out-dir", tmp_path]):
        assert bench.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert named in err and bench.REPORT in err


@pytest.mark.parametrize("odd", ["folder", "pipe", "link to itself", "below a file"])
def test_odd_files_are_trouble_at_once(tmp_path, capsys, odd):
    """A pipe is never waited for."""
    path = tmp_path / bench.REPORT
    if odd == "folder":
        path.mkdir()
    elif odd == "pipe":
        os.mkfifo(path)
    elif odd == "link to itself":
        path.symlink_to(path)
    else:
        path.write_text("{}")
        path = path / bench.REPORT
    for words in (["--diff", path, "--out-dir", ROOT], ["--diff", FILES["smoke"], "--out-dir", path.parent]):
        assert bench.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and bench.REPORT in err
