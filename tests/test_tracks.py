"""Section 3, tracks: simulated data against an independent integration, and the checks of a user's own data."""

import dataclasses
import math

import numpy as np
import plain_loop
import pytest
import torch
from scipy.integrate import solve_ivp

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

SMALL = dataclasses.replace(bench.Config(), sizes=(12, 9, 7))
SPLITS = ("train", "test", "val")
STREAM = {"train": 0, "test": 1, "val": 2}


def on_track(track, config=SMALL):
    return dataclasses.replace(config, track=str(track))


def raw_tokens(data, split):
    """Undo the standardisation: tokens (sequences, time, channel) in physical units."""
    return data.tokens[split].numpy().transpose(2, 1, 0) * data.token_std + data.token_mean


def duffing_draws(seed, split, count):
    """Draw a split's coefficients and noise in the order of the specification (section 3)."""
    rng = np.random.default_rng([seed, STREAM[split]])
    names = {"alpha": (0.5, 1.5), "beta": (0.5, 1.5), "delta": (0.1, 0.4), "gamma": (0.2, 0.5), "omega": (0.8, 1.6)}
    names |= {"phi": (0, 2 * math.pi), "q0": (-1.5, 1.5), "v0": (-1, 1)}
    return {name: rng.uniform(*bounds, count) for name, bounds in names.items()}, rng.standard_normal((count, 33))


def integrate_duffing(p, times):
    """Integrate one trajectory alone by LSODA, another method than the product's, at the tightest tolerance."""

    def slope(t, y):
        force = p["gamma"] * math.cos(p["omega"] * t + p["phi"])
        return y[1], -p["delta"] * y[1] + p["alpha"] * y[0] - p["beta"] * y[0] ** 3 + force

    start = (p["q0"], p["v0"])
    return solve_ivp(slope, (0, times[-1]), start, "LSODA", t_eval=times, rtol=1e-12, atol=1e-13).y[0]


@pytest.mark.parametrize(("split", "index"), [("train", 0), ("test", 8), ("val", 3)])
@pytest.mark.parametrize("track", ["dynamics", "irregular"])
def test_a_trajectory_equals_an_independent_integration(track, split, index):
    """True positions of one oscillator, tokens and rollout, agree with LSODA alone to 1e-7."""
    data = bench.TRACKS[track](SMALL, 3, split)
    draws, noise = duffing_draws(3, split, SMALL.size(split))
    p = {name: values[index] for name, values in draws.items()}
    expected = integrate_duffing(p, data.times)
    samples = 97 if split == "test" else 34  # the others are not rolled out: 33 samples for the tokens, one target
    assert data.position.shape == (SMALL.size(split), samples)
    assert np.abs(data.position[index] - expected[:samples]).max() < 1e-7
    assert np.allclose(data.measured[index], data.position[index, :33] + 0.005 * noise[index], rtol=0, atol=1e-14)
    assert np.allclose(data.drive[index], p["gamma"] * np.cos(p["omega"] * data.times + p["phi"]), rtol=0, atol=1e-14)


def test_dynamics_equals_the_plain_loop_at_full_size():
    """Every standardised token and target of a seed equals the oracle's."""
    data, (expected, _, scales) = bench.build_dataset(bench.Config(), 5), plain_loop.make_data(5)
    for split in SPLITS:
        tokens, targets = expected[split]
        assert torch.allclose(data.tokens[split].permute(2, 1, 0), tokens, rtol=0, atol=1e-10)
        assert torch.allclose(data.targets[split], targets, rtol=0, atol=1e-10)
    ours = np.hstack((data.token_mean, data.token_std, data.target_mean, data.target_std))
    assert np.allclose(ours, np.hstack(scales), rtol=1e-10)


@pytest.mark.parametrize("track", bench.TRACKS)
def test_shapes(track):
    """32 tokens of 3 channels and one target a sequence, in the sizes of the three splits."""
    data = bench.build_dataset(on_track(track), 0)
    for split, size in zip(SPLITS, (12, 9, 7), strict=True):
        assert data.tokens[split].shape == (3, 32, size)
        assert data.targets[split].shape == (size,)
    config = bench.Config()
    assert [config.size(split) for split in SPLITS] == [512, 1024, 256]


@pytest.mark.parametrize("track", bench.TRACKS)
def test_same_seed_same_bytes(track):
    """A seed's data is a pure function of the seed, and another seed has other data."""
    one, other = (bench.build_dataset(on_track(track), seed) for seed in (1, 0))
    two = bench.build_dataset.__wrapped__(on_track(track), 1)  # past the cache, or `one` is compared with itself
    assert one is not two
    for split in SPLITS:
        assert one.tokens[split].numpy().tobytes() == two.tokens[split].numpy().tobytes()
        assert one.targets[split].numpy().tobytes() == two.targets[split].numpy().tobytes()
        assert not torch.equal(one.tokens[split], other.tokens[split])


@pytest.mark.parametrize("track", bench.TRACKS)
def test_splits_do_not_overlap(track):
    """No sequence and no target is in two splits, nor in two seeds, nor twice in one."""
    sets = [bench.build_dataset(on_track(track), seed) for seed in (0, 1)]
    rows = [raw_tokens(data, split)[:, :, 0].round(6) for data in sets for split in SPLITS]
    targets = [
        np.round(data.targets[split].numpy() * data.target_std + data.target_mean, 9)
        for data in sets
        for split in SPLITS
    ]
    assert len(np.unique(np.concatenate(rows), axis=0)) == 2 * (12 + 9 + 7)
    assert len(np.unique(np.concatenate(targets))) == 2 * (12 + 9 + 7)


@pytest.mark.parametrize("track", bench.TRACKS)
def test_standardised_by_the_training_split_alone(track):
    """The training split has mean 0 and population std 1; the others have the same scale but not exactly that."""
    data = bench.build_dataset(on_track(track), 0)
    x, y = data.tokens["train"].numpy(), data.targets["train"].numpy()
    assert np.allclose(x.mean((1, 2)), 0, atol=1e-12) and np.allclose(x.std((1, 2)), 1, atol=1e-12)
    assert abs(y.mean()) < 1e-12 and abs(y.std() - 1) < 1e-12
    for split in ("test", "val"):
        assert np.abs(data.tokens[split].numpy().mean((1, 2))).max() > 1e-6
        true = bench.TRACKS[track](SMALL, 0, split)
        ours = data.targets[split].numpy() * data.target_std + data.target_mean
        assert np.allclose(ours, true.position[:, true.window], rtol=0, atol=1e-12)


# Lorenz ---------------------------------------------------------------------------------------------------------------


def test_lorenz_equals_an_independent_integration():
    """One trajectory of Lorenz-63 from its own start agrees with LSODA alone; e^(0.9 t) leaves 1e-7 of the error."""
    data, rng = bench.lorenz(SMALL, 2, "test"), np.random.default_rng([2, 1])
    start = [rng.uniform(low, high, 9)[4] for low, high in ((-15, 15), (-15, 15), (10, 40))]

    def slope(_, s):
        return 10 * (s[1] - s[0]), s[0] * (28 - s[2]) - s[1], s[0] * s[1] - 8 / 3 * s[2]

    times = data.times[:35]
    expected = solve_ivp(slope, (0, times[-1]), start, "LSODA", t_eval=times, rtol=1e-12, atol=1e-12).y[0]
    assert np.abs(data.position[4, :35] - expected).max() < 1e-6
    assert data.drive is None


def test_lorenz_tokens_are_derivative_coordinates():
    """Channels are x and its first and second backward differences over the step, ending right before the target."""
    data, true = bench.build_dataset(on_track("lorenz"), 0), bench.lorenz(SMALL, 0, "val")
    x, dt, tokens = true.position, true.times[1] - true.times[0], raw_tokens(data, "val")
    assert np.allclose(tokens[..., 0], x[:, 2:34])
    assert np.allclose(tokens[..., 1], (x[:, 2:34] - x[:, 1:33]) / dt)
    assert np.allclose(tokens[..., 2], (x[:, 2:34] - 2 * x[:, 1:33] + x[:, :32]) / dt**2)
    assert true.window == 34


def test_lorenz_next_step_is_not_trivial():
    """Repeating the last value, a line and a parabola through the last points all err by over 10 % of the std."""
    x = bench.lorenz(dataclasses.replace(SMALL, sizes=(300, 1, 1)), 0, "train").position
    last, target = x[:, 31:34], x[:, 34]
    guesses = {
        "persistence": last @ [0, 0, 1],
        "line": last @ [0, -1, 2],
        "parabola": last @ [1, -3, 3],
    }
    errors = {name: float(np.sqrt(np.mean((guess - target) ** 2)) / target.std()) for name, guess in guesses.items()}
    assert min(errors.values()) > 0.1, errors
    assert errors["persistence"] > 0.2, errors


def test_lorenz_is_on_the_attractor():
    """x has the attractor's known spread, 7.9, zero mean by its symmetry, and visits both wings."""
    x = bench.lorenz(dataclasses.replace(SMALL, sizes=(300, 1, 1)), 0, "train").position
    assert 7.4 < x.std() < 8.4
    assert abs(x.mean()) < 1
    assert np.abs(x).max() < 21


# Irregular clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_clock_jitters_by_up_to_a_fifth_of_a_step(seed):
    """Each sample is early or late by at most 0.2 steps, and some by nearly as much; time goes forward."""
    times = bench.jittered_times(SMALL, seed)
    jitter = times / 0.15 - np.arange(97)
    assert times[0] == 0
    assert 0.15 < np.abs(jitter).max() <= 0.2 + 1e-12
    assert jitter.min() < -0.1 < 0.1 < jitter.max()
    assert np.diff(times).min() >= 0.6 * 0.15 - 1e-12


def test_one_clock_a_seed_shared_by_its_splits():
    """The three splits of a seed are sampled at the same times, and two seeds at different ones."""
    first = [bench.irregular(SMALL, 0, split).times for split in SPLITS]
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])
    assert not np.allclose(first[0], bench.irregular(SMALL, 1, "train").times, atol=1e-3)


def test_irregular_velocity_uses_the_true_interval():
    """Velocity is the backward difference over the interval that passed, and the drive is that of the true time."""
    data, true = bench.build_dataset(on_track("irregular"), 4), bench.irregular(SMALL, 4, "val")
    tokens, gaps = raw_tokens(data, "val"), np.diff(true.times[:33])
    assert gaps.std() > 0.01
    assert np.allclose(tokens[..., 1], np.diff(true.measured) / gaps)
    assert np.allclose(tokens[..., 0], true.measured[:, 1:])
    assert np.allclose(tokens[..., 2], true.drive[:, 1:33])


def test_clock_angles_are_the_tokens_times_on_one_turn():
    """Token i of the window is at 2 pi (t_i - t_0) / (32 steps); a rolled-out window moves along the clock."""
    config, times = on_track("irregular"), bench.jittered_times(SMALL, 0)
    for start in (0, 1, 63):
        window = times[1 + start : 33 + start]
        expected = 2 * math.pi * (window - window[0]) / 4.8
        assert np.allclose(bench.clock_angles(config, 0, start), expected, rtol=0, atol=1e-12)
    assert bench.clock_angles(SMALL, 0) is None


# A user's own data ----------------------------------------------------------------------------------------------------

GOOD = """import numpy as np
def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.normal(size=(20, {length}, {channels}))
    return tokens, tokens[:, -1, 0] * 3 + 5
"""


def write(folder, text, name="own.py"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("length", "channels"), [(2, 1), (2, 4), (3, 2), (9, 1), (40, 6)])
def test_custom_track_of_any_length_and_channels_trains(tmp_path, length, channels):
    """A user's data of any T >= 2 and C >= 1 trains both models and scores them."""
    path = write(tmp_path, GOOD.format(length=length, channels=channels))
    config = dataclasses.replace(on_track(path), epochs=1)
    assert bench.check_track(config) == (channels, length)
    for h in (None, (0.08,), (0.02, 0.3)):
        (record,) = bench.complete(config, bench.Stack((bench.Run(0, 0.003, h),), frozenset())).values()
        assert record.score > 0 and record.validation > 0
    data = bench.build_dataset(config, 0)
    assert data.trajectories is None
    assert torch.allclose(data.targets["train"].mean(), torch.tensor(0.0, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 2.0, 0.1, 1 / 3, -7.3, 1e6 + 0.1])
def test_constant_channel_becomes_zeros(tmp_path, value):
    """A channel that never changes says nothing: zeros, not rounding errors divided by each other.

    0.1 is the hard case: the mean of many 0.1s is off by a rounding, so their std is 1e-16 and not 0.
    """
    change = f"    tokens[..., 1] = {value!r}\n    return"
    path = write(tmp_path, GOOD.format(length=5, channels=2).replace("    return", change))
    data = bench.build_dataset(on_track(path), 0)
    for split in data.tokens:
        assert data.tokens[split][1].abs().max() < 1e-9
    assert data.tokens["train"][0].std(correction=0) == pytest.approx(1)


def test_custom_track_takes_lists_and_other_number_types(tmp_path):
    """Nested lists and float32 or integer arrays are as good as float64 arrays."""
    text = """import numpy as np
def make(seed, split):
    if split == "test":
        return [[[1], [2]], [[3], [4]]], [1, 2]
    return np.arange(6, dtype=np.int32).reshape(3, 2, 1), np.arange(3, dtype=np.float32)
"""
    path = str(write(tmp_path, text))
    for split, count in (("train", 3), ("test", 2)):
        tokens, targets = bench.custom_split(path, 0, split)
        assert tokens.shape == (count, 2, 1) and tokens.dtype == targets.dtype == np.float64


MAKE = "import numpy as np\ndef make(seed, split):\n    return "
BAD_FILES = {
    "no make": ("x = 1\n", "make(seed, split)"),
    "make is no function": ("make = 3\n", "make(seed, split)"),
    "syntax error": ("def make(seed, split)\n    return 1\n", "SyntaxError"),
    "fails at import": ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    "leaves at import": ("raise SystemExit('bye')\n", "bye"),
    "make raises": ("def make(seed, split):\n    raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    "make leaves": ("import sys\ndef make(seed, split):\n    sys.exit(3)\n", "SystemExit"),
    "make takes no split": ("def make(seed):\n    return 1\n", "TypeError"),
    "returns None": (MAKE + "None\n", "tokens (N, T, C)"),
    "returns one array": (MAKE + "np.zeros((4, 3, 2))\n", "tokens (N, T, C)"),
    "returns words": (MAKE + "[[['a']]], ['b']\n", "ValueError"),
    "ragged tokens": (MAKE + "[[[1], [2]], [[3]]], [1, 2]\n", "ValueError"),
    "two axes": (MAKE + "(np.ones((4, 3)), np.ones(4))\n", "(4, 3)"),
    "no sequences": (MAKE + "(np.ones((0, 3, 1)), np.ones(0))\n", "(0, 3, 1)"),
    "one token": (MAKE + "(np.ones((4, 1, 2)), np.ones(4))\n", "(4, 1, 2)"),
    "no channels": (MAKE + "(np.ones((4, 3, 0)), np.ones(4))\n", "(4, 3, 0)"),
    "targets too short": (MAKE + "(np.ones((4, 3, 2)), np.ones(3))\n", "(3,)"),
    "targets with two axes": (MAKE + "(np.ones((4, 3, 2)), np.ones((4, 1)))\n", "(4, 1)"),
    "NaN in tokens": (MAKE + "(np.full((4, 3, 2), np.nan), np.ones(4))\n", "tokens hold NaN"),
    "infinite target": (MAKE + "(np.ones((2, 3, 2)), np.array([1, np.inf]))\n", "targets hold NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_custom_file_gives_one_line_that_names_it(tmp_path, case):
    """Whatever is wrong with a user's file is one line that names the file and the reason."""
    text, reason = BAD_FILES[case]
    path = write(tmp_path, text)
    with pytest.raises(bench.UsageError) as caught:
        bench.custom_split(str(path), 0, "train")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["missing.py", "data.csv", ""])
def test_custom_track_that_is_no_python_file_gives_one_line(tmp_path, name):
    """A missing file, another kind of file and a folder are each one line."""
    if name == "data.csv":
        write(tmp_path, "1,2,3\n", name)
    with pytest.raises(bench.UsageError) as caught:
        bench.custom_split(str(tmp_path / name), 0, "train")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("(5, 4, 2) if split == 'val' else (5, 3, 2)", "'val'"),
        ("(5, 3, 2) if split == 'test' else (5, 3, 1)", "'test'"),
        ("(5 + seed, 3, 1)", "make(1,"),
        ("(5, 3 + seed, 1)", "make(1,"),
    ],
)
def test_custom_splits_and_seeds_must_fit_together(tmp_path, shape, reason):
    """Splits and seeds of different T or C, or seeds of different sizes, are named before anything trains."""
    text = f"import numpy as np\ndef make(seed, split):\n    x = np.random.rand(*{shape})\n    return x, x[:, 0, 0]\n"
    with pytest.raises(bench.UsageError) as caught:
        bench.check_track(on_track(write(tmp_path, text)))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_custom_targets_that_are_all_equal_are_refused(tmp_path):
    """A constant training target has nothing to learn, and is said so in one line."""
    path = write(tmp_path, MAKE + "(np.ones((4, 3, 1)), np.full(4, 0.1))\n")
    with pytest.raises(bench.UsageError, match="all equal"):
        bench.check_track(on_track(path))


@pytest.mark.parametrize("scale", ["x * 1e200, x[:, 0, 0]", "x, x[:, 0, 0] * 1e200"])
def test_custom_data_too_large_to_standardise_is_refused(tmp_path, scale):
    """Finite numbers whose squares are not have no usable std: one line, not a score on data that became zeros."""
    text = f"import numpy as np\ndef make(seed, split):\n    x = np.random.rand(9, 3, 1)\n    return {scale}\n"
    with pytest.raises(bench.UsageError):
        bench.check_track(on_track(write(tmp_path, text)))


def test_custom_file_may_define_dataclasses(tmp_path):
    """An ordinary Python file loads: dataclasses with postponed annotations look their module up by name."""
    head = "from __future__ import annotations\nimport dataclasses\n"
    head += "@dataclasses.dataclass\nclass Shape:\n    length: int = 3\n"
    path = write(tmp_path, head + MAKE + "(np.ones((4, Shape().length, 1)), np.arange(4.0))\n")
    assert bench.custom_split(str(path), 0, "train")[0].shape == (4, 3, 1)
