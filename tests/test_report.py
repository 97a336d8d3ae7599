"""The report, the answer, the files and --diff."""

import copy
import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

import stage2_bench as bench

HERE = Path(__file__).parent
ROOT = Path(bench.__file__).parent
REFERENCE = json.loads((HERE / "reference_report.json").read_text())
COMMITTED = json.loads((ROOT / bench.REPORT).read_text())
SIGNATURE = {"attenuation": 0.470259, "displacement": -0.1354923}


def reference_outcome():
    """Return an outcome that holds the reference report's numbers."""

    def arm(sweep, full, h, parameters):
        grid = tuple((row["cfg"]["lr"], h) for row in sweep)
        means = tuple(row["mean"] for row in sweep)
        probes = ({"signature": SIGNATURE},) * 8
        return bench.Arm(grid, means, means, tuple(full["per_seed"]), probes, parameters)

    baseline = arm(REFERENCE["baseline"]["sweep"], REFERENCE["baseline"]["full"], None, 3585)
    idea = arm(REFERENCE["idea_sweep"], REFERENCE["idea"], (0.08,), 3609)
    return bench.Outcome(baseline, idea, dataclasses.replace(baseline, grid=((0.0015, (0.0,)),) * 3), ())


def diverged_outcome():
    """Return an outcome in which nothing stayed finite."""
    made = reference_outcome()

    def lose(arm):
        lost = (math.inf,) * 3
        return dataclasses.replace(arm, means=lost, validation=lost, scores=(None,) * 8, probes=({},) * 8)

    return bench.Outcome(lose(made.baseline), lose(made.idea), lose(made.placebo), (bench.Run(0, 0.006, None),))


def test_reference_numbers_give_the_reference_text():
    """Keys, order, nesting, indent and rounding: line for line, but for the relative error of the unrounded and the
    extensions block at the end."""
    text = bench.to_json(bench.build_report(bench.Config(), reference_outcome(), (3, 32))).splitlines()
    expected = (HERE / "reference_report.json").read_text().splitlines()
    assert text[: len(expected) - 2] == expected[:-2]
    assert text[len(expected) - 2 : len(expected)] == ['  "custom_track": null,', '  "extensions": {']


def test_committed_report_lines_up_with_the_reference():
    """A plain diff shows measured and derived values only, then the extensions."""
    ours = (ROOT / bench.REPORT).read_text().splitlines()
    theirs = (HERE / "reference_report.json").read_text().splitlines()
    names = [(a.split(":")[0], b.split(":")[0]) for a, b in zip(ours, theirs, strict=False) if '":' in a]
    assert all(a == b for a, b in names[: len(theirs)] if "extensions" not in a)
    same = [key for key in REFERENCE if REFERENCE[key] == COMMITTED[key]]
    assert {"bench_version", "track", "model", "n_seeds", "best_idea_cfg", "parameter_parity"} <= set(same)
    assert ours[len(theirs) - 1] == '  "extensions": {'


def test_committed_report_follows_from_its_own_scores():
    """Everything derived can be recomputed from the report alone, and the published calibration holds."""
    flat = bench.flatten(COMMITTED)
    derived = bench.derive(COMMITTED)
    assert len(derived) > 12
    assert {path: flat[path] for path in derived} == derived
    means = [row["mean"] for row in COMMITTED["baseline"]["sweep"]]
    assert means == pytest.approx([0.00352, 0.00190, 0.00107], abs=5e-6)


def test_nothing_finite_is_still_strict_json():
    """Where everything diverged the report has nulls, no NaN, and a verdict that says so."""
    report = bench.build_report(bench.Config(), diverged_outcome(), (3, 32))
    assert bench.strict_json(bench.to_json(report)) == report
    assert report["comparison"]["p_value"] is report["idea"]["mean"] is None
    assert "baseline diverged at seed 0, 1" in report["comparison"]["verdict"]
    answer = bench.build_answer(report, "")
    assert answer["system_judged"] is False and answer["confidence"] == 0 and answer["mechanism_ok"] == 0
    assert bench.build_log(bench.Config(), report, "", "here", 1.0).isascii()


ANSWER_KEYS = (
    "worked",
    "confidence",
    "verdict",
    "metrics",
    "how_to_run",
    "files",
    "limitations",
    "bench_report",
    "system_verdict",
    "practical_verdict",
    "mechanism_ok",
    "system_judged",
)


def test_answer_of_the_reference():
    """Keys in their order; worse and significant, mechanism confirmed: partial, harms, confidence 9."""
    report = bench.build_report(bench.Config(), reference_outcome(), (3, 32))
    answer = bench.build_answer(report, "--seeds 8")
    assert tuple(answer) == ANSWER_KEYS
    assert answer["worked"] is False and answer["confidence"] == 9 and answer["mechanism_ok"] == 1
    assert answer["system_verdict"] == "partial" and answer["practical_verdict"] == "harms"
    assert list(answer["metrics"]) == (
        ["baseline", "idea", "paired_delta", "permutation_p_value", "idea_wins", "n_pairs", "parameter_counts"]
    )
    assert answer["how_to_run"] == "python stage2_bench.py --seeds 8"


def test_confidence_is_exact_in_tenths():
    """floor(10 (1 - p)) at p = .9 is 1, whatever binary fractions say."""
    report = bench.build_report(bench.Config(), reference_outcome(), (3, 32))
    found = []
    for p in (0.9, 0.7, 0.3, 0.04965, 1.0):
        report["comparison"]["p_value"] = p
        found.append(bench.build_answer(report, "")["confidence"])
    assert found == [1, 3, 7, 9, 0]


def test_committed_output_ends_with_the_committed_report():
    """stage2_output.txt's answer embeds bench_report.json."""
    text = (ROOT / bench.OUTPUT).read_text()
    answer = json.loads(text[text.index("\n{\n") :])
    assert answer["bench_report"] == COMMITTED and text.isascii()


def test_two_rates_printed_alike_are_two_rows():
    """1.2e-3 and 1.4e-3 stay apart in the log."""
    made = reference_outcome()
    grid = ((0.0012, None), (0.0014, None), (0.003, None))
    report = bench.build_report(
        bench.Config(), dataclasses.replace(made, baseline=dataclasses.replace(made.baseline, grid=grid)), (3, 32)
    )
    lines = "\n".join(bench.sweep_lines(report))
    assert " 0.0012 " in lines and " 0.0014 " in lines


def test_write_is_all_or_nothing(tmp_path, monkeypatch):
    """An error at the second file leaves both old files whole, and no part behind."""
    bench.write_files(tmp_path, {"a": "old", "b": "old"})
    calls = iter([None, OSError(28, "No space left on device")])
    real = os.fsync

    def fsync(fd):
        error = next(calls)
        if error:
            raise error
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(bench.RunError, match="No space left"):
        bench.write_files(tmp_path, {"a": "new", "b": "new"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "old"


def diff(tmp_path, theirs, *options, ours=COMMITTED):
    """Write both reports, run --diff in this process, return its exit status."""
    (tmp_path / bench.REPORT).write_text(json.dumps(ours))
    other = tmp_path / "theirs.json"
    other.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
    return bench.main(["--diff", str(other), "--out-dir", str(tmp_path), *options])


def changed(*path, to, report=COMMITTED):
    """Return a copy of a report with one leaf changed; `to` may be a function of the old value."""
    copied = copy.deepcopy(report)
    *parents, last = path
    block = copied
    for key in parents:
        block = block[key]
    block[last] = to(block[last]) if callable(to) else to
    return copied


def test_equal_reports_are_the_same(tmp_path, capsys):
    """Exit status 0, also where one side alone has extensions."""
    assert diff(tmp_path, COMMITTED) == 0
    assert "no difference" in capsys.readouterr().out
    bare = {key: value for key, value in COMMITTED.items() if key != "extensions"}
    assert diff(tmp_path, bare) == 0
    assert "only in ours, not compared" in capsys.readouterr().out


def test_measured_fields_are_judged_by_rtol(tmp_path, capsys):
    """The sweep's other rows follow from nothing: 1 % off differs at 0 and passes at 0.02, with the ratio shown."""
    theirs = changed("baseline", "sweep", 0, "mean", to=lambda mean: mean * 1.01)
    assert diff(tmp_path, theirs) == 1
    assert "DIFFERS, ratio 0.9901" in capsys.readouterr().out
    assert diff(tmp_path, theirs, "--rtol", "0.02") == 0


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("comparison", "p_value"), 0.5),
        (("comparison", "idea_wins"), 5),
        (("comparison", "verdict"), "idea better (significant)"),
        (("comparison", "system_worked"), True),
        (("baseline", "full", "mean"), lambda value: value + 1e-9),
        (("idea", "std"), None),
        (("best_idea_cfg", "lr"), 0.003),
        (("mechanism_signature", "confirmed"), False),
        (("mechanism_signature", "attenuation_relative_error"), 0.5),
    ],
)
def test_derived_fields_must_follow_from_their_own_report(tmp_path, capsys, path, to):
    """No --rtol forgives a statistic that the report's own scores contradict."""
    assert diff(tmp_path, changed(*path, to=to), "--rtol", "9") == 1
    assert "theirs not from own scores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("track",), "other"),
        (("n_seeds",), 9),
        (("parameter_parity", "idea"), 3610),
        (("baseline", "union_lr_grid", 0), 0.002),
        (("mechanism_signature", "predicted_fourier_attenuation"), 0.48),
        (("custom_track",), {"file": "x.py", "sha256": "0"}),
        (("extensions", "options", "epochs"), 3),
    ],
)
def test_contract_fields_must_be_equal(tmp_path, path, to):
    """No --rtol forgives a different experiment."""
    assert diff(tmp_path, changed(*path, to=to), "--rtol", "9") == 1


def test_key_order_and_extra_keys_are_contract(tmp_path):
    """A plain diff would not line up."""
    assert diff(tmp_path, dict(reversed(COMMITTED.items()))) == 1
    assert diff(tmp_path, COMMITTED | {"more": 1}) == 1


def test_reports_of_other_seeds_compare_what_they_share(tmp_path, capsys):
    """Seeds are matched by number; what one side lacks is said, and the grid's difference is one."""
    fewer = copy.deepcopy(COMMITTED)
    for block in (fewer["baseline"]["full"], fewer["idea"]):
        block["per_seed"] = block["per_seed"][:3]
        block |= bench.summary(block["per_seed"])
    fewer["comparison"] = bench.comparison(fewer["baseline"]["full"]["per_seed"], fewer["idea"]["per_seed"], range(3))
    fewer["n_seeds"] = 3
    del fewer["extensions"]
    assert diff(tmp_path, fewer) == 1
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["idea.per_seed[seed 2]"].endswith("same")
    assert lines["idea.per_seed[seed 3]"].endswith("only in ours, not compared")
    assert lines["n_seeds"].endswith("DIFFERS")
    assert lines["idea.mean"].endswith("follows from its own scores")


TROUBLE = {
    "missing": None,
    "truncated": json.dumps(COMMITTED)[:500],
    "no JSON": "hello",
    "empty": "",
    "NaN": json.dumps(changed("idea", "mean", to=math.nan)),
    "infinity by exponent": json.dumps(COMMITTED).replace("0.0019870063", "1e999"),
    "not an object": "[1, 2]",
    "other version": json.dumps(COMMITTED | {"bench_version": 2}),
    "version true": json.dumps(COMMITTED | {"bench_version": True}),
    "lacks a key": json.dumps({key: value for key, value in COMMITTED.items() if key != "idea"}),
    "lacks a nested key": json.dumps(COMMITTED | {"comparison": {}}),
    "wrong type": json.dumps(changed("idea", "per_seed", to="none")),
    "text as a score": json.dumps(changed("idea", "per_seed", 0, to="x")),
    "uneven pairs": json.dumps(changed("idea", "per_seed", to=lambda scores: scores[:7])),
    "no scores": json.dumps(changed("idea", "per_seed", to=[])),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", TROUBLE.values(), ids=TROUBLE.keys())
def test_what_is_no_report_is_trouble(tmp_path, capsys, text):
    """One line on stderr that names the file, exit status 2."""
    (tmp_path / bench.REPORT).write_text(json.dumps(COMMITTED))
    other = tmp_path / "theirs.json"
    if text is not None:
        other.write_text(text)
    assert bench.main(["--diff", str(other), "--out-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "theirs.json" in err


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("made", [COMMITTED, None], ids=["committed", "diverged"])
def test_figure_is_drawn(tmp_path, suffix, made):
    """One figure of six panels, also where there is nothing but nulls."""
    pytest.importorskip("matplotlib")
    report = made or bench.build_report(bench.Config(), diverged_outcome(), (3, 32))
    path = tmp_path / f"figure.{suffix}"
    bench.draw(report, path)
    head = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(head) and path.stat().st_size > 10_000
