"""Section 3, tracks: simulated data against an independent integration, and a user's own data by the command line."""

import hashlib
import json
import math
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plain_loop
import pytest
import torch
from scipy.integrate import solve_ivp

import stage2_bench as bench

SIZES = {"train": 12, "test": 9, "val": 7}
NUMBER = {"train": 0, "test": 1, "val": 2}  # of a split's random stream
UNIFORM = {  # of the oscillators' coefficients, in the order in which they are drawn
    "alpha": (0.5, 1.5), "beta": (0.5, 1.5), "delta": (0.1, 0.4), "gamma": (0.2, 0.5), "omega": (0.8, 1.6),
    "phi": (0, 2 * math.pi), "q0": (-1.5, 1.5), "v0": (-1, 1),
}  # fmt: skip


def small(track, **changes):
    """Return the configuration of a small data set on a track."""
    return bench.Config(**{"track": track, "sizes": tuple(SIZES.values())} | changes)


# Built-in tracks ------------------------------------------------------------------------------------------------------


def clock(track, seed):
    """Return a seed's sample times: 97 of an oscillator, regular or not, and 98 of the attractor."""
    if track == "lorenz":
        return 1 + 0.06 * np.arange(98)
    times = 0.15 * np.arange(97)
    if track == "irregular":
        times[1:] += 0.15 * np.random.default_rng([seed, 5]).uniform(-0.2, 0.2, 97)[1:]
    return times


@cache
def truth(track, seed, split, index):
    """Integrate one trajectory alone by LSODA, another method than the script's, at the tightest tolerance.

    Returns its true positions at all times of the clock, the measured ones, and the drive (None where there is none).
    """
    rng, count, times = np.random.default_rng([seed, NUMBER[split]]), SIZES[split], clock(track, seed)
    if track == "lorenz":
        start = [rng.uniform(low, high, count)[index] for low, high in ((-15, 15), (-15, 15), (10, 40))]

        def slope(_, s):
            return 10 * (s[1] - s[0]), s[0] * (28 - s[2]) - s[1], s[0] * s[1] - 8 / 3 * s[2]
    else:
        p = {name: rng.uniform(*bounds, count)[index] for name, bounds in UNIFORM.items()}
        start, noise = (p["q0"], p["v0"]), 0.005 * rng.standard_normal((count, 33))[index]

        def slope(t, y):
            force = p["gamma"] * math.cos(p["omega"] * t + p["phi"])
            return y[1], -p["delta"] * y[1] + p["alpha"] * y[0] - p["beta"] * y[0] ** 3 + force

    position = solve_ivp(slope, (0, times[-1]), start, "LSODA", t_eval=times, rtol=1e-12, atol=1e-13).y[0]
    if track == "lorenz":
        return position, position[:34], None
    return position, position[:33] + noise, p["gamma"] * np.cos(p["omega"] * times + p["phi"])


@pytest.mark.parametrize(("split", "index"), [("train", 0), ("test", 8), ("val", 3)])
@pytest.mark.parametrize("track", bench.TRACKS)
def test_tokens_and_target_equal_an_independent_integration(track, split, index):
    """A sequence is what LSODA, integrating it alone, and the channels' formulas say, by the seed's own clock.

    Oscillators: measured position, backward difference over the true interval, known drive; the target is the true
    position.  Attractor: x and its first and second backward differences; the target is the next x.
    """
    tokens, targets = bench.build_dataset(small(track), 3).raw[split]
    (position, m, drive), t = truth(track, 3, split, index), clock(track, 3)
    assert tokens.shape == (SIZES[split], 32, 3) and targets.shape == (SIZES[split], 1)
    for row, i in zip(tokens[index], range(len(m) - 32, len(m)), strict=True):
        velocity = (m[i] - m[i - 1]) / (t[i] - t[i - 1])
        third = (m[i] - 2 * m[i - 1] + m[i - 2]) / 0.06**2 if drive is None else drive[i]
        assert row == pytest.approx([m[i], velocity, third], rel=1e-6, abs=1e-6)
    assert targets[index, 0] == pytest.approx(position[len(m)], abs=1e-6 if track == "lorenz" else 1e-8)  # chaos


@pytest.mark.parametrize("track", bench.TRACKS)
def test_truth_beyond_the_window_equals_an_independent_integration(track):
    """The closed loop is compared with what LSODA gives: so are repeating the last position and the training mean."""
    config = small(track)
    with bench.computing(config):
        (found,) = bench.rollout(bench.Model(config, [bench.Run(3, 0.003, None)]))
    scale, paths = bench.build_dataset(config, 3).target_scale, [truth(track, 3, "test", i) for i in range(9)]
    for place, horizon in enumerate((1, 4, 16, 64)):
        future = np.array([position[len(m) + horizon - 1] for position, m, _ in paths])
        for name, guess in (("floor", np.array([m[-1] for _, m, _ in paths])), ("predict_mean", scale.mean)):
            rmse = np.sqrt(np.mean((guess - future) ** 2)) / scale.std
            assert found[name][place] == pytest.approx(rmse.item(), abs=1e-6)


@pytest.mark.parametrize(("track", "seed"), [("dynamics", 5), ("lorenz", 2), ("irregular", 4)])
def test_full_size_data_equal_the_plain_loops(track, seed):
    """Every standardised token and target of a seed at the default sizes, 512, 1024 and 256, equals the oracle's."""
    data, (ready, _, scales) = (
        bench.build_dataset(bench.Config(track=track), seed),
        plain_loop.make_data(seed, track=track),
    )
    for split, size in (("train", 512), ("test", 1024), ("val", 256)):
        tokens, targets = ready[split]
        assert data.tokens[split].shape == (size, 32, 3) and data.targets[split].shape == (size, 1)
        assert torch.allclose(data.tokens[split], tokens, rtol=0, atol=1e-9)
        assert torch.allclose(data.targets[split][:, 0], targets, rtol=0, atol=1e-9)
    ours = [part for scale in (data.token_scale, data.target_scale) for part in (scale.mean, scale.std)]
    assert np.allclose(np.hstack(ours), np.hstack(scales), rtol=1e-10)


@pytest.mark.parametrize("track", bench.TRACKS)
def test_same_seed_same_bytes_and_no_global_randomness(track):
    """A seed's data is a function of the seed: not of other options, NumPy's global state, or what was built before."""
    one, other = (bench.build_dataset(small(track), seed) for seed in (1, 0))
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    two = bench.build_dataset(small(track, epochs=17), 1)  # other options, or a cache would compare `one` with itself
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert one is not two
    for split in SIZES:
        assert one.tokens[split].numpy().tobytes() == two.tokens[split].numpy().tobytes()
        assert one.targets[split].numpy().tobytes() == two.targets[split].numpy().tobytes()
        assert not torch.equal(one.tokens[split], other.tokens[split])


@pytest.mark.parametrize("track", bench.TRACKS)
def test_splits_do_not_overlap(track):
    """No sequence and no target is in two splits, nor in two seeds, nor twice in one."""
    sets = [bench.build_dataset(small(track), seed).raw[split] for seed in (0, 1) for split in SIZES]
    rows = np.concatenate([tokens[:, :, 0].round(6) for tokens, _ in sets])
    targets = np.concatenate([targets.round(9) for _, targets in sets])
    assert len(np.unique(rows, axis=0)) == len(np.unique(targets)) == 2 * (12 + 9 + 7)


@pytest.mark.parametrize("track", bench.TRACKS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_standardised_by_the_training_split_alone(track, dtype):
    """The training split gets mean 0 and population std 1 by channel; the others its scale, and so not exactly that."""
    data, eps = bench.build_dataset(small(track, dtype=dtype), 0), 1e-12 if dtype == "float64" else 1e-5
    x, y = data.tokens["train"].double().numpy(), data.targets["train"].double().numpy()
    assert data.tokens["train"].dtype == data.targets["test"].dtype == getattr(torch, dtype)
    assert np.abs(x.mean((0, 1))).max() < eps and np.abs(np.sqrt((x**2).mean((0, 1))) - 1).max() < eps
    assert abs(y.mean()) < eps and abs(np.sqrt((y**2).mean()) - 1) < eps
    for split in ("test", "val"):
        assert np.abs(data.tokens[split].double().numpy().mean((0, 1))).max() > 1e-3
        tokens, targets = data.raw[split]
        assert tokens.dtype == targets.dtype == np.float64
        back = data.token_scale.invert(data.tokens[split].double().numpy())
        assert np.allclose(back, tokens, rtol=0, atol=30 * eps * data.token_scale.std.max())
        assert np.allclose(data.target_scale.apply(targets), data.targets[split].numpy(), rtol=0, atol=30 * eps)


def test_lorenz_next_step_is_not_trivial():
    """Repeating the last value, a line and a parabola through the last points all err by over 10 % of the std."""
    tokens, targets = bench.build_dataset(small("lorenz", sizes=(300, 1, 1)), 0).raw["train"]
    last, target = tokens[:, -3:, 0], targets[:, 0]
    guesses = {"repeat": [0, 0, 1], "line": [0, -1, 2], "parabola": [1, -3, 3]}
    errors = {
        name: np.sqrt(np.mean((last @ weights - target) ** 2)) / target.std() for name, weights in guesses.items()
    }
    assert min(errors.values()) > 0.1, errors
    assert errors["repeat"] > 0.2, errors


def test_lorenz_is_on_the_attractor():
    """x has the attractor's known spread, 7.9, zero mean by its symmetry, and visits both wings."""
    x = bench.build_dataset(small("lorenz", sizes=(300, 1, 1)), 0).raw["train"][0][:, :, 0]
    assert 7.4 < x.std() < 8.4
    assert abs(x.mean()) < 1
    assert -21 < x.min() < -10 and 10 < x.max() < 21


@pytest.mark.parametrize("seed", range(6))
def test_tokens_angles_are_their_times_on_one_turn(seed):
    """theta_i = 2 pi (t_i - t_1) / (32 steps), wherever along the clock a rolled-out window begins."""
    config, times = small("irregular"), clock("irregular", seed)
    for start in (0, 1, 63):
        window = times[1 + start : 33 + start]
        expected = 2 * math.pi * (window - window[0]) / 4.8
        assert np.allclose(bench.token_angles(config, seed, start), expected, rtol=0, atol=1e-12)
        assert bench.token_angles(small("dynamics"), seed, start) is None
        assert bench.token_angles(small("lorenz"), seed, start) is None
        assert bench.token_angles(small("/own.py"), seed, start) is None


def test_clock_jitters_by_up_to_a_fifth_of_a_step():
    """Two samples of a jittered clock are between 0.6 and 1.4 steps apart, and often nearly so; seeds differ."""
    gaps = np.array([np.diff(bench.token_angles(small("irregular"), seed)) * 32 / (2 * math.pi) for seed in range(40)])
    assert 0.6 <= gaps.min() < 0.65 < 1.35 < gaps.max() <= 1.4
    assert abs(gaps.mean() - 1) < 0.01
    assert len(np.unique(gaps.round(9))) == gaps.size


# A user's own data: what it takes -------------------------------------------------------------------------------------

QUICK = ("--seeds", "2", "--epochs", "1", "--lrs", "0.003", "--hidden", "2", "--jobs", "1", "--quiet")
SHAPES = {"train": 24, "val": 9, "test": 7}
HEAD = f"""import numpy as np
def data(seed, split, length=4, channels=2):
    x = np.random.default_rng([seed, len(split)]).normal(size=({SHAPES}[split], length, channels))
    return x, 3 * x[:, -1, 0] + x[:, 0, -1] ** 2
"""
PLAIN = "return data(seed, split)"


def write(folder, body, name="own.py", head=HEAD):
    """Write a track file whose make() has this body, and return its path."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / name).write_text(f"{head}def make(seed, split):\n{lines}", encoding="utf-8")
    return folder / name


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command line with a track in this process: its status, outputs, report, answer and folder."""

    def call(track, *options, out="out"):
        folder = tmp_path / out
        status = bench.main([*QUICK, "--out-dir", str(folder), "--track", str(track), *options])
        done = SimpleNamespace(status=status, folder=folder, report=None, **capsys.readouterr()._asdict())
        if status == 0:
            done.report = json.loads((folder / bench.REPORT).read_text())
            output = (folder / bench.OUTPUT).read_text()
            done.answer = json.loads(output[output.index("\n{\n") :])
            done.verdict = done.out.splitlines()[0]
        return done

    return call


@pytest.fixture
def refused(run):
    """Run the command line with a track that it must refuse, in one line and before anything is written."""

    def call(track, *options):
        done = run(track, *options)
        assert done.status == 2, done.out
        assert not done.out and not done.folder.exists()
        assert done.err.count("\n") == 1 and str(track) in done.err
        return done.err

    return call


def as_numpy_has_it(seed, split):
    """Return tokens and targets of HEAD's data(), made here."""
    x = np.random.default_rng([seed, len(split)]).normal(size=(SHAPES[split], 4, 2))
    return x, 3 * x[:, -1, 0] + x[:, 0, -1] ** 2


def numpy_floors(splits):
    """Return the three floors of {split: (tokens, targets (N, K))} by NumPy, with scales measured here."""
    (x, y), (x_test, y_test) = splits["train"], splits["test"]
    y, y_test = y.reshape(len(y), -1), y_test.reshape(len(y_test), -1)
    spread = np.where(np.ptp(y, axis=0) > 0, y.std(axis=0), 1.0)
    flat, flat_test = (np.c_[a.reshape(len(a), -1), np.ones(len(a))] for a in (x, x_test))
    linear = flat_test @ np.linalg.pinv(flat) @ y
    guesses = {"predict_mean": y.mean(axis=0), "repeat_last": x_test[:, -1, :1], "linear": linear}
    return {name: np.mean(((guess - y_test) / spread) ** 2) for name, guess in guesses.items()}


@pytest.mark.parametrize(("length", "channels"), [(2, 1), (2, 4), (3, 2), (9, 1), (40, 6)])
def test_any_length_and_channels_train(run, tmp_path, length, channels):
    """T >= 2 and C >= 1 train all arms and score them; the parameters are those of GRU(C, 2), readout, gate and mix."""
    done = run(write(tmp_path, f"return data(seed, split, {length}, {channels})"), "--h", "0.08", "0.02+0.3")
    gru = 3 * 2 * (channels + 2) + 2 * 3 * 2 + 2 + 1
    depth = 2 if isinstance(done.report["best_idea_cfg"]["h"], list) else 1
    layers = depth * 2 * (channels**2 + channels)
    assert done.report["parameter_parity"] == {"baseline": gru, "idea": gru + layers}
    for scores in (done.report["baseline"]["full"], done.report["idea"], done.report["extensions"]["placebo"]["full"]):
        assert len(scores["per_seed"]) == 2 and min(scores["per_seed"]) > 0
    assert done.report["extensions"]["rollout"] is None


def test_make_is_asked_for_each_seed_and_split(run, tmp_path):
    """Sizes and floors of seeds 3, 4 and 5 are those of make(3 .. 5, split), each split in its own place."""
    done = run(write(tmp_path, PLAIN), "--seeds", "3:6")
    block = done.report["extensions"]
    assert [block["data"][split] for split in SHAPES] == list(SHAPES.values())
    assert block["data"]["distinct_test_sets"] == 3 and block["data"]["test_in_train"] == 0
    for place, seed in enumerate((3, 4, 5)):
        expected = numpy_floors({split: as_numpy_has_it(seed, split) for split in ("train", "test")})
        for name, value in expected.items():
            assert block["floors"][name]["per_seed"][place] == pytest.approx(value, abs=1e-9)


def test_validation_choice_is_made_by_the_validation_split(run, tmp_path):
    """Where the validation targets alone are turned round, that split chooses the rate that learns less."""
    body = "x, _ = data(seed, split)\ny = x[:, -1, 0]\nreturn x, -y if split == 'val' else y"
    done = run(write(tmp_path, body), "--lrs", "0.0001", "0.03", "--epochs", "12")
    chosen = done.report["extensions"]["selection"]["baseline"]
    assert done.report["baseline"]["best_cfg"]["lr"] == 0.03
    assert (chosen["validation_choice"]["lr"], chosen["agrees"]) == (0.0001, False)


def test_report_names_the_file_by_its_bytes_alone(run, tmp_path):
    """custom_track is the file's name and SHA-256; the same file elsewhere gives the same bytes of report."""
    path = write(tmp_path, PLAIN)
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(path, tmp_path / "elsewhere")
    one, two = run(path), run(copy, out="out2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert one.report["custom_track"] == {"file": "own.py", "sha256": digest}
    assert one.report["track"] == "own"
    assert one.report == two.report


TAKEN = {
    "lists": "x, y = data(seed, split)\nreturn x.tolist(), tuple(y)",
    "torch tensors": "import torch\nx, y = data(seed, split)\nreturn torch.tensor(x), torch.tensor(y)",
    "lists of tensors": "import torch\nx, y = data(seed, split)\nreturn [torch.tensor(s) for s in x], torch.tensor(y)",
    "objects with __array__, as in pandas": """class Frame:
    def __init__(self, values):
        self.values = values
    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)
x, y = data(seed, split)
return Frame(x), Frame(y)""",
    "other memory order, read only": """x, y = data(seed, split)
x = np.asfortranarray(x)
x.flags.writeable = y.flags.writeable = False
return x, y[::-1].copy()[::-1]""",
    "big-endian and long double": "x, y = data(seed, split)\nreturn x.astype('>f8'), y.astype(np.longdouble)",
    "Python's numbers": "x, y = data(seed, split)\nreturn x.astype(object), y.astype(object)",
    "masked arrays without a masked value": """x, y = data(seed, split)
return np.ma.array(x), np.ma.array(y, mask=y > 1e9)""",
    "targets (N, 1)": "x, y = data(seed, split)\nreturn x, y[:, None]",
    "a list of two": "return [*data(seed, split)]",
    "one buffer, filled again by every call": """x, y = data(seed, split)
n = len(x)
make.buffers = a, b = getattr(make, "buffers", (np.zeros((24, 4, 2)), np.zeros(24)))
a[:n], b[:n] = x, y
return a[:n], b[:n]""",
    "what sets torch's and NumPy's global state": """import torch
np.random.seed(seed), torch.manual_seed(seed), torch.set_default_dtype(torch.float64)
return data(seed, split)""",
}


@pytest.fixture(scope="module")
def plain_scores(tmp_path_factory):
    """The report of PLAIN's data as float64 arrays."""
    folder = tmp_path_factory.mktemp("plain")
    assert bench.main([*QUICK, "--out-dir", str(folder), "--track", str(write(folder, PLAIN))]) == 0
    return json.loads((folder / bench.REPORT).read_text())


@pytest.mark.parametrize("kind", TAKEN)
def test_what_numpy_can_turn_into_an_array_is_taken(run, tmp_path, plain_scores, kind):
    """The same numbers in another form, or made by rougher code, give the same report."""
    try:
        done = run(write(tmp_path, TAKEN[kind]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert done.err == ""
    assert {**done.report, "custom_track": None} == {**plain_scores, "custom_track": None}


def test_narrow_numbers_become_float64(run, tmp_path):
    """float32 tokens and integer targets are widened before anything is computed from them."""
    done = run(write(tmp_path, "x, y = data(seed, split)\nreturn x.astype('f4'), (100 * y).astype('i2')"))
    splits = {}
    for split in ("train", "test"):
        x, y = as_numpy_has_it(0, split)
        splits[split] = x.astype("f4").astype(float), (100 * y).astype("i2").astype(float)
    for name, value in numpy_floors(splits).items():
        assert done.report["extensions"]["floors"][name]["per_seed"][0] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("power", [-900, -600, 300])
def test_scores_do_not_depend_on_the_unit(run, tmp_path, plain_scores, power):
    """Data times 2^power are the same data, also where squares of them underflow: standardised, and not "diverged"."""
    done = run(write(tmp_path, f"x, y = data(seed, split)\nreturn x * 2.0**{power}, y * 2.0**{power}"))
    assert {**done.report, "custom_track": None} == {**plain_scores, "custom_track": None}


def test_values_at_the_end_of_floating_point_are_standardised(run, tmp_path, plain_scores):
    """Even subnormal numbers, 1e-310, keep their spread but for their own few digits."""
    done = run(write(tmp_path, "x, y = data(seed, split)\nreturn x * 1e-310, y * 1e-310"))
    assert done.report["idea"]["per_seed"] == pytest.approx(plain_scores["idea"]["per_seed"], abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 2.0, 0.1, 1 / 3, -7.3, 1e6 + 0.1, 1e-300])
def test_constant_channel_becomes_zeros(tmp_path, value):
    """A channel that never changes says nothing: zeros, not rounding errors divided by each other.

    0.1 is the hard case: the mean of many 0.1s is off by a rounding, so their std is 1e-16 and not 0.
    """
    path = write(tmp_path, f"x, y = data(seed, split)\nx[..., 1] = {value!r}\nreturn x, y")
    data = bench.build_dataset(bench.Config(track=str(path)), 0)
    for split in SHAPES:
        assert data.tokens[split][..., 1].abs().max() < 1e-9
    assert data.tokens["train"][..., 0].std(correction=0) == pytest.approx(1)


def test_file_may_define_dataclasses(run, tmp_path):
    """An ordinary Python file loads: dataclasses with postponed annotations look their module up by name."""
    head = "from __future__ import annotations\nimport dataclasses\n"
    head += HEAD + "@dataclasses.dataclass\nclass Shape:\n    length: int = 3\n"
    assert run(write(tmp_path, "return data(seed, split, Shape().length)", head=head)).status == 0


# Several targets


def test_two_steps_ahead(run, tmp_path):
    """Targets (N, 2): two outputs, floors that are the mean over the columns, and no last value to repeat."""
    body = """rng = np.random.default_rng([seed, len(split)])
wave = np.sin(rng.uniform(0, 6.28, (60, 1)) + 0.4 * np.arange(10)) + 0.05 * rng.standard_normal((60, 10))
return wave[:, :8, None], wave[:, 8:] * (1, 100)"""
    path = write(tmp_path, body, head="import numpy as np\n")
    done = run(path)
    assert done.report["parameter_parity"]["baseline"] == 3 * 2 * (1 + 2) + 2 * 3 * 2 + 2 * (2 + 1)
    floors, make = done.report["extensions"]["floors"], bench.load_file(str(path))[0].make
    for seed in (0, 1):
        expected = numpy_floors({split: make(seed, split) for split in ("train", "test")})
        for name in ("predict_mean", "linear"):
            assert floors[name]["per_seed"][seed] == pytest.approx(expected[name], abs=1e-9)
    assert floors["repeat_last"] is None and done.report["extensions"]["rollout"] is None
    assert "repeating" not in done.verdict


def test_network_with_two_targets_is_scored_by_the_mean_over_both(tmp_path):
    """Readout weight (2, 32) and bias (2) stand in one target's places in the weights' stream; the MSE is over both."""
    path = write(tmp_path, "x, y = data(seed, split)\nreturn x, np.stack([y, x[:, 1, 1]], axis=1)")
    config = bench.Config(track=str(path))
    rng = np.random.default_rng([7, 3])
    expected = [rng.uniform(-1, 1, shape) / math.sqrt(32) for shape in ((96, 2), (96, 32), 96, 96, (2, 32), 2)]
    with bench.computing(config):
        model, data = bench.Model(config, [bench.Run(7, 0.003, None)]), bench.build_dataset(config, 7)
        score = bench.evaluate(model, "test")[0]
        with torch.no_grad():
            out = model([data.tokens["test"]])[0]
        gru, readout = torch.nn.GRU(2, 32, batch_first=True, dtype=torch.float64), model.core[4:]
        for own, weights in zip(gru.parameters(), model.core[:4], strict=True):
            own.data.copy_(weights.reshape(own.shape))
        last = gru(data.tokens["test"])[0][:, -1].detach()
    for weights, drawn in zip(model.core, expected, strict=True):
        assert np.allclose(weights.detach().numpy().reshape(drawn.shape), drawn, rtol=0, atol=1e-15)
    by_hand = last @ readout[0].detach().reshape(2, 32).T + readout[1].detach().reshape(2)
    assert out.shape == (7, 2) and torch.allclose(out, by_hand, rtol=0, atol=1e-12)
    assert score == pytest.approx(((by_hand - data.targets["test"]) ** 2).mean().item(), abs=1e-12)


def test_each_target_column_has_its_own_scale(run, tmp_path):
    """A column is standardised by itself, a constant one by std 1: it adds nothing to the training mean's error."""
    body = "x, y = data(seed, split)\nreturn x, np.stack([1e6 * y, 0 * y + 0.1, x[:, 1, 1] - 5], axis=1)"
    path = write(tmp_path, body)
    y = bench.build_dataset(bench.Config(track=str(path)), 0).targets["train"].numpy()
    assert np.allclose(y.mean(axis=0), 0, atol=1e-9) and np.allclose(y.std(axis=0), [1, 0, 1], atol=1e-9)
    (x, y), (x_test, y_test) = as_numpy_has_it(0, "train"), as_numpy_has_it(0, "test")
    errors = [np.mean(((b - a.mean()) / a.std()) ** 2) for a, b in ((y, y_test), (x[:, 1, 1], x_test[:, 1, 1]))]
    floors = run(path).report["extensions"]["floors"]
    assert floors["predict_mean"]["per_seed"][0] == pytest.approx(sum(errors) / 3, abs=1e-9)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("(y > 0).astype(int)", True),
        ("y > 0", True),
        ("np.sign(y) * 2.0", True),
        ("np.arange(len(y)) * 7", False),
        ("np.sign(y) / 2", False),
        ("y", False),
    ],
)
def test_targets_that_look_like_classes_get_one_line(run, tmp_path, expression, said):
    """Whole targets of few distinct values train all the same, with one line: this is regression."""
    done = run(write(tmp_path, f"x, y = data(seed, split)\nreturn x, {expression}"))
    assert done.status == 0
    assert ("regression" in done.err, done.err.count("\n")) == ((True, 1) if said else (False, 0))


# A user's own data: what is said of it --------------------------------------------------------------------------------


def test_same_sequences_in_every_split_are_said_loudly(run, tmp_path):
    """A make() that forgets the split: report, verdict and limitations say that 100 % of the test is trained on."""
    body = "w = np.random.default_rng(seed).standard_normal((40, 6)).cumsum(axis=1)\nreturn w[:, :5, None], w[:, 5]"
    done = run(write(tmp_path, body))
    assert done.report["extensions"]["data"]["test_in_train"] == 1
    for text in (done.verdict, " ".join(done.answer["limitations"])):
        assert re.search(r"overlap.*\b100 %", text)
    assert re.search(r"100(\.0*)? ?% .*validation", done.err)


def test_the_worst_seeds_overlap_counts(run, tmp_path):
    """Two of seed 1's seven test sequences stand in its training split, with other targets; seed 0 is clean: 2/7."""
    body = """x, y = data(seed, split)
if seed == 1 and split == "test":
    x[2], x[5] = data(1, "train")[0][[3, 3]]
if seed == 0 and split == "test":
    x[4] = data(1, "train")[0][3]  # another seed's: not trained on here
return x, y"""
    done = run(write(tmp_path, body))
    assert done.report["extensions"]["data"]["test_in_train"] == round(2 / 7, 10)
    assert "28.6 %" in done.verdict and any("28.6 %" in sentence for sentence in done.answer["limitations"])
    assert done.err == ""  # the validation split is clean


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_sequences_of_any_seed_that_are_trained_on_are_said(run, tmp_path, seed):
    """Three of nine in one line, whichever seed they are of."""
    body = (
        f"x, y = data(seed, split)\nif seed == {seed} and split == 'val':\n    x[2:5] = data(seed, 'train')[0][7:10]\n"
    )
    done = run(write(tmp_path, f"{body}return x, y"))
    assert re.search(r"\b33\.3 % .*validation", done.err) and done.err.count("\n") == 1


def test_clean_splits_are_not_accused(run, tmp_path):
    """Without overlap, and with a test set of its own for each seed, no sentence speaks of either."""
    done = run(write(tmp_path, PLAIN))
    said = " ".join([done.verdict, *done.answer["limitations"]])
    assert "overlap" not in said and "test set" not in said and done.err == ""


@pytest.mark.parametrize(
    ("seed_of_test", "target", "sets", "words"),
    [
        ("0", "y", 1, "one test set for all seeds"),
        ("seed // 2", "y", 2, "2 different test sets"),
        ("0", "y + seed", 3, ""),
    ],
)
def test_one_test_set_for_several_seeds_is_said(run, tmp_path, seed_of_test, target, sets, words):
    """Test sets count by tokens and targets; where seeds share one, p speaks of initialisation, and that is said."""
    body = f"x, y = data({seed_of_test} if split == 'test' else seed, split)\nreturn x, {target}"
    done = run(write(tmp_path, body), "--seeds", "3")
    assert done.report["extensions"]["data"]["distinct_test_sets"] == sets
    for text in (done.verdict, " ".join(done.answer["limitations"])):
        assert bool(re.search(r"test sets?\b.*initialisation and batch order", text)) == bool(words)
        assert words in text


def test_trend_out_of_the_training_range_is_said_with_its_figure(run, tmp_path):
    """On a rising series cut by time both models lose to repeating the last value: the verdict has floor and ratio."""
    body = """month = np.arange(300)
series = 315 + 0.11 * month + 3e-4 * month**2 + 3 * np.sin(2 * np.pi * month / 12)
first, last = {"train": (0, 180), "val": (180, 230), "test": (230, 288)}[split]
windows = np.lib.stride_tricks.sliding_window_view(series, 13)[first:last]
return windows[:, :12, None], windows[:, 12]"""
    done = run(write(tmp_path, body, head="import numpy as np\n"), "--epochs", "20", "--hidden", "16")
    floor = done.report["extensions"]["floors"]["repeat_last"]["mean"]
    best = min(done.report["baseline"]["full"]["mean"], done.report["idea"]["mean"])
    assert best > 20 * floor and done.report["extensions"]["floors"]["beaten_by"] == []
    for text in (done.verdict, " ".join(done.answer["limitations"])):
        assert re.search(r"[Bb]oth models are worse than", text)
        assert f"{floor:.4g}, {best / floor:.4g} times" in text


# A user's own data: what is refused -----------------------------------------------------------------------------------

UNSEEDED = {
    "everything": "x = np.random.standard_normal((24, 4, 1))\nreturn x, x[:, -1, 0]",
    "the test split alone": "x, y = data(seed, split)\nif split == 'test': x = x + np.random.rand()\nreturn x, y",
    "the validation split alone": "x, y = data(seed, split)\nif split == 'val': x = x + np.random.rand()\nreturn x, y",
    "targets alone": "x, y = data(seed, split)\nreturn x, y + 1e-9 * np.random.rand(len(y))",
    "one value": "x, y = data(seed, split)\nx[-1, -1, -1] = np.random.rand()\nreturn x, y",
    "the number of sequences": "make.n = 11 - getattr(make, 'n', 5)\nx, y = data(seed, split)\n"
    "return x[: make.n], y[: make.n]",
    "a generator that goes on": "x, y = data(seed, split)\nmake.rng = getattr(make, 'rng', np.random.default_rng(0))\n"
    "return x + make.rng.normal(), y",
}


@pytest.mark.parametrize("what", UNSEEDED)
def test_make_that_answers_twice_is_refused(refused, tmp_path, what):
    """A make() that forgets the seed would give a pair two data sets."""
    assert "seed its randomness" in refused(write(tmp_path, UNSEEDED[what]))


def holed(change, when="split == 'train'"):
    """Return a make() that changes tokens x and targets y of one split."""
    return f"x, y = data(seed, split)\ny = np.stack([y, y], axis=1)\nif {when}:\n    {change}\nreturn x, y"


HOLES = {
    "one NaN": (holed("x[7, 3, 1] = np.nan"), ["(0, 'train')", "tokens", "1 NaN", "sequence 7, token 3, channel 1"]),
    "three": (
        holed("x[[8, 2, 6], 1, 0] = np.nan"),
        ["3 NaN", "sequence 2, token 1, channel 0"],
    ),
    "of the test split": (
        holed("x[5, 0, 1] = np.nan", "split == 'test'"),
        ["(0, 'test')", "sequence 5, token 0, channel 1"],
    ),
    "of the next seed": (
        holed("y[4:7, 1] = np.nan", "seed == 1 and split == 'val'"),
        ["(1, 'val')", "targets", "3 NaN", "sequence 4, column 1"],
    ),
    "infinity": (
        holed("x[1, 2, 0] = -np.inf; x[3, 0, 0] = np.inf"),
        ["2 infinit", "sequence 1, token 2, channel 0"],
    ),
    "masked": (holed("x = np.ma.array(x, mask=x > 1.5)"), ["tokens", "masked"]),
    "masked in a list": (holed("x = [np.ma.array(s, mask=s > 1.5) for s in x]"), ["tokens", "masked"]),
    "masked targets": (holed("y = np.ma.masked_greater(y, 1)"), ["targets", "masked"]),
    "complex": (holed("x = x + 0j"), ["tokens", "complex"]),
    "complex in a list": (holed("y = (y + 0j).tolist()"), ["targets", "complex"]),
}


@pytest.mark.parametrize("hole", HOLES)
def test_what_is_no_finite_real_number_is_named_with_its_place(refused, tmp_path, hole):
    """How many, in which split of which seed, and where the first one is."""
    body, named = HOLES[hole]
    message = refused(write(tmp_path, body))
    for words in named:
        assert words in message


BAD_BODIES = {
    "raises": ("raise ValueError('two\\nlines')", "two lines"),
    "raises another error": ("return {}['x'], 1", "KeyError: 'x'"),
    "raises for the last split": (
        "if (seed, split) == (1, 'test'): 1 / 0\nreturn data(seed, split)",
        "make(1, 'test')",
    ),
    "leaves": ("raise SystemExit(3)", "SystemExit"),
    "returns None": ("return None", "tokens (N, T, C)"),
    "returns one array": ("return np.zeros((4, 3, 2))", "tokens (N, T, C)"),
    "returns three": ("return *data(seed, split), 1", "tokens (N, T, C)"),
    "returns words": ("return [[['a']]], ['b']", "'a'"),
    "ragged tokens": ("return [[[1], [2]], [[3]]], [1, 2]", "tokens (N, T, C)"),
    "two axes": ("return np.ones((4, 3)), np.ones(4)", "(4, 3)"),
    "no sequences": ("return np.ones((0, 3, 1)), np.ones(0)", "(0, 3, 1)"),
    "one token": ("return np.ones((4, 1, 2)), np.ones(4)", "(4, 1, 2)"),
    "no channels": ("return np.ones((4, 3, 0)), np.ones(4)", "(4, 3, 0)"),
    "targets too short": ("return np.ones((4, 3, 2)), np.ones(3)", "(3,)"),
    "targets with three axes": ("return np.ones((4, 3, 2)), np.ones((4, 1, 1))", "(4, 1, 1)"),
    "targets without columns": ("return np.ones((4, 3, 2)), np.ones((4, 0))", "(4, 0)"),
    "one target for all": ("return np.ones((4, 3, 2)), 1.0", "()"),
    "a token too long in val": ("return data(seed, split, 5 if split == 'val' else 4)", "make(0, 'val')"),
    "a channel too many in test": ("return data(seed, split, 4, 3 if split == 'test' else 2)", "make(0, 'test')"),
    "more columns in val": (
        "x, y = data(seed, split)\nreturn x, np.stack([y] * (1 + (split == 'val')), axis=1)",
        "make(0, 'val')",
    ),
    "a longer seed": ("return data(seed, split, 4 + seed)", "make(1,"),
    "a larger seed": ("x, y = data(seed, split)\nreturn x[: 6 + seed], y[: 6 + seed]", "make(1,"),
    "targets all equal": ("x, y = data(seed, split)\nreturn x, np.full(len(x), 0.1)", "all equal"),
    "columns all constant": ("x, y = data(seed, split)\nreturn x, np.ones((len(x), 2)) * (1, 0.1)", "all equal"),
    "targets of seed 1 all equal": ("x, y = data(seed, split)\nreturn x, y * (seed == 0)", "make(1, 'train')"),
    "tokens too large": ("x, y = data(seed, split)\nreturn x * 1e200, y", "too large"),
    "targets too large": ("x, y = data(seed, split)\nreturn x, y * 1e200", "too large"),
    "an int too large": ("x, y = data(seed, split)\nreturn x, [10**400] * len(y)", "too large"),
}
BAD_FILES = {
    "no make": ("x = 1\n", "make(seed, split)"),
    "make is no function": ("make = 3\n", "make(seed, split)"),
    "make takes no split": ("def make(seed):\n    return 1\n", "TypeError"),
    "syntax error": ("def make(seed, split)\n    return 1\n", "SyntaxError"),
    "not Python at all": ("time,angle\n0.05,1.2\n", "NameError"),
    "null bytes": ("x = 1\0\n", "null bytes"),
    "fails at import": ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    "leaves at import": ("raise SystemExit('bye')\n", "bye"),
}


@pytest.mark.parametrize("fault", BAD_BODIES)
def test_bad_make_is_one_line_that_names_file_and_reason(refused, tmp_path, fault):
    """Whatever is wrong with what make() returns, of any seed and split, is said before anything trains."""
    body, reason = BAD_BODIES[fault]
    assert reason in refused(write(tmp_path, body))


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_file_is_one_line_that_names_file_and_reason(refused, tmp_path, fault):
    """A file that can't be loaded, or has no make(seed, split)."""
    text, reason = BAD_FILES[fault]
    (tmp_path / "own.py").write_text(text)
    assert reason in refused(tmp_path / "own.py")


@pytest.mark.parametrize("name", ["missing.py", "data.csv", "", "folder.py"])
def test_what_is_no_python_file_is_refused(refused, tmp_path, name):
    """A missing file, another kind of file and a folder are each one line."""
    (tmp_path / "data.csv").write_text("1,2,3\n")
    (tmp_path / "folder.py").mkdir()
    refused(tmp_path / name)


# A user's own data: how its file is used ------------------------------------------------------------------------------

LOGGED = """import os
with open(os.environ["CALLS"], "a") as log:
    log.write(f"{os.getpid()} {seed} {split}\\n")
return data(seed, split)"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The calls of make() so far, as (process, seed, split); in all processes."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return lambda: [tuple(line.split()) for line in (tmp_path / "calls").read_text().splitlines()]


def test_make_is_called_once_and_for_the_first_seed_twice(run, tmp_path, calls):
    """Reading may be slow: each seed and split is asked for once, also of more seeds than are kept in memory."""
    assert run(write(tmp_path, LOGGED), "--seeds", "5:24", "--h", "0.02", "0.08").status == 0
    found = [call[1:] for call in calls()]
    assert {call: found.count(call) for call in found} == {
        (str(seed), split): 2 if seed == 5 else 1 for seed in range(5, 24) for split in SHAPES
    }


def test_workers_call_make_once_and_give_the_same_report(run, tmp_path, calls):
    """A worker asks make() at most once a seed and split, and two workers give the bytes of one process."""
    path = write(tmp_path, LOGGED)
    alone = run(path, "--seeds", "4")
    first = set(calls())
    workers = run(path, "--seeds", "4", "--jobs", "2", out="workers")
    assert workers.report == alone.report
    theirs = [call for call in calls() if call not in first]  # what this process asks again is not of a worker
    assert theirs and len(theirs) == len(set(theirs))


NEIGHBOURS = {
    "helper.py": "from tabnanny import SHIFT\n",
    "tabnanny.py": "SHIFT = 1\n",  # the standard library has this name, too
    "pack/__init__.py": "",
    "pack/part.py": "SCALE = 2\n",
    "unused.py": "raise RuntimeError('nobody asked for it')\n",
}
IMPORTING = "import helper\nfrom pack import part\n" + HEAD
SHIFTED = "x, y = data(seed, split)\nreturn x, y if split == 'train' else 0 * y + helper.SHIFT * part.SCALE"
LAYER = """import torch
class Own(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.size = h * helper.SHIFT * part.SCALE
    def forward(self, tokens):
        return tokens + self.size * tokens.roll(1, 1)
"""


def furnish(folder, **changes):
    """Write track, idea and neighbours into a folder, some of these changed, and return the two options' values."""
    for name, text in NEIGHBOURS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(changes.get(Path(name).stem, text))
    (folder / "layer.py").write_text(IMPORTING + LAYER)
    return write(folder, SHIFTED, head=IMPORTING), f"{folder / 'layer.py'}:Own"


def stored(folder):
    """Return how many trainings a folder keeps."""
    return len(list((folder / bench.STORE).glob("*.npz")))


@pytest.mark.parametrize("which", ["track", "idea"])
def test_neighbours_are_imported_and_are_part_of_what_a_run_is(run, tmp_path, which, monkeypatch):
    """A file may import what lies beside it, each file its own `helper`; --resume trains anew where one has changed.

    The same files in another folder are the same; so are files of the folder that are not imported.
    """
    plain = write(tmp_path, PLAIN)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)

    def with_neighbours(name, **changes):
        before = list(sys.path)
        track, idea = furnish(tmp_path / name, **changes)
        done = run(track, "--resume") if which == "track" else run(plain, "--idea", idea, "--resume")
        assert done.status == 0, done.err
        assert sys.path == before and not list((tmp_path / name).rglob("__pycache__"))
        assert not sys.dont_write_bytecode
        return done

    one = with_neighbours("a")
    each = stored(one.folder)
    same = with_neighbours("b", unused="SHIFT = 99\n")
    assert stored(one.folder) == each and same.report == one.report
    own = each if which == "track" else each - 2  # a baseline does not depend on the idea's file
    changes = (
        {"helper": "from tabnanny import SHIFT  # new\n"},
        {"tabnanny": "SHIFT = 1.0\n"},
        {"part": "SCALE = 2.0\n"},
    )
    for times, changed in enumerate(changes):
        again = with_neighbours(f"c{times}", **changed)
        assert stored(one.folder) == each + (times + 1) * own
        assert again.report["idea"] == one.report["idea"]
    other, y = with_neighbours("d", tabnanny="SHIFT = 5\n"), as_numpy_has_it(0, "train")[1]
    if which == "track":
        for done, shift in ((one, 2), (other, 10)):
            floor = done.report["extensions"]["floors"]["predict_mean"]["per_seed"][0]
            assert floor == pytest.approx(((shift - y.mean()) / y.std()) ** 2, abs=1e-9)
    else:
        assert other.report["idea"]["per_seed"] != one.report["idea"]["per_seed"]
