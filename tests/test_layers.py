"""Section 4, layers: the kinetic operator against closed forms and the plain loop, and users' layers.

Each layer of `user_layers.py` trains as in a plain PyTorch loop (`layer_loop.py`), or is refused with the reason."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import layer_loop
import numpy as np
import plain_loop
import pytest
import torch
import user_layers

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

STEPS = (0.0, 0.02, 0.08, 0.5)
IRREGULAR = bench.Config(track="irregular")
SCRIPT = Path(bench.__file__).resolve()
LAYERS = Path(user_layers.__file__).resolve()


def noise(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)


def regular(length):
    """Return the angles of tokens at equal distances."""
    return 2 * np.pi * np.arange(length) / length


def wobbling(length):
    """Return the angles of tokens that are up to a fifth of a step away from those, the first one's 0."""
    angles = 2 * np.pi * (np.arange(length) + np.random.default_rng(0).uniform(-0.2, 0.2, length)) / length
    return angles - angles[0]


def layer(channels, length, h, angles=None, dtype=torch.float64):
    """Build the kinetic layer of one run, its weights drawn by PyTorch."""
    torch.manual_seed(7)
    with bench.computing(bench.Config(dtype=str(dtype).removeprefix("torch."))):
        made = bench.KineticLayer(channels, length, h)
        if angles is not None:
            made.place(angles)
    return made


# Diffusion ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", STEPS)
@pytest.mark.parametrize("length", [2, 3, 5, 8, 32, 33])
def test_diffusion_multiplies_every_pure_wave(length, h):
    """Each pure wave becomes exp(-h k^2) times itself, to 1e-12: every k, cosine and sine, even and odd lengths."""
    matrix = bench.diffusion_matrix(length, h)
    assert matrix.shape == (length, length)
    for k in range(length // 2 + 1):
        for wave in (np.cos(k * regular(length)), np.sin(k * regular(length))):
            assert np.abs(matrix @ wave - math.exp(-h * k * k) * wave).max() < 1e-12


@pytest.mark.parametrize("length", [2, 3, 8, 31, 32, 33])
def test_least_squares_on_a_regular_clock_equals_the_fft(length):
    """At equal distances trigonometric least squares is the FFT's operator, to 1e-10."""
    for h in STEPS:
        fitted = bench.diffusion_matrix(length, h, regular(length))
        assert np.abs(fitted - bench.diffusion_matrix(length, h)).max() < 1e-10


@pytest.mark.parametrize("length", [2, 5, 32])
def test_diffusion_on_an_uneven_clock_is_a_least_squares_fit(length):
    """The matrix equals NumPy's least squares on as many cosines and sines as tokens, done by hand."""
    angles, tokens, h = wobbling(length), noise(length, 3), 0.08
    modes = np.concatenate((np.arange(length // 2 + 1), np.arange(1, (length + 1) // 2)))
    count = length // 2 + 1
    basis = np.column_stack([(np.cos if i < count else np.sin)(k * angles) for i, k in enumerate(modes)])
    assert basis.shape == (length, length)
    fit = np.linalg.lstsq(basis, tokens, rcond=None)[0]
    expected = basis @ (np.exp(-h * modes**2)[:, None] * fit)
    assert np.abs(bench.diffusion_matrix(length, h, angles) @ tokens - expected).max() < 1e-9


@pytest.mark.parametrize("start", [0, 17, 63])
def test_diffusion_on_jittered_clocks_attenuates_low_waves(start):
    """A wave sampled at jittered times shrinks by exp(-h k^2), within 1 % for k <= 4, whatever seed and window."""
    for seed in range(8):
        angles = bench.token_angles(IRREGULAR, seed, start)
        for h in (0.02, 0.08, 0.3):
            matrix = bench.diffusion_matrix(32, h, angles)
            for k in range(5):
                for wave in (np.cos(k * angles), np.sin(k * angles)):
                    assert np.abs(matrix @ wave - math.exp(-h * k * k) * wave).max() < 0.01 * math.exp(-h * k * k)


def test_jittered_clock_matters():
    """The FFT's operator, which takes the clock for regular, misses what least squares keeps, by more than 5 %."""
    k, h = 4, 0.3
    for seed in range(4):
        wave = np.cos(k * bench.token_angles(IRREGULAR, seed))
        error = np.abs(bench.diffusion_matrix(32, h) @ wave - math.exp(-h * k * k) * wave).max()
        assert error > 0.05 * math.exp(-h * k * k)


def test_jittered_clocks_are_well_conditioned():
    """As many waves as tokens fit any clock: hardly diffused tokens come back, and no sensor's noise is blown up."""
    for seed in range(25):
        angles = bench.token_angles(IRREGULAR, seed)
        assert np.abs(bench.diffusion_matrix(32, 1e-15, angles) - np.eye(32)).max() < 1e-10
        assert np.linalg.norm(bench.diffusion_matrix(32, 0.08, angles), 2) < 2


# Transport ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [3, 5, 7])
def test_transport_moves_an_impulse_by_h_x(channels):
    """The first Fourier coefficient of an impulse at token x turns by 2 pi h x / C, for every token and step size."""
    for h in STEPS:
        moved = bench.transport_matrix(32, channels, h)[:, :, 0]  # (token, channel) of an impulse in channel 0
        expected = np.exp(-2j * np.pi * h * np.arange(32) / channels)
        assert np.abs(np.fft.fft(moved, axis=1)[:, 1] - expected).max() < 1e-12


def test_transport_displaces_token_16_by_1_28():
    """At h = 0.08 the impulse at token 16 of 3 channels moves by 1.28, the reference's predicted displacement."""
    moved = bench.transport_matrix(32, 3, 0.08)[16, :, 0]
    assert -3 / (2 * np.pi) * np.angle(np.fft.fft(moved)[1]) == pytest.approx(1.28, abs=1e-12)


@pytest.mark.parametrize("channels", [1, 3, 5, 9])
def test_transport_keeps_energy(channels):
    """A circular shift of odd length is unitary, token by token."""
    for h in STEPS:
        matrix = bench.transport_matrix(32, channels, h)
        assert np.abs(matrix.transpose(0, 2, 1) @ matrix - np.eye(channels)).max() < 1e-12


@pytest.mark.parametrize("channels", [2, 4, 6])
def test_transport_of_even_channels_keeps_energy_but_for_the_highest_mode(channels):
    """The highest mode of an even length has no sine to turn into: its amplitude becomes cos(pi h x) of itself."""
    tokens = noise(32, channels)
    before = np.fft.fft(tokens, axis=1)
    for h in STEPS:
        after = np.fft.fft(np.einsum("xdc,xc->xd", bench.transport_matrix(32, channels, h), tokens), axis=1)
        turn = np.cos(np.pi * h * np.arange(32))
        assert np.allclose(after[:, channels // 2], before[:, channels // 2] * turn, rtol=0, atol=1e-12)
        rest = [mode for mode in range(channels) if mode != channels // 2]
        assert np.allclose(np.abs(after[:, rest]), np.abs(before[:, rest]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("signal", "shift", "expected"),
    [
        ([0, 1, 2, 3, 4], 1, [4, 0, 1, 2, 3]),
        ([0, 0, 1, 0], 0.5, [-0.1035533906, -0.1035533906, 0.6035533906, 0.6035533906]),
        ([3, 1], 1, [1, 3]),
        ([7], 0.3, [7]),
    ],
)
def test_known_fractional_circular_shifts(signal, shift, expected):
    """Token 1 is shifted by h, towards higher channels; token 0 stays: whole and half steps of known signals."""
    matrix = bench.transport_matrix(2, len(signal), shift)
    assert matrix.dtype == np.float64
    assert np.allclose(matrix[1] @ signal, expected, rtol=0, atol=1e-10)
    assert np.allclose(matrix[0] @ signal, signal, rtol=0, atol=1e-15)


# The kinetic layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [None, wobbling])
@pytest.mark.parametrize(("length", "channels"), [(2, 1), (3, 2), (7, 3), (32, 3), (33, 4)])
def test_operator_equals_the_plain_loop(length, channels, clock):
    """Diffusion, then transport, which do not commute, equals the oracle's FFTs (on an uneven clock its inverse)."""
    u, angles = torch.from_numpy(noise(6, length, channels)), None if clock is None else clock(length)
    for h in STEPS:
        found = layer(channels, length, h, angles).operator(u)
        assert (found - plain_loop.kolmogorov(u, h, angles)).abs().max() < 1e-11


@pytest.mark.parametrize("clock", [None, wobbling])
@pytest.mark.parametrize(("length", "channels"), [(2, 1), (7, 3), (32, 3), (33, 4)])
def test_layer_equals_the_formula(length, channels, clock):
    """W_m ((1 - g) u + g K(u)) + b_m with g = sigmoid(W_g u + b_g), in values and in every gradient."""
    u, angles = torch.from_numpy(noise(5, length, channels)).requires_grad_(), None if clock is None else clock(length)
    for h in STEPS:
        own, plain = layer(channels, length, h, angles), plain_loop.Kinetic(h, channels, "built-in").double()
        plain.gate.load_state_dict(own.gate.state_dict())
        plain.mix.load_state_dict(own.mix.state_dict())
        found, expected = own(u), plain(u, angles)
        assert (found - expected).abs().max() < 1e-12
        pull = torch.from_numpy(noise(5, length, channels, seed=2))
        wanted = [(*part.gate.parameters(), *part.mix.parameters()) for part in (own, plain)]
        ours, theirs = (
            torch.autograd.grad((a * pull).sum(), [u, *p]) for a, p in zip((found, expected), wanted, strict=True)
        )
        assert all((a - b).abs().max() < 1e-11 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("clock", [None, wobbling])
@pytest.mark.parametrize(("length", "channels"), [(2, 1), (5, 2), (7, 3), (32, 3), (33, 4)])
def test_no_step_is_the_identity_to_the_bit(length, channels, clock):
    """At h = 0 K(u) is u, the layer its channel mix alone, and the gate's gradient 0: exactly, not to rounding."""
    u, own = torch.from_numpy(noise(6, length, channels)), layer(channels, length, 0.0)
    if clock:
        own.place(clock(length))
    assert np.array_equal(bench.transport_matrix(length, channels, 0.0), np.eye(channels)[None].repeat(length, 0))
    assert torch.equal(own.operator(u), u)
    with torch.no_grad():
        assert torch.equal(own(u), own.mix(u))
        own.gate.bias.fill_(2.5)
        assert torch.equal(own(u), own.mix(u))
    own(u).pow(3).sum().backward()
    assert (own.gate.weight.grad == 0).all() and (own.gate.bias.grad == 0).all()
    assert (own.mix.weight.grad != 0).all() and (own.mix.bias.grad != 0).all()


def test_gate_chooses_between_tokens_and_operator():
    """A closed gate passes the tokens themselves, an open one K(u); the channel mix has the last word on both."""
    u, own = torch.from_numpy(noise(4, 32, 3)), layer(3, 32, 0.08)
    with torch.no_grad():
        for bias, chosen in ((-1e3, u), (1e3, plain_loop.kolmogorov(u, 0.08))):
            own.gate.bias.fill_(bias)
            assert (own(u) - (chosen @ own.mix.weight.T + own.mix.bias)).abs().max() < 1e-12


def test_gate_starts_nearly_closed():
    """The gate's bias starts at -2.5, a gate of 1 / (1 + e^2.5) at zero tokens, however the layer is initialised."""
    own = layer(3, 32, 0.08)
    assert own.gate.bias.tolist() == [-2.5] * 3
    own.draw(np.random.default_rng(0))
    assert own.gate.bias.tolist() == [-2.5] * 3


def test_draw_takes_gate_then_mix_from_the_stream():
    """Weights are uniform between +-1 / sqrt(C), in the order gate weight, gate bias, mix weight, mix bias."""
    own, rng = layer(5, 32, 0.08), np.random.default_rng(3)
    own.draw(np.random.default_rng(3))
    drawn = [rng.uniform(-1 / math.sqrt(5), 1 / math.sqrt(5), shape) for shape in ((5, 5), 5, (5, 5), 5)]
    for parameter, values in zip((own.gate.weight, None, own.mix.weight, own.mix.bias), drawn, strict=True):
        assert parameter is None or np.array_equal(parameter.detach(), values)  # the gate's bias is set afterwards


@pytest.mark.parametrize(("channels", "count"), [(1, 4), (2, 12), (3, 24), (5, 60)])
def test_layer_has_a_gate_and_a_mix(channels, count):
    """C^2 + C parameters each, 24 for three channels as in the reference; the operator has none."""
    assert sum(parameter.numel() for parameter in layer(channels, 32, 0.08).parameters()) == count


@pytest.mark.parametrize("length", [2, 5, 7, 32, 33])
def test_layer_keeps_shape_and_dtype(length):
    """Odd lengths stay odd, where an inverse transform without its length would lose a token; float32 stays float32."""
    for dtype in (torch.float32, torch.float64):
        own, u = layer(2, length, 0.3, dtype=dtype), torch.from_numpy(noise(4, length, 2)).to(dtype)
        for out in (own(u), own.operator(u)):
            assert out.shape == u.shape and out.dtype == dtype
        assert (own.operator(u).double() - plain_loop.kolmogorov(u.double(), 0.3)).abs().max() < 1e-5


def test_layer_predicts_what_it_will_show():
    """Its signature predicts exp(-9 h) and h * 16; 0.4867523 and 1.28 at h = 0.08, as in the reference."""
    found = layer(3, 32, 0.08).signature(torch.from_numpy(noise(4, 32, 3)))
    assert found["predicted_fourier_attenuation"] == pytest.approx(0.4867523, abs=5e-8)
    assert found["predicted_transport_displacement"] == pytest.approx(1.28, abs=1e-12)
    assert set(found) == {f"{a}_{b}" for a in ("predicted", "observed")
                          for b in ("fourier_attenuation", "transport_displacement")}  # fmt: skip


def test_layer_is_an_ordinary_module():
    """In a plain PyTorch loop it learns another such layer's map, and its weights travel by state_dict."""
    teacher, student, u = layer(3, 16, 0.08), layer(3, 16, 0.08), torch.from_numpy(noise(64, 16, 3))
    teacher.draw(np.random.default_rng(1))
    optimizer, wanted = torch.optim.Adam(student.parameters(), lr=0.05), teacher(u).detach()
    for _ in range(150):
        optimizer.zero_grad()
        loss = (student(u) - wanted).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3 * (layer(3, 16, 0.08)(u) - wanted).square().mean()
    student.load_state_dict(teacher.state_dict())
    assert torch.equal(student(u), wanted)


# Building users' layers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def track(tmp_path_factory):
    """The path of a track of a few random sequences: 22 in each split, 9 tokens, 3 channels."""
    return layer_loop.write_track(tmp_path_factory.mktemp("track"))


def idea(name):
    return f"{LAYERS}:{name}"


def test_users_layer_is_initialised_by_the_runs_seed(track):
    """It is what its author's code makes under torch.manual_seed(seed), in the run's dtype; torch is left as it was."""
    torch.manual_seed(123)
    before = torch.get_rng_state()
    for dtype in (torch.float64, torch.float32):
        config = bench.Config(idea=idea("Stepping"), track=track, dtype=str(dtype).removeprefix("torch."))
        for seed in (3, 8):
            first, second = bench.build_layers(config, bench.Run(seed, 0.003, (0.5, 0.25)), 3, 9)
            assert (first.h, second.h) == (0.5, 0.25)
            assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                expected = [torch.nn.Linear(3, 3, dtype=dtype) for _ in range(2)]
            for own, plain in zip((first.mix, second.mix), expected, strict=True):
                assert torch.equal(own.weight, plain.weight) and torch.equal(own.bias, plain.bias)
    assert bench.build_layers(config, bench.Run(3, 0.003, None), 3, 9) == []


def test_a_pair_shares_gru_and_readout_whatever_the_layer(track):
    """The raw model's weights are the first ones of the model behind a user's layer, bit for bit."""
    config, runs = bench.Config(idea=idea("Recurrent"), track=track), [bench.Run(s, 0.003, None) for s in (3, 8)]
    with bench.computing(config):
        raw, mixed = (bench.Model(config, [bench.Run(run.seed, 0.003, h) for run in runs]) for h in (None, (0.1,)))
    assert all(torch.equal(a, b) for a, b in zip(raw.core, mixed.core, strict=True))


# Users' layers that train ---------------------------------------------------------------------------------------------

RUNS = [bench.Run(0, 0.003, (0.5, 0.25)), bench.Run(5, 0.02, (0.5, 0.25)), bench.Run(0, 0.006, (0.3, 0.0))]


def train(name, track, runs, **options):
    """Train runs side by side, 2 epochs in batches of 8, 8 and 6; returns the training and its records."""
    config = bench.Config(idea=idea(name), track=track, epochs=2, batch=8, **options)
    with bench.computing(config):
        training = bench.Training(bench.Model(config, runs))
        assert list(training.run()) == [1, 2]
        return training, bench.records(training)


def train_alone(name, track, run, dtype=torch.float64):
    """Do the same with one run in PyTorch's plain loop."""
    data = layer_loop.make_data(track, run.seed, dtype)
    return layer_loop.train(getattr(user_layers, name), run.seed, run.lr, run.h, data, 2, 8)


@pytest.mark.parametrize("name", [each.__name__ for each in user_layers.ALLOWED])
def test_users_layer_trains_as_in_a_plain_loop(name, track):
    """Two layers deep, three runs side by side, each as torch.nn.GRU behind the layers with torch.optim.Adam and
    clip_grad_norm_: scores and learning curve to 1e-12, parameters to 1e-10 (a gradient that should be 0, as that of
    attention's key bias, is rounding, and Adam enlarges it), buffers to the bit."""
    training, records = train(name, track, RUNS)
    for i, run in enumerate(RUNS):
        alone = train_alone(name, track, run)
        own = [*(weight[i] for weight in training.model.core)]
        own += [p for module in training.model.layers[i] for p in module.parameters() if p.requires_grad]
        for ours, theirs in zip(own, alone.parameters(), strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert (ours - theirs).abs().max() < 1e-10
        for ours, theirs in zip(training.model.layers[i], alone.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
        assert records[i].score == pytest.approx(alone.test, rel=1e-12)
        assert records[i].validation == pytest.approx(alone.validation, rel=1e-12)
        assert records[i].state.curve == pytest.approx(alone.curve, rel=1e-12)
        assert records[i].parameters == sum(p.numel() * (1 + p.is_complex()) for p in alone.parameters())


@pytest.mark.parametrize("name", [each.__name__ for each in user_layers.ALLOWED])
def test_users_layer_trains_in_float32(name, track):
    """The narrower dtype throughout, to nearly the plain loop's scores in it."""
    training, records = train(name, track, RUNS[:1], dtype="float32")
    assert {p.dtype for module in training.model.layers[0] for p in module.parameters()} <= {
        torch.float32,
        torch.complex64,
    }
    for run, record in zip(RUNS[:1], records, strict=True):
        assert record.state.weights.dtype == np.float32
        assert record.score == pytest.approx(train_alone(name, track, run, torch.float32).test, rel=1e-4)


def benchmark(name, track, folder, *words):
    """Run the command in this process on a user's layer; returns its exit status."""
    options = ["--track", track, "--batch", "8", "--epochs", "2", "--jobs", "1", "--quiet", "--out-dir", folder, *words]
    return bench.main([str(word) for word in ("--idea", idea(name), *options)])


SHORT = ("--seeds", 2, "--sweep-seeds", 1, "--lrs", 0.006)


@pytest.mark.parametrize("name", [each.__name__ for each in user_layers.ALLOWED])
def test_command_takes_the_layer(name, track, tmp_path, capfd):
    """The whole command: quiet, both models' printed scores are the plain loop's; and the placebo is trained just where
    the layer depends on h, elsewhere it is a reason alone."""
    torch.compiler.reset()  # as in a process of its own: the compiler's log tells of what was compiled too often
    assert benchmark(name, track, tmp_path, *SHORT) == 0
    assert capfd.readouterr().err == ""
    report, layer_class = json.loads((tmp_path / bench.REPORT).read_text(encoding="utf-8")), getattr(user_layers, name)
    data = [layer_loop.make_data(track, seed) for seed in (0, 1)]
    arms = {"raw": ((), report["baseline"]["full"]), "idea": ((0.08,), report["idea"])}
    placebo, depends = report["extensions"]["placebo"], layer_class in user_layers.DEPENDS_ON_H
    if depends:
        arms["placebo"] = ((0.0,), placebo["full"])
    for arm, (h, block) in arms.items():
        alone = [layer_loop.train(layer_class, seed, 0.006, h, data[seed], 2, 8) for seed in (0, 1)]
        assert block["per_seed"] == [round(one.test, 10) for one in alone], arm
    assert depends or (list(placebo) == ["reason"] and "does not depend on h" in placebo["reason"])
    assert len(list(tmp_path.glob(".stage2_runs/*.npz"))) == 2 * len(arms)


def test_placebo_of_h_0_alone_is_a_reason(track, tmp_path, capfd):
    """Where the idea's only step is 0 it is its own placebo: nothing more is trained, and the report says why."""
    assert benchmark("Stepping", track, tmp_path, *SHORT, "--h", 0) == 0
    placebo = json.loads((tmp_path / bench.REPORT).read_text(encoding="utf-8"))["extensions"]["placebo"]
    assert list(placebo) == ["reason"] and "h = 0" in placebo["reason"]
    assert len(list(tmp_path.glob(".stage2_runs/*.npz"))) == 4


def test_nothing_speaks_of_a_step_that_the_layer_does_not_take(track, tmp_path, capfd):
    """Without a placebo neither the log nor the answer's sentences compare with one that was trained."""
    assert benchmark("Square", track, tmp_path, *SHORT) == 0
    report = json.loads((tmp_path / bench.REPORT).read_text(encoding="utf-8"))
    assert report["extensions"]["knockout"] is None or report["extensions"]["knockout"]["mean"] is None
    assert {row["placebo"] for row in report["extensions"]["learning_curve"]} == {None}
    assert report["extensions"]["still_learning"]["placebo"] is None
    sentences = [*bench.limitations(report, bench.Config()), bench.verdict_sentence(report, bench.Config())]
    assert not any("step h" in sentence or "h = 0" in sentence for sentence in sentences)


def test_layer_cannot_change_the_data(track, tmp_path, capfd):
    """A layer may write into its tokens, which are a copy: the baseline's data stay what they are."""
    path = tmp_path / "writes.py"
    path.write_text(
        "import torch\nclass Writes(torch.nn.Linear):\n"
        "    def __init__(self, channels, length, h):\n        super().__init__(channels, channels)\n"
        "    def forward(self, x):\n        x *= 1.5\n        return x + super().forward(x.clamp_(-0.5, 0.5))\n"
    )
    words = ["--idea", f"{path}:Writes", "--track", track, "--batch", "8", "--epochs", "2", "--jobs", "1", "--quiet"]
    assert bench.main([*words, *map(str, SHORT), "--out-dir", str(tmp_path)]) == 0
    report = json.loads((tmp_path / bench.REPORT).read_text(encoding="utf-8"))
    data = [layer_loop.make_data(track, seed) for seed in (0, 1)]
    alone = [layer_loop.train(None, seed, 0.006, (), data[seed], 2, 8).test for seed in (0, 1)]
    assert report["baseline"]["full"]["per_seed"] == [round(one, 10) for one in alone]


# Users' layers that do not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", user_layers.REFUSED)
def test_unfit_layer_is_refused(name, track, tmp_path, capfd):
    """One line that names the file, the class and the reason, exit status 2, and nothing was trained or written."""
    folder = tmp_path / "out"
    assert benchmark(name, track, folder) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("stage2_bench.py: error: ") and "user_layers.py" in err and name in err
    assert re.search(user_layers.REFUSED[name], err), err
    assert not folder.exists() or not any(path.is_file() for path in folder.rglob("*"))


def test_layer_that_wants_the_other_dtype_is_refused_by_its_tensors_name(track, tmp_path, capfd):
    """What is in float32 in a float64 run is named; in a float32 run the same layer is right."""
    assert benchmark("Single", track, tmp_path / "a") == 2
    line = capfd.readouterr().err
    assert all(word in line for word in ("table", "float32", "float64"))
    assert benchmark("Single", track, tmp_path / "b", *SHORT, "--dtype", "float32") == 0
    assert benchmark("NumPyRandom", track, tmp_path / "c", "--dtype", "float32") == 2
    line = capfd.readouterr().err
    assert all(word in line for word in ("matrix", "float32", "float64"))


def test_layer_that_fails_later_than_the_check_is_one_line(track, tmp_path, capfd):
    """A layer that passes the check and fails on another batch ends the run in one line, exit status 1."""
    path = tmp_path / "late.py"
    path.write_text(
        "import torch\nclass Late(torch.nn.Linear):\n"
        "    def __init__(self, channels, length, h):\n        super().__init__(channels, channels)\n"
        "    def forward(self, x):\n        if len(x) > 8:\n            raise ValueError('too many')\n"
        "        return super().forward(x)\n"
    )
    words = ["--idea", f"{path}:Late", "--track", track, "--seeds", "1", "--epochs", "1", "--jobs", "1", "--quiet"]
    assert bench.main([*words, "--out-dir", str(tmp_path / "out")]) == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "too many" in err and "lost: " in err


@pytest.fixture(scope="module", autouse=True)
def strict_process(track, tmp_path_factory):
    """Start early: the script under `python -W error`, on PyTorch's attention behind a LayerNorm."""
    folder = tmp_path_factory.mktemp("strict")
    words = [
        "--idea",
        idea("Attention"),
        "--track",
        track,
        "--epochs",
        1,
        "--jobs",
        1,
        "--quiet",
        "--out-dir",
        folder,
        *SHORT,
    ]
    command = [sys.executable, "-W", "error", SCRIPT, *words]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONWARNINGS")}
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    yield process, folder
    process.kill()
    process.wait()


def test_libraries_warnings_do_not_reach_the_user(strict_process):
    """`python -W error` ends well, and nothing stands on stderr."""
    process, folder = strict_process
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Verdict") and (folder / bench.REPORT).is_file()
