"""The README's examples work as they stand, and its figures are those of the committed report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stage2_bench as bench

ROOT = Path(bench.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REPORT = json.loads((ROOT / bench.REPORT).read_text(encoding="utf-8"))
TRACK, FLEET, IDEA = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder, *options):
    """Run a short benchmark in this process and return its report."""
    short = ["--seeds", "2", "--epochs", "1", "--lrs", "0.003", "--jobs", "1", "--quiet"]
    assert bench.main([*short, "--out-dir", str(folder / "out"), *options]) == 0
    return json.loads((folder / "out" / bench.REPORT).read_text())


def write_recording(path, phase=0.0):
    """Write a swinging pendulum's angle as the README's CSV: a header, then time and angle."""
    time = 0.05 * np.arange(1500)
    noise = 0.01 * np.random.default_rng(int(10 * phase)).standard_normal(len(time))
    angle = 0.4 * np.cos(2.1 * time + phase) * np.exp(-time / 200) + noise
    np.savetxt(path, np.c_[time, angle], delimiter=",", header="time,angle", comments="")


def test_one_recording_runs_and_is_cut_by_time(tmp_path, capsys):
    """The first recipe reads measured data from a CSV with one header line; no window reaches into two splits, and the
    verdict says that all seeds share one test set."""
    write_recording(tmp_path / "pendulum.csv")
    (tmp_path / "pendulum.py").write_text(TRACK)
    report = run(tmp_path, "--track", str(tmp_path / "pendulum.py"))
    assert report["track"] == "pendulum"
    assert report["custom_track"]["file"] == "pendulum.py"
    assert report["parameter_parity"] == {"baseline": 3585 - 96, "idea": 3585 - 96 + 12}  # 2 channels
    assert report["extensions"]["rollout"] is None
    assert report["extensions"]["data"]["distinct_test_sets"] == 1
    assert "There is one test set for all seeds" in capsys.readouterr().out
    module, _ = bench.load_file(str(tmp_path / "pendulum.py"))
    readings = []
    for split in module.PARTS:
        tokens, targets = module.make(0, split)
        readings.append({*tokens[:, :, 0].ravel(), *targets})
    assert not (readings[0] & readings[1] or readings[0] & readings[2] or readings[1] & readings[2])
    angle = np.loadtxt(tmp_path / "pendulum.csv", delimiter=",", skiprows=1)[:, 1]
    assert set.union(*readings) <= set(angle)


def test_several_recordings_give_every_seed_its_own_test_set(tmp_path, capsys):
    """The second recipe deals whole recordings to the splits: no recording in two, another test set for each seed."""
    (tmp_path / "recordings").mkdir()
    for i in range(10):
        write_recording(tmp_path / "recordings" / f"{i}.csv", phase=0.6 * i)
    (tmp_path / "fleet.py").write_text(FLEET)
    report = run(tmp_path, "--track", str(tmp_path / "fleet.py"))
    data = report["extensions"]["data"]
    assert (data["train"], data["val"], data["test"]) == (240, 80, 80)
    assert data["distinct_test_sets"] == 2
    assert data["test_in_train"] == 0
    assert "test set" not in capsys.readouterr().out
    module, _ = bench.load_file(str(tmp_path / "fleet.py"))
    readings = [{*module.make(3, split)[0].ravel()} for split in module.SHARES]
    assert not (readings[0] & readings[1] or readings[0] & readings[2] or readings[1] & readings[2])


def test_idea_example_runs_and_measures_itself(tmp_path):
    """The layer of the README is an idea, with its own parameters and signature; at h = 0 it is the identity, so its
    placebo is the baseline to the digit."""
    (tmp_path / "smoothing.py").write_text(IDEA)
    report = run(tmp_path, "--idea", f"{tmp_path / 'smoothing.py'}:Smoothing")
    assert report["model"] == "rnn_small_Smoothing_vs_raw"
    assert report["parameter_parity"] == {"baseline": 3585, "idea": 3588}
    signature = report["mechanism_signature"]
    assert signature["predicted_leak"] == 0.08
    assert signature["observed_leak"] == pytest.approx(0.08, rel=0.2)
    assert list(signature) == ["predicted_leak", "observed_leak", "confirmed"]
    assert report["extensions"]["placebo"]["full"] == report["baseline"]["full"]


def test_every_key_of_report_and_answer_is_explained():
    """Whoever reads report or answer finds each of its keys in the README."""
    config = bench.Config()
    keys = [*REPORT, *REPORT["comparison"], *REPORT["extensions"], *REPORT["extensions"]["statistics"]]
    keys += [key for block in REPORT["extensions"]["selection"].values() for key in block if key != "validation_choice"]
    keys += bench.build_answer(config, REPORT)
    assert [key for key in dict.fromkeys(keys) if not re.search(rf"[`.]{key}[`.]", README)] == []


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("baseline, mean test MSE of 8 seeds", f"{REPORT['baseline']['full']['mean']:.5f}"),
        ("idea, mean test MSE of 8 seeds", f"{REPORT['idea']['mean']:.5f}"),
        ("idea / baseline", f"{REPORT['idea']['mean'] / REPORT['baseline']['full']['mean']:.2f}"),
        ("pairs won by the idea", f"{REPORT['comparison']['idea_wins']} of 8"),
        ("mean paired difference", f"{REPORT['comparison']['delta_mean']:+.6f}"),
        ("displacement at token 16, predicted 1.28",
         f"{REPORT['mechanism_signature']['observed_transport_displacement']:.3f}"),
        ("verdict", REPORT["comparison"]["verdict"]),
    ],
)  # fmt: skip
def test_table_quotes_the_committed_report(row, value):
    """The README's second column is the committed report's."""
    assert re.search(rf"\| {re.escape(row)} \| [^|]+ \| {re.escape(value)} \|", README)


def test_options_of_the_readme_exist():
    """No option that the README names is missing from the help."""
    script = str(ROOT / "stage2_bench.py")
    known = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True).stdout
    foreign = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--extra-index-url"}
    assert [word for word in set(re.findall(r"--[a-z][a-z-]+", README)) - foreign if word not in known] == []


def test_files_of_the_readme_exist():
    """No file that the README names is missing from the checkout."""
    named = set(re.findall(r"(?:tests|\.github)/[\w./]*\w", README))
    assert [name for name in named if not (ROOT / name).exists()] == []
