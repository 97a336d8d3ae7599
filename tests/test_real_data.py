"""A real recording end to end: the ECG of 1,024 samples that the package PyWavelets ships."""

import json

import numpy as np
import pytest
import pywt.data

import stage2_bench as bench

TRACK = '''"""Predict the next sample of one ECG from its last 16; the recording is cut by time."""

import numpy as np
import pywt.data

ECG = pywt.data.ecg()
WINDOWS = np.lib.stride_tricks.sliding_window_view(ECG, 17)
PARTS = {"train": (0, 600), "val": (616, 780), "test": (796, 1008)}  # 16 windows apart: no sample is in two parts


def make(seed, split):
    first, last = PARTS[split]
    own = np.random.default_rng([seed, first]).choice(WINDOWS[first:last], size=(last - first) // 2, replace=False)
    return own[:, :16, None], own[:, 16]
'''


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The report, the track's module and the first line of the log of two seeds and two epochs."""
    folder = tmp_path_factory.mktemp("ecg")
    (folder / "heart.py").write_text(TRACK)
    options = "--seeds 5:7 --epochs 2 --lrs 0.003 --hidden 8 --jobs 1 --quiet"
    assert bench.main([*options.split(), "--track", str(folder / "heart.py"), "--out-dir", str(folder)]) == 0
    report = json.loads((folder / bench.REPORT).read_text())
    return report, bench.load_file(str(folder / "heart.py"))[0], (folder / bench.OUTPUT).read_text().splitlines()[0]


def test_the_recording_is_the_one_that_we_know():
    """A known heart beat: 1,024 whole numbers, with its largest R wave."""
    ecg = pywt.data.ecg()
    assert (ecg.shape, ecg.min(), ecg.max()) == ((1024,), -112, 250)
    assert ecg[:5].tolist() == [-86, -87, -87, -89, -89]


@pytest.mark.parametrize("place", [0, 1])
def test_persistence_and_linear_floor_are_numpys(result, place):
    """In units of the training targets' variance: errors of the last sample, a least-squares line, and the mean."""
    report, module, _ = result
    (x, y), (x_test, y_test) = (
        [part.astype(float) for part in module.make(5 + place, split)] for split in ("train", "test")
    )
    design, other = (np.column_stack((a[:, :, 0], np.ones(len(a)))) for a in (x, x_test))
    weights = np.linalg.lstsq(design, y, rcond=None)[0]  # in raw units: another basis of the same fit
    errors = {
        "predict_mean": y.mean() - y_test,
        "repeat_last": x_test[:, -1, 0] - y_test,
        "linear": other @ weights - y_test,
    }
    floors = report["extensions"]["floors"]
    for name, error in errors.items():
        assert floors[name]["per_seed"][place] == pytest.approx(np.mean(error**2) / y.var(), abs=1.01e-10)
    assert floors["best"] == min(("predict_mean", "repeat_last", "linear"), key=lambda name: floors[name]["mean"])


def test_report_and_verdict_of_the_recording(result):
    """All arms are scored, nothing overlaps, and after two epochs the verdict begins with what it hangs on: a floor."""
    report, _, verdict = result
    assert report["track"] == "heart" and report["custom_track"]["file"] == "heart.py"
    data = report["extensions"]["data"]
    assert data == {"train": 300, "val": 82, "test": 106, "distinct_test_sets": 2, "test_in_train": 0.0}
    floors = report["extensions"]["floors"]
    for scores in (report["baseline"]["full"], report["idea"], report["extensions"]["placebo"]["full"]):
        assert floors["linear"]["mean"] < scores["mean"] < 10
    assert floors["beaten_by"] == []
    assert "heart" in verdict and f"{floors['linear']['mean']:.4g}" in verdict
