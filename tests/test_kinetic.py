"""Section 4, kinetic mixing: the operator against closed forms, numpy's least squares and the plain loop."""

import dataclasses
import math

import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

STEPS = (0.0, 0.02, 0.08, 0.5)  # the step sizes of one stack
IRREGULAR = dataclasses.replace(bench.Config(), track="irregular")


def operator(length, channels, steps=STEPS, angles=None):
    return bench.KineticOperator(torch.tensor(steps, dtype=torch.float64), length, channels, angles)


def noise(*shape):
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape))


def waves(k, angles):
    """Return cosine and sine of mode k, (2, tokens)."""
    return np.stack((np.cos(k * angles), np.sin(k * angles)))


def clocks(seeds, start=0):
    return torch.from_numpy(np.stack([bench.clock_angles(IRREGULAR, seed, start) for seed in seeds]))


def spread(signals, channels, runs):
    """Turn signals (batch, time) into tokens (runs, channel, time, batch), the same in every run and channel."""
    return torch.from_numpy(signals.T.copy()).expand(runs, channels, -1, -1).clone()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("length", [2, 3, 5, 8, 32, 33])
def test_diffusion_multiplies_every_pure_wave(length, channels):
    """Diffusion turns each pure wave into exp(-h k^2) times itself, to 1e-12, for every k of even and odd lengths."""
    diffuse = operator(length, channels).diffuse
    for k in range(length // 2 + 1):
        tokens = spread(waves(k, 2 * np.pi * np.arange(length) / length), channels, len(STEPS))
        expected = torch.stack([math.exp(-h * k * k) * tokens[i] for i, h in enumerate(STEPS)])
        assert (diffuse(tokens) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("length", [2, 5, 7, 32, 33])
def test_operator_keeps_shape_and_dtype(length):
    """Odd lengths stay odd: an inverse transform without its length would lose a token."""
    for dtype in (torch.float32, torch.float64):
        tokens = noise(len(STEPS), 2, length, 4).to(dtype)
        out = operator(length, 2)(tokens)
        assert out.shape == tokens.shape and out.dtype == dtype


@pytest.mark.parametrize("channels", [3, 5, 7])
def test_transport_moves_an_impulse_by_h_x(channels):
    """The first Fourier coefficient of a moved impulse turns by h x channels, for every token and step size."""
    length = 32
    tokens = torch.zeros(len(STEPS), channels, length, length, dtype=torch.float64)
    tokens[:, 0] = torch.eye(length, dtype=torch.float64)  # sequence i has its impulse at token i
    moved = operator(length, channels).transport(tokens)
    for run, h in enumerate(STEPS):
        for x in range(length):
            coefficient = np.fft.fft(moved[run, :, x, x].numpy())[1]
            expected = np.exp(-2j * np.pi * h * x / channels)
            assert abs(coefficient - expected) < 1e-12
    assert (moved.sum(2) - moved.diagonal(dim1=2, dim2=3)).abs().max() == 0  # nothing leaves its token


def test_transport_displaces_token_16_by_1_28():
    """At h = 0.08 the impulse at token 16 of 3 channels moves by 1.28, the reference's predicted displacement."""
    tokens = torch.zeros(1, 3, 32, 1, dtype=torch.float64)
    tokens[0, 0, 16] = 1
    moved = operator(32, 3, [0.08]).transport(tokens)[0, :, 16, 0]
    assert -3 / (2 * np.pi) * np.angle(np.fft.fft(moved.numpy())[1]) == pytest.approx(1.28, abs=1e-12)


@pytest.mark.parametrize("channels", [1, 3, 5, 9])
def test_transport_keeps_energy(channels):
    """A circular shift of odd length is unitary: the energy of every token stays."""
    tokens = noise(len(STEPS), channels, 32, 4)
    before, after = tokens.square().sum(1), operator(32, channels).transport(tokens).square().sum(1)
    assert torch.allclose(before, after, rtol=1e-12)


@pytest.mark.parametrize("channels", [2, 4, 6])
def test_transport_of_even_channels_keeps_energy_but_for_the_highest_mode(channels):
    """The highest mode of an even length has no sine to turn into: its amplitude becomes cos(pi h x) of itself."""
    tokens = noise(len(STEPS), channels, 32, 4)
    after = torch.fft.fft(operator(32, channels).transport(tokens), dim=1)
    before = torch.fft.fft(tokens, dim=1)
    turn = torch.cos(math.pi * torch.tensor(STEPS, dtype=torch.float64)[:, None] * torch.arange(32))
    assert torch.allclose(after[:, channels // 2].real, before[:, channels // 2].real * turn[..., None], atol=1e-12)
    rest = [mode for mode in range(channels) if mode != channels // 2]
    assert torch.allclose(after[:, rest].abs(), before[:, rest].abs(), atol=1e-12)


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
    """Token 1 is shifted by h: whole and half steps of known signals, for odd and even channels."""
    tokens = torch.tensor(signal, dtype=torch.float64)[None, :, None, None].expand(1, -1, 2, 1)
    moved = operator(2, len(signal), [shift]).transport(tokens)
    assert moved.dtype == torch.float64
    assert np.allclose(moved[0, :, 1, 0], expected, rtol=0, atol=1e-10)
    assert torch.allclose(moved[0, :, 0], tokens[0, :, 0], atol=1e-15)  # token 0 stays


@pytest.mark.parametrize(("length", "channels"), [(2, 1), (5, 2), (7, 3), (32, 3), (33, 4)])
def test_no_step_is_the_identity(length, channels):
    """At h = 0 diffusion, transport and both, on either clock, leave the tokens as they are."""
    tokens = noise(3, channels, length, 4)
    jitter = np.random.default_rng(0).uniform(-0.2, 0.2, (3, length))
    angles = torch.from_numpy(2 * np.pi * (np.arange(length) + jitter) / length)
    for one in (operator(length, channels, [0.0] * 3), operator(length, channels, [0.0] * 3, angles)):
        for step in (one.diffuse, one.transport, one):
            assert (step(tokens) - tokens).abs().max() < 1e-12


@pytest.mark.parametrize(("length", "channels"), [(2, 1), (3, 2), (7, 3), (32, 3), (33, 4)])
def test_operator_equals_the_plain_loop(length, channels):
    """Diffusion, then transport, equals the oracle's operator run by run; the two do not commute."""
    tokens = noise(len(STEPS), channels, length, 6)
    out = operator(length, channels)(tokens)
    for run, h in enumerate(STEPS):
        expected = plain_loop.kolmogorov(tokens[run].permute(2, 1, 0), h)
        assert torch.allclose(out[run].permute(2, 1, 0), expected, rtol=0, atol=1e-12)
        alone = operator(length, channels).of(run)(tokens[run : run + 1])
        assert torch.allclose(alone[0], out[run], rtol=0, atol=1e-14)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("length", [2, 3, 8, 31, 32, 33])
def test_least_squares_on_a_regular_clock_equals_the_fft(length, channels):
    """On a regular grid, wherever it starts is angle 0, trigonometric least squares is the FFT to 1e-10."""
    angles = (2 * math.pi * torch.arange(length, dtype=torch.float64) / length).expand(len(STEPS), -1)
    tokens = noise(len(STEPS), channels, length, 5)
    fitted, regular = operator(length, channels, angles=angles), operator(length, channels)
    assert (fitted.diffuse(tokens) - regular.diffuse(tokens)).abs().max() < 1e-10
    assert (fitted(tokens) - regular(tokens)).abs().max() < 1e-10
    for k in range(length // 2 + 1):
        assert torch.allclose(fitted.wave(k), regular.wave(k), atol=1e-12)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("start", [0, 17, 63])
def test_diffusion_on_a_jittered_clock_attenuates_low_waves(start, channels):
    """A wave sampled at jittered times shrinks by exp(-h k^2), within 1 % for k <= 4, whatever the clock."""
    seeds = range(8)
    angles = clocks(seeds, start)
    for h in (0.02, 0.08, 0.3):
        one = operator(32, channels, [h] * len(seeds), angles)
        for k in range(5):
            for wave in (torch.cos(k * angles), torch.sin(k * angles))[: 1 + (k > 0)]:
                tokens = wave[:, None, :, None].expand(-1, channels, -1, 1)
                error = (one.diffuse(tokens) - math.exp(-h * k * k) * tokens).abs().amax(dim=(1, 2, 3))
                assert (error < 0.01 * math.exp(-h * k * k)).all()


def test_jittered_clock_matters():
    """The FFT's operator, which takes the clock for regular, misses the 1 % that least squares keeps."""
    angles, k, h = clocks(range(4)), 4, 0.3
    tokens = torch.cos(k * angles)[:, None, :, None]
    error = (operator(32, 1, [h] * 4).diffuse(tokens) - math.exp(-h * k * k) * tokens).abs().amax(dim=(1, 2, 3))
    assert (error > 0.05 * math.exp(-h * k * k)).all()


def test_jittered_diffusion_is_a_least_squares_fit():
    """The matrix equals numpy's least squares on the trigonometric basis, applied by hand to random tokens."""
    seeds, h = range(6), 0.08
    angles, tokens = clocks(seeds), noise(6, 2, 32, 3)
    out = operator(32, 2, [h] * 6, angles).diffuse(tokens)
    for run in seeds:
        theta = angles[run].numpy()[:, None]
        basis = np.hstack((np.cos(theta * np.arange(17)), np.sin(theta * np.arange(1, 16))))
        shrink = np.exp(-h * np.hstack((np.arange(17), np.arange(1, 16))) ** 2)[:, None]
        for channel in range(2):
            fit = np.linalg.lstsq(basis, tokens[run, channel].numpy(), rcond=None)[0]
            assert np.allclose(out[run, channel], basis @ (shrink * fit), rtol=0, atol=1e-9)


def test_jittered_clocks_are_well_conditioned():
    """As many waves as tokens fit any clock: no jitter makes the fit blow a sensor's noise up."""
    angles = clocks(range(25))
    one = operator(32, 1, [0.0] * 25, angles)
    assert torch.linalg.cond(one.basis).max() < 20
    tokens = noise(25, 1, 32, 1)
    assert (one.diffuse(tokens) - tokens).abs().max() < 1e-10


@pytest.mark.parametrize("k", [0, 1, 3, 4])
def test_analysis_reads_a_wave_on_either_clock(k):
    """The k-th coefficient of a wave of amplitude 1 before and after diffusion has the ratio exp(-h k^2)."""
    for angles in (None, clocks(range(len(STEPS)))):
        one = operator(32, 1, angles=angles)
        wave = one.wave(k)
        after = one.diffuse(wave[:, None, :, None])[:, 0, :, 0]
        ratio = (one.analysis(k) * after).sum(1) / (one.analysis(k) * wave).sum(1)
        expected = torch.tensor([math.exp(-h * k * k) for h in STEPS], dtype=torch.float64)
        assert (ratio - expected).abs().max() < 1e-10
