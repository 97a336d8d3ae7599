"""The README's examples work as they stand, and its figures are those of the committed report."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import stage2_bench as bench

ROOT = Path(bench.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRACK, IDEA = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder, *options):
    """Run a short benchmark in this process and return its report."""
    short = ["--seeds", "2", "--epochs", "1", "--lrs", "0.003", "--jobs", "1", "--quiet"]
    assert bench.main([*short, "--out-dir", str(folder / "out"), *options]) == 0
    return json.loads((folder / "out" / bench.REPORT).read_text())


def test_track_example_runs_on_a_csv(tmp_path):
    """The worked example reads measured data from a CSV beside it."""
    time = 0.05 * np.arange(3000)
    angle = 0.4 * np.cos(2.1 * time) * np.exp(-time / 200) + 0.01 * np.random.default_rng(0).standard_normal(3000)
    np.savetxt(tmp_path / "pendulum.csv", np.c_[time, angle], delimiter=",", header="time,angle")
    (tmp_path / "pendulum.py").write_text(TRACK)
    report = run(tmp_path, "--track", str(tmp_path / "pendulum.py"))
    assert report["track"] == "pendulum"
    assert report["custom_track"]["file"] == "pendulum.py"
    assert report["parameter_parity"] == {"baseline": 3585 - 96, "idea": 3585 - 96 + 12}  # 2 channels
    assert report["extensions"]["rollout"] is None
    module = bench.load_file(str(tmp_path / "pendulum.py"))
    parts = [{tuple(row) for row in module.make(0, split)[0][:, :, 0]} for split in module.PARTS]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


def test_idea_example_runs(tmp_path):
    """The ten-line layer is an idea, with its own parameters and no kinetic signature."""
    (tmp_path / "smoothing.py").write_text(IDEA)
    report = run(tmp_path, "--idea", f"{tmp_path / 'smoothing.py'}:Smoothing")
    assert report["model"] == "rnn_small_Smoothing_vs_raw"
    assert report["parameter_parity"] == {"baseline": 3585, "idea": 3588}
    assert report["mechanism_signature"] is None
    # With h = 0 this layer is the identity: its placebo is the baseline, to the digit.
    assert report["extensions"]["placebo"]["full"] == report["baseline"]["full"]


def test_every_key_of_the_report_is_explained():
    """Whoever reads the report finds each of its keys in the README."""
    report = json.loads((ROOT / bench.REPORT).read_text())
    keys = [*report, *report["comparison"], *report["extensions"], *report["extensions"]["statistics"]]
    assert [key for key in keys if not re.search(rf"[`.]{key}[`.]", README)] == []


@pytest.mark.parametrize("block", ["baseline", "idea"])
def test_answer_table_quotes_the_committed_report(block):
    """The README's means are those of the committed report."""
    report = json.loads((ROOT / bench.REPORT).read_text())
    mean = report["baseline"]["full"]["mean"] if block == "baseline" else report["idea"]["mean"]
    assert re.search(rf"\| {block}, mean test MSE of 8 seeds \| 0\.\d+ \| {mean:.5f} \|", README)


def test_options_of_the_readme_exist():
    """No option that the README names is missing from the parser."""
    known = bench.build_parser().format_help()
    foreign = {"--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--help"}
    assert [word for word in set(re.findall(r"--[a-z][a-z-]+", README)) - foreign if word not in known] == []
