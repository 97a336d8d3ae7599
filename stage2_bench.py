"""Does a kinetic-mixing layer help a small recurrent network to predict dynamics?

Question.  A GRU reads 32 tokens of a driven oscillator and predicts the next position.  Does it predict better
when a kinetic-mixing layer (diffusion exp(-h k^2) along the tokens, transport by h x along the channels) mixes the
tokens first?

Design.  Both models get the same data, GRU weights and batch order, seed by seed.  Both sweep one learning-rate
grid on the first seeds; then every seed is a pair at each model's best configuration.  A placebo, the same layer
with h = 0, has the extra parameters without the physics.

Decision rule, fixed before the data.  Two-sided sign-flip test of the paired differences of the test MSE:
p < 0.05 is significant, and the sign of the mean difference says better or worse.  The mechanism counts as confirmed
where the layer's measured Fourier attenuation is within 10 % of exp(-9 h).

Run.      python stage2_bench.py            the full benchmark
          python stage2_bench.py --smoke    2 seeds, 2 epochs: for continuous integration
          python stage2_bench.py --diff R   compare bench_report.json with the report R
          torchrun --nproc-per-node 2 stage2_bench.py
Written.  bench_report.json (a pure function of the options), stage2_output.txt (the log), and a journal of finished
runs (.stage2_journal.jsonl) from which --resume goes on.

References.
  Cho et al. 2014, arXiv:1406.1078 (GRU); Kingma and Ba 2015, arXiv:1412.6980 (Adam).
  Kolmogorov 1934, Ann. Math. 35, 116 (the operator d_xx + x d_y); Trotter 1959 (operator splitting).
  Good 2005, Permutation, Parametric and Bootstrap Tests of Hypotheses; Efron 1987, JASA 82, 171 (BCa interval).

Sections.  1 configuration, 2 random streams, 3 tracks (data sets), 4 kinetic mixing, 5 models, many runs at once,
6 training, 7 runs over cores and hosts, 8 sweep and pairs, 9 statistics, 10 mechanism signature, 11 extensions,
12 report, answer and diff, 13 command line.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":  # Ctrl-C while the libraries load: leave at once, without a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import platform
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from scipy import integrate, optimize, stats
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# 1. Configuration
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Every experimental number of a run.  The first block has options; the rest is fixed by the specification."""

    seeds: tuple[int, ...] = tuple(range(8))  # the pairs; one seed is one pair
    sweep_seeds: int = 4  # how many of the first seeds the sweep averages over
    lrs: tuple[float, ...] = (0.0015, 0.003, 0.006)  # Adam learning rates: the union grid of both models
    hs: tuple[tuple[float, ...], ...] = ((0.08,),)  # step sizes of the layer; several in one entry are a stack
    epochs: int = 16  # passes over the training split
    track: str = "dynamics"  # a key of TRACKS, or the path of a Python file with make(seed, split)
    idea: str = "kinetic"  # the built-in layer, or "path.py:Class"
    dtype: str = "float64"  # float32 is faster and gives up the promise of equal digits

    hidden: int = 32  # GRU units
    batch: int = 64  # sequences a step; a short last batch is kept
    length: int = 32  # tokens of a built-in track
    sizes: tuple[int, int, int] = (512, 1024, 256)  # trajectories in train, test, val
    rollout_steps: int = 64  # samples after the tokens, for the closed loop
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's decay rates
    epsilon: float = 1e-8  # Adam's denominator offset
    clip: float = 1.0  # largest global gradient norm of a run
    flips: int = 20_000  # sampled sign flips of the reference's p-value
    resamples: int = 9_999  # bootstrap resamples
    significance: float = 0.05  # a smaller p is significant
    power: float = 0.8  # of the smallest detectable difference
    exact_pairs: int = 16  # up to here all 2^n sign flips are enumerated
    probe_sequences: int = 256  # first test sequences, for the signature and the rollout
    horizons: tuple[int, ...] = (1, 4, 16, 64)  # rollout steps reported
    wave: int = 3  # Fourier mode of the attenuation signature
    tolerance: float = 0.1  # relative error up to which the signature confirms the mechanism
    operator_tolerance: float = 0.01  # the same for the operator alone, which no training blurs

    @property
    def sweep(self) -> tuple[int, ...]:
        """The seeds of the sweep."""
        return self.seeds[: self.sweep_seeds]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that trains."""
        return getattr(torch, self.dtype)

    def size(self, split: str) -> int:
        """Trajectories of a built-in track's split."""
        return self.sizes[("train", "test", "val").index(split)]


@dataclass(frozen=True, order=True)
class Run:
    """One training: a model's configuration and a seed.  h is None for the raw baseline."""

    seed: int
    lr: float
    h: tuple[float, ...] | None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the report prints it: h a number, or a list for a multiscale stack."""
        h = self.h if self.h is None or len(self.h) > 1 else self.h[0]
        return {"lr": self.lr, "h": list(h) if isinstance(h, tuple) else h}

    def __str__(self) -> str:
        model = "baseline" if self.h is None else f"h {'+'.join(map(repr, self.h))}"
        return f"{model} lr {self.lr!r} seed {self.seed}"


class UsageError(Exception):
    """The user's options or files are wrong: one line, exit status 2, nothing trained."""


class RunError(Exception):
    """A run could not go on: one line, exit status 1."""


# ---------------------------------------------------------------------------------------------------------------------
# 2. Random streams
# ---------------------------------------------------------------------------------------------------------------------

STREAMS = {"train": 0, "test": 1, "val": 2, "weights": 3, "order": 4, "clock": 5}


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return a fresh generator for one purpose of one seed.  There is no other source of randomness.

    Raises KeyError for a purpose that STREAMS does not name.
    """
    return np.random.default_rng([seed, STREAMS[purpose]])


# ---------------------------------------------------------------------------------------------------------------------
# 3. Tracks (data sets)
# ---------------------------------------------------------------------------------------------------------------------

DUFFING_STEP = 0.15  # time between samples
DUFFING_NOISE = 0.005  # standard deviation of the position sensor
CLOCK_JITTER = 0.2  # of a step, to either side: below 1/4, where trigonometric interpolation stays well conditioned
LARGEST_VALUE = 1e100  # of custom data; the square of a larger one may overflow
SOLVER_MARGIN = 1.0  # time; the solver's steps are about a tenth of it
BUILT_IN_CHANNELS = 3  # of every built-in track: position, velocity, drive; or x and two differences
LORENZ_STEP = 0.06  # persistence errs by 0.3 and a parabola by 0.15 of the targets' std: not trivial
LORENZ_WARM_UP = 1.0  # time to reach the attractor


@dataclass(frozen=True)
class Trajectories:
    """Simulated positions of one split, from which tokens, targets and the closed loop are made.

    times (samples,); position (trajectories, samples), true, and only to the target where nothing is rolled out;
    measured (trajectories, window), what the tokens show; drive (trajectories, samples) or None; order: how many
    backward differences follow the position in a token.
    """

    times: np.ndarray
    position: np.ndarray
    measured: np.ndarray
    drive: np.ndarray | None
    order: int

    @property
    def window(self) -> int:
        """Samples that the tokens need; the target is the position right after them."""
        return self.measured.shape[1]


def encode(position: np.ndarray, times: np.ndarray, drive: np.ndarray | None, order: int) -> np.ndarray:
    """Turn positions (trajectories, samples) into tokens (trajectories, samples - order, channels).

    The channels are the position, its first `order` backward differences over the true intervals, and the drive.
    """
    channels = [position]
    for _ in range(order):
        last = channels[-1]
        channels.append(np.diff(last, axis=1) / np.diff(times[-last.shape[1] :]))
    if drive is not None:
        channels.append(drive)
    length = position.shape[1] - order
    return np.stack([channel[:, -length:] for channel in channels], axis=-1)


def simulate(
    slope: Callable[[float, np.ndarray], np.ndarray], state: np.ndarray, times: np.ndarray, wanted: int, count: int
) -> np.ndarray:
    """Integrate all trajectories at once by DOP853 and return the first variable at the first `wanted` times,
    (trajectories, samples).  The solver stops soon after those, but late enough that its steps up to there are to the
    bit those of an integration to the last time."""
    end, seen = min(float(times[-1]), float(times[wanted - 1]) + SOLVER_MARGIN), times[:wanted]
    solution = integrate.solve_ivp(slope, (0.0, end), state, method="DOP853", t_eval=seen, rtol=1e-10, atol=1e-12)
    return solution.y[:count].copy()


def duffing_times(config: Config) -> np.ndarray:
    """Return the sample times 0, 0.15, ... of the oscillators: one more than the tokens, then the rollout's."""
    return DUFFING_STEP * np.arange(config.length + 1 + config.rollout_steps)


def jittered_times(config: Config, seed: int) -> np.ndarray:
    """Return the irregular clock of a seed: every sample but the first is up to 20 % of a step early or late."""
    times = duffing_times(config)
    jitter = stream(seed, "clock").uniform(-CLOCK_JITTER, CLOCK_JITTER, len(times))
    return times + DUFFING_STEP * np.where(np.arange(len(times)) > 0, jitter, 0.0)


def duffing(config: Config, seed: int, split: str, times: np.ndarray | None = None) -> Trajectories:
    """Simulate q'' = -delta q' + alpha q - beta q^3 + gamma cos(omega t + phi), coefficients drawn by trajectory."""
    times = duffing_times(config) if times is None else times
    rng, count = stream(seed, split), config.size(split)
    bounds = [(0.5, 1.5), (0.5, 1.5), (0.1, 0.4), (0.2, 0.5), (0.8, 1.6), (0.0, 2 * np.pi), (-1.5, 1.5), (-1.0, 1.0)]
    alpha, beta, delta, gamma, omega, phi, q0, v0 = (rng.uniform(low, high, count) for low, high in bounds)
    noise = DUFFING_NOISE * rng.standard_normal((count, config.length + 1))

    def slope(t: float, state: np.ndarray) -> np.ndarray:
        q, v = state[:count], state[count:]
        return np.concatenate([v, (alpha - beta * q * q) * q - delta * v + gamma * np.cos(omega * t + phi)])

    wanted = len(times) if split == "test" else config.length + 2  # only the test split is rolled out
    position = simulate(slope, np.concatenate([q0, v0]), times, wanted, count)
    drive = gamma[:, None] * np.cos(omega[:, None] * times + phi[:, None])
    return Trajectories(times, position, position[:, : noise.shape[1]] + noise, drive, order=1)


def irregular(config: Config, seed: int, split: str) -> Trajectories:
    """Simulate the oscillators of `duffing`, sampled by the jittered clock of the seed."""
    return duffing(config, seed, split, jittered_times(config, seed))


def lorenz(config: Config, seed: int, split: str) -> Trajectories:
    """Simulate Lorenz-63 (sigma 10, rho 28, beta 8/3; J. Atmos. Sci. 20, 130), observed by x and its differences."""
    rng, count = stream(seed, split), config.size(split)
    start = [rng.uniform(low, high, count) for low, high in ((-15.0, 15.0), (-15.0, 15.0), (10.0, 40.0))]
    times = LORENZ_WARM_UP + LORENZ_STEP * np.arange(config.length + 2 + config.rollout_steps)

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        x, y, z = state.reshape(3, count)
        return np.concatenate([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])

    wanted = len(times) if split == "test" else config.length + 3
    position = simulate(slope, np.concatenate(start), times, wanted, count)
    return Trajectories(times, position, position[:, : config.length + 2], None, order=2)


TRACKS: dict[str, Callable[[Config, int, str], Trajectories]] = {
    "dynamics": duffing,
    "lorenz": lorenz,
    "irregular": irregular,
}


def clock_angles(config: Config, seed: int, start: int = 0) -> np.ndarray | None:
    """Return the angles (length,) of the tokens from number `start` on the circle of one window; None if regular."""
    if config.track != "irregular":
        return None
    times = jittered_times(config, seed)[1 + start : 1 + start + config.length]
    return 2 * np.pi * (times - times[0]) / (config.length * DUFFING_STEP)


@functools.lru_cache(maxsize=8)
def load_file(path: str) -> Any:
    """Import a user's Python file by its path.  Raises UsageError with the reason in one line."""
    spec = importlib.util.spec_from_file_location(f"custom file {path}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: is not a Python file (*.py)")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path}: {one_line(error)}") from error
    return module


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def custom_split(path: str, seed: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (N, T, C) and targets (N,) of a user's make(seed, split), checked.

    Raises UsageError where there is no make, it fails, or what it returns has a wrong shape or is not finite.
    """
    make, where = getattr(load_file(path), "make", None), f"{path}: make({seed}, {split!r})"
    if not callable(make):
        raise UsageError(f"{path}: defines no function make(seed, split)")
    try:
        tokens, targets = make(seed, split)
        tokens, targets = np.array(tokens, dtype=np.float64), np.array(targets, dtype=np.float64)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where} -> tokens (N, T, C), targets (N,) failed: {one_line(error)}") from error
    if tokens.ndim != 3 or tokens.shape[0] < 1 or tokens.shape[1] < 2 or tokens.shape[2] < 1:
        raise UsageError(f"{where}: tokens have shape {tokens.shape}, not (N, T, C) with N >= 1, T >= 2, C >= 1")
    if targets.shape != tokens.shape[:1]:
        raise UsageError(f"{where}: targets have shape {targets.shape}, not ({len(tokens)},) as the tokens want")
    for name, values in (("tokens", tokens), ("targets", targets)):
        if not np.isfinite(values).all():
            raise UsageError(f"{where}: {name} hold NaN or infinity")
        if np.abs(values).max() > LARGEST_VALUE:
            raise UsageError(f"{where}: {name} reach {np.abs(values).max():.3g}, too large to standardise")
    return tokens, targets


@dataclass(frozen=True)
class Dataset:
    """The standardised splits of one seed.

    tokens[split] (channel, time, sequences) and targets[split] (sequences,); means and stds of the training split,
    tokens' (channel,) and the targets' two numbers; trajectories: the test split's, None on a custom track.
    """

    tokens: dict[str, Tensor]
    targets: dict[str, Tensor]
    token_mean: np.ndarray
    token_std: np.ndarray
    target_mean: float
    target_std: float
    trajectories: Trajectories | None


@functools.lru_cache(maxsize=16)
def build_dataset(config: Config, seed: int) -> Dataset:
    """Build the three splits of a seed, standardised by the training split.  A constant channel becomes zeros."""
    arrays, trajectories = {}, None
    for split in ("train", "val", "test"):
        if config.track in TRACKS:
            trajectories = TRACKS[config.track](config, seed, split)
            window, drive = trajectories.window, trajectories.drive
            drive = None if drive is None else drive[:, :window]
            tokens = encode(trajectories.measured, trajectories.times[:window], drive, trajectories.order)
            arrays[split] = tokens, trajectories.position[:, window]
        else:
            arrays[split] = custom_split(config.track, seed, split)
    tokens, targets = arrays["train"]
    mean, std = tokens.mean(axis=(0, 1)), tokens.std(axis=(0, 1))
    constant = np.ptp(tokens, axis=(0, 1)) == 0  # whose mean and std are not exact in floating point
    mean, std = np.where(constant, tokens[0, 0], mean), np.where(constant, 1.0, std)
    target_mean, target_std = float(targets.mean()), float(targets.std()) or 1.0

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(config.torch_dtype)

    return Dataset(
        tokens={split: tensor(((x - mean) / std).transpose(2, 1, 0)) for split, (x, _) in arrays.items()},
        targets={split: tensor((y - target_mean) / target_std) for split, (_, y) in arrays.items()},
        token_mean=mean,
        token_std=std,
        target_mean=target_mean,
        target_std=target_std,
        trajectories=trajectories,
    )


# ---------------------------------------------------------------------------------------------------------------------
# 4. Kinetic mixing
# ---------------------------------------------------------------------------------------------------------------------


class KineticOperator:
    """One Lie-Trotter step of the Kolmogorov operator d_xx + x d_y on the (token x, channel y) grid, both periodic.

    Applied to tokens (runs, channel, time, batch): first diffusion along the tokens, every Fourier mode k times
    exp(-h k^2); then transport along the channels, token x shifted by h x (Kolmogorov 1934).  h (runs,).  With
    `angles` (runs, time), the tokens' places on the circle, the Fourier coefficients are the least-squares fit of
    the trigonometric polynomials, as many as tokens; at regular angles that is the FFT's operator.
    """

    def __init__(self, h: Tensor, length: int, channels: int, angles: Tensor | None = None) -> None:
        self.h, self.length, self.channels, self.angles = h, length, channels, angles
        self.modes = torch.arange(length // 2 + 1, dtype=h.dtype)
        self.decay = torch.exp(-h[:, None] * self.modes**2)  # (runs, mode)
        wave = torch.from_numpy(np.fft.fftfreq(channels) * channels).to(h.dtype)
        shift = h[:, None, None] * torch.arange(length, dtype=h.dtype) * wave[:, None]
        self.phase = torch.exp(-2j * math.pi * shift / channels)[..., None]  # (runs, channel mode, time, 1)
        if angles is not None:
            self.basis, self.coefficients = self._fit(angles)
            decays = torch.cat([self.decay, self.decay[:, 1 : (length + 1) // 2]], 1)
            self.matrix = (self.basis * decays[:, None]) @ self.coefficients

    def _fit(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the basis (runs, time, mode), cosines then sines, and its pseudo-inverse.  The last sine of an even
        length, which vanishes on a regular grid, is left out: as many functions as tokens."""
        phase = angles[..., None] * self.modes
        basis = torch.cat([torch.cos(phase), torch.sin(phase[..., 1 : (self.length + 1) // 2])], -1)
        return basis, torch.linalg.pinv(basis)

    def diffuse(self, tokens: Tensor) -> Tensor:
        """Multiply the k-th Fourier mode along the tokens by exp(-h k^2)."""
        if self.angles is not None:
            return self.matrix[:, None] @ tokens
        spectrum = torch.fft.rfft(tokens, dim=2) * self.decay[:, None, :, None]
        return torch.fft.irfft(spectrum, n=self.length, dim=2)

    def transport(self, tokens: Tensor) -> Tensor:
        """Shift token x by h x along the channels, by a fractional circular shift."""
        return torch.fft.ifft(torch.fft.fft(tokens, dim=1) * self.phase, dim=1).real

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return K(tokens), of the same shape and dtype."""
        return self.transport(self.diffuse(tokens.to(self.h.dtype))).to(tokens.dtype)

    def of(self, index: int) -> KineticOperator:
        """Return the operator of one run of the stack."""
        angles = None if self.angles is None else self.angles[index : index + 1]
        return KineticOperator(self.h[index : index + 1], self.length, self.channels, angles)

    def wave(self, k: int) -> Tensor:
        """Return cos(k theta) at the tokens, (runs, time)."""
        angles = 2 * math.pi * torch.arange(self.length, dtype=self.h.dtype) / self.length
        return torch.cos(k * (angles.expand(len(self.h), -1) if self.angles is None else self.angles))

    def analysis(self, k: int) -> Tensor:
        """Return the complex weights (runs, time) whose sum with a signal is its k-th Fourier coefficient."""
        if self.angles is None:
            angles = 2 * math.pi * torch.arange(self.length, dtype=self.h.dtype) / self.length
            return torch.exp(-1j * k * angles).expand(len(self.h), -1)
        cosine = self.coefficients[:, k]
        has_sine = 0 < k < (self.length + 1) // 2
        sine = self.coefficients[:, self.length // 2 + k] if has_sine else torch.zeros_like(cosine)
        return torch.complex(cosine, -sine)


# ---------------------------------------------------------------------------------------------------------------------
# 5. Models, many runs at once
# ---------------------------------------------------------------------------------------------------------------------

CHUNK = 2  # time steps whose backward factors are computed together: more outgrow the cache, fewer cost dispatch


def pack_gru(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """Pack GRU weights of PyTorch's gate order (r, z, n) into one matrix (runs, 4 hidden, hidden + channel + 1).

    It multiplies the column (g, x, 1), where g = (h + 1) / 2, and gives the rows (n_h, r, z, n_x) before their
    nonlinearity.  The rows of n are doubled, so that tanh(a) = 2 sigmoid(2 a) - 1 costs a sigmoid; in g, the state
    needs no further step: h' = (1 - z) n + z h reads g' = (1 - z) sigmoid(2 a) + z g.
    """
    runs, rows, channels = w_ih.shape
    hidden = rows // 3
    packed = w_ih.new_zeros(runs, 4 * hidden, hidden + channels + 1)
    packed[:, hidden:, hidden:-1] = w_ih
    packed[:, hidden:, -1] = b_ih
    packed[:, : 3 * hidden, :hidden] = 2 * w_hh.roll(hidden, 1)
    packed[:, : 3 * hidden, -1] += (b_hh - w_hh.sum(2)).roll(hidden, 1)
    packed[:, :hidden] *= 2
    packed[:, 3 * hidden :] *= 2
    return packed


def unpack_gru_gradient(gradient: Tensor, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn the gradient of `pack_gru`'s matrix, in place, into those of (w_ih, w_hh, b_ih, b_hh)."""
    gradient[:, :hidden] *= 2
    gradient[:, 3 * hidden :] *= 2
    bias = gradient[:, : 3 * hidden, -1]
    recurrent = 2 * gradient[:, : 3 * hidden, :hidden] - bias[..., None]
    inputs = gradient[:, hidden:]
    return inputs[..., hidden:-1], recurrent.roll(-hidden, 1), inputs[..., -1], bias.roll(-hidden, 1)


class Workspace:
    """Buffers that the steps of a training use again and again, one for each name and shape."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def get(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the buffer of this name, shape and the dtype of `like`; its contents are the last use's."""
        key = (name, like.dtype, shape)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(shape)
        return self._buffers[key]


def gru_scan(packed: Tensor, tokens: Tensor, steps_kept: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Run the GRUs over tokens (runs, channel, time, batch) from the zero state.

    Returns the columns (g, x, 1), (time + 1, runs, hidden + channel + 1, batch), and the gates (n_h, r, z, s) of the
    last `steps_kept` steps, (steps_kept, runs, 4 hidden, batch), where n = 2 s - 1.
    """
    runs, channels, length, batch = tokens.shape
    hidden = packed.shape[1] // 4
    columns = workspace.get("columns", tokens, length + 1, runs, hidden + channels + 1, batch)
    gates = workspace.get("gates", tokens, steps_kept, runs, 4 * hidden, batch)
    columns[0, :, :hidden] = 0.5
    columns[:length, :, hidden:-1] = tokens.permute(2, 0, 1, 3)
    columns[:length, :, -1] = 1.0
    for t in range(length):
        gate = gates[t % steps_kept]
        torch.bmm(packed, columns[t], out=gate)
        n_h, r_z, s = gate[:, :hidden], gate[:, hidden : 3 * hidden], gate[:, 3 * hidden :]
        r_z.sigmoid_()
        s.addcmul_(r_z[:, :hidden], n_h).sigmoid_()
        torch.lerp(s, columns[t, :, :hidden], r_z[:, hidden:], out=columns[t + 1, :, :hidden])
    return columns, gates


def gate_slopes(gates: Tensor, g: Tensor, slopes: Tensor, scratch: Tensor) -> None:
    """Write into `slopes` what the backward pass multiplies dL/dg' by to get the gradient of each gate's sum.

    gates, slopes (time, runs, 4 hidden, batch) in the order (n_h, r, z, n_x); g, scratch (time, runs, hidden, batch).
    """
    n_h, r, z, s = gates.chunk(4, 2)
    to_n_h, to_r, to_z, to_n_x = slopes.chunk(4, 2)
    sigmoid_backward = torch.ops.aten.sigmoid_backward
    sigmoid_backward(torch.neg(z, out=scratch).add_(1.0), s, grad_input=to_n_x)
    torch.mul(to_n_x, r, out=to_n_h)
    sigmoid_backward(torch.mul(to_n_x, n_h, out=scratch), r, grad_input=to_r)
    sigmoid_backward(torch.sub(g, s, out=scratch), z, grad_input=to_z)


class StackedGRU(torch.autograd.Function):
    """The last hidden state of many GRUs at once, with a hand-derived backward pass (Cho et al. 2014)."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, workspace: Workspace
    ) -> Tensor:
        """Return h_T (runs, hidden, batch) of tokens (runs, channel, time, batch); weights as torch.nn.GRU's,
        with runs in front.  The workspace must not be used again before the backward pass."""
        packed = pack_gru(w_ih, w_hh, b_ih, b_hh)
        columns, gates = gru_scan(packed, tokens, tokens.shape[2], workspace)
        ctx.kept, ctx.workspace = (packed, columns, gates), workspace
        return 2 * columns[-1, :, : w_hh.shape[2]] - 1

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Tensor | None, ...]:
        """Propagate dL/dh_T (runs, hidden, batch) back through time, CHUNK steps' factors at once."""
        packed, columns, gates = ctx.kept
        length, runs, rows, batch = gates.shape
        hidden = rows // 4
        channels = packed.shape[2] - hidden - 1
        recurrent = packed[:, : 3 * hidden, :hidden].transpose(1, 2)
        inputs = packed[:, hidden:, hidden:-1].transpose(1, 2)
        grad_packed = torch.zeros_like(packed)
        grad_tokens = gates.new_empty(length, runs, channels, batch) if ctx.needs_input_grad[0] else None
        slopes = ctx.workspace.get("slopes", gates, CHUNK, runs, rows, batch)
        scratch = ctx.workspace.get("scratch", gates, CHUNK, runs, hidden, batch)
        delta = 2 * grad_hidden
        for t in reversed(range(length)):
            start = t - t % CHUNK
            if t == length - 1 or t % CHUNK == CHUNK - 1:
                steps, count = slice(start, t + 1), t + 1 - start
                gate_slopes(gates[steps], columns[steps, :, :hidden], slopes[:count], scratch[:count])
            carried = delta * gates[t, :, 2 * hidden : 3 * hidden]
            local = slopes[t - start]
            local.view(runs, 4, hidden, batch).mul_(delta[:, None])
            delta = carried.baddbmm_(recurrent, local[:, : 3 * hidden])
            grad_packed.baddbmm_(local, columns[t].transpose(1, 2))
            if grad_tokens is not None:
                torch.bmm(inputs, local[:, hidden:], out=grad_tokens[t])
        grads = unpack_gru_gradient(grad_packed, hidden)
        return (None if grad_tokens is None else grad_tokens.permute(1, 2, 0, 3), *grads, None)


def stacked_gru(tokens: Tensor, weights: Sequence[Tensor], workspace: Workspace) -> Tensor:
    """Return the last hidden states (runs, hidden, batch); where no gradient is wanted, no step is kept."""
    if torch.is_grad_enabled():
        return StackedGRU.apply(tokens, *weights, workspace)
    columns, _ = gru_scan(pack_gru(*weights), tokens, 1, workspace)
    return 2 * columns[-1, :, : weights[1].shape[2]] - 1


def affine(weight: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
    """Map channels: weight (runs, out, in), bias (runs, out), tokens (runs, in, time, batch)."""
    flat = torch.baddbmm(bias[..., None], weight, tokens.flatten(2))
    return flat.unflatten(2, tokens.shape[2:])


def uniform(rng: np.random.Generator, fan: int, *shape: int) -> np.ndarray:
    """Draw weights from [-1/sqrt(fan), 1/sqrt(fan))."""
    return rng.uniform(-1 / math.sqrt(fan), 1 / math.sqrt(fan), shape)


class KineticLayer:
    """u + sigmoid(W_g u + b_g) * (W_m K(u) + b_m) for a stack of runs; K has no parameters."""

    def __init__(self, config: Config, runs: Sequence[Run], depth: int, shape: tuple[int, int], start: int) -> None:
        self.channels, length = shape
        angles = [clock_angles(config, run.seed, start) for run in runs]
        h = torch.tensor([run.h[depth] for run in runs], dtype=torch.float64)
        places = None if angles[0] is None else torch.from_numpy(np.stack(angles))
        self.operator = KineticOperator(h, length, self.channels, places)
        size = (self.channels, self.channels)
        self.shapes = {"gate": size, "gate_bias": size[:1], "mix": size, "mix_bias": size[:1]}

    def initial(self, rngs: Sequence[np.random.Generator]) -> list[np.ndarray]:
        """Draw the parameters of every run from its weights' stream, in the order of `shapes`."""
        return [np.stack([uniform(rng, self.channels, *shape) for rng in rngs]) for shape in self.shapes.values()]

    def gate(self, weights: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """Return the gate's values (runs, channel, time, batch)."""
        return torch.sigmoid(affine(weights[0], weights[1], tokens))

    def prepare(self, index: int, tokens: Tensor) -> Tensor:
        """Return K(tokens) of one run's tokens (channel, time, sequences)."""
        return self.operator.of(index)(tokens[None])[0]

    def __call__(self, weights: Sequence[Tensor], tokens: Tensor, mixed: Tensor | None) -> Tensor:
        """Return the mixed tokens (runs, channel, time, batch); `mixed` is K(tokens) where that is known already."""
        mixed = self.operator(tokens) if mixed is None else mixed
        return tokens + self.gate(weights, tokens) * affine(weights[2], weights[3], mixed)

    def signature(self, weights: Sequence[Tensor], tokens: Tensor, config: Config) -> list[dict[str, float]]:
        """Return each run's mechanism signature (section 10)."""
        attenuation, displacement = kinetic_signature(self, weights, tokens, config)
        return [
            {"attenuation": float(a), "displacement": float(d)} for a, d in zip(attenuation, displacement, strict=True)
        ]


@functools.lru_cache(maxsize=8)
def idea_class(idea: str) -> type[torch.nn.Module]:
    """Return the class that "path.py:Class" names.  Raises UsageError if there is none."""
    path, _, name = idea.rpartition(":")
    found = getattr(load_file(path), name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.nn.Module)):
        raise UsageError(f"{path}: defines no torch.nn.Module named {name!r}")
    return found


def build_modules(config: Config, seed: int, hs: Sequence[float], shape: tuple[int, int]) -> list[torch.nn.Module]:
    """Construct the user's layers of one run: their own initialisation under the seed, in the run's dtype."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(config.torch_dtype)
        try:
            return [idea_class(config.idea)(*shape, h).to(config.torch_dtype) for h in hs]
        finally:
            torch.set_default_dtype(default)


class ModuleLayer:
    """A user's nn.Module, written for one run, applied to a stack of runs by torch.func.

    All runs of a stack share h.  Where vmap has no rule for what the layer does, the runs go one by one.
    """

    def __init__(self, config: Config, runs: Sequence[Run], depth: int, shape: tuple[int, int], start: int) -> None:
        modules = [build_modules(config, run.seed, run.h[: depth + 1], shape)[-1] for run in runs]
        self.template = modules[0]
        self.names = [name for name, _ in self.template.named_parameters()]
        parameters, self.buffers = torch.func.stack_module_state(modules)
        self.state = [parameters[name].detach() for name in self.names]
        self.shapes = {name: tuple(value.shape[1:]) for name, value in zip(self.names, self.state, strict=True)}
        self.stacked = True
        sample = self.state[0].new_zeros(len(runs), *shape, 1)
        try:
            with torch.no_grad():
                self(self.state, sample, None)
        except (RuntimeError, NotImplementedError):
            self.stacked = False

    def initial(self, rngs: Sequence[np.random.Generator]) -> list[np.ndarray]:
        """Return the modules' own initial parameters; the weights' streams are not used."""
        return [value.numpy() for value in self.state]

    def prepare(self, index: int, tokens: Tensor) -> None:
        """A user's layer has nothing to compute ahead."""

    def _apply(self, weights: tuple[Tensor, ...], buffers: dict[str, Tensor], tokens: Tensor) -> Tensor:
        state = dict(zip(self.names, weights, strict=True)) | buffers
        return torch.func.functional_call(self.template, state, (tokens,))

    def __call__(self, weights: Sequence[Tensor], tokens: Tensor, mixed: Tensor | None) -> Tensor:
        """Return the layer's output (runs, channel, time, batch)."""
        batches = tokens.permute(0, 3, 2, 1)
        if self.stacked:
            out = torch.func.vmap(self._apply)(tuple(weights), self.buffers, batches)
        else:
            out = torch.stack([self.one_run(weights, i, batches[i]) for i in range(len(batches))])
        return out.permute(0, 3, 2, 1)

    def one_run(self, weights: Sequence[Tensor], i: int, tokens: Tensor) -> Tensor:
        """Apply the layer of run i to its tokens (batch, time, channel)."""
        buffers = {name: value[i] for name, value in self.buffers.items()}
        return self._apply(tuple(weight[i] for weight in weights), buffers, tokens)

    def signature(self, weights: Sequence[Tensor], tokens: Tensor, config: Config) -> list[dict[str, float]]:
        """Return what the class's own `signature(tokens)` says of each run; nothing where it has none."""
        if not hasattr(self.template, "signature"):
            return [{} for _ in tokens]
        found = []
        for i, sequences in enumerate(tokens.permute(0, 3, 2, 1)):
            state = dict(zip(self.names, (weight[i] for weight in weights), strict=True))
            self.template.load_state_dict(state | {name: value[i] for name, value in self.buffers.items()}, False)
            found.append({name: float(value) for name, value in self.template.signature(sequences).items()})
        return found


class StackedModel:
    """Raw or mixing models of several runs, evaluated together.  All runs have the same number of layers.

    The parameters of a run are one row of a matrix (runs, parameters), in the order of `shapes`.
    """

    def __init__(self, config: Config, runs: Sequence[Run]) -> None:
        self.config, self.runs = config, tuple(runs)
        self.data = [build_dataset(config, run.seed) for run in runs]
        self.channels, self.length, _ = self.data[0].tokens["train"].shape
        self.layers = self.make_layers()
        hidden = config.hidden
        self.shapes: list[tuple[int, ...]] = [
            (3 * hidden, self.channels),
            (3 * hidden, hidden),
            (3 * hidden,),
            (3 * hidden,),
            (1, hidden),
            (1,),
        ] + [shape for layer in self.layers for shape in layer.shapes.values()]
        self.workspace = Workspace()
        self._mixed: dict[tuple[int, float, str], Tensor | None] = {}

    def make_layers(self, start: int = 0) -> list[Any]:
        """Return the mixing layers in front of the GRU: none for the raw model.  `start` is the window's token."""
        layer = KineticLayer if self.config.idea == "kinetic" else ModuleLayer
        depths = range(len(self.runs[0].h or ()))
        return [layer(self.config, self.runs, i, (self.channels, self.length), start) for i in depths]

    def initial(self) -> Tensor:
        """Draw the initial parameters (runs, parameters) of every run from its seed's weights stream."""
        rngs = [stream(run.seed, "weights") for run in self.runs]
        parts = [np.stack([uniform(rng, self.config.hidden, *shape) for rng in rngs]) for shape in self.shapes[:6]]
        for layer in self.layers:
            parts += layer.initial(rngs)
        flat = np.concatenate([part.reshape(len(rngs), -1) for part in parts], axis=1)
        return torch.from_numpy(flat).to(self.config.torch_dtype)

    def split_parameters(self, flat: Tensor) -> list[Tensor]:
        """Cut the parameter matrix into stacked weights, (runs, *shape) each."""
        parts = flat.split([math.prod(shape) for shape in self.shapes], dim=1)
        return [part.reshape(len(flat), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def __call__(self, flat: Tensor, tokens: Tensor, mixed: Tensor | None = None, layers: Any = None) -> Tensor:
        """Predict (runs, batch) from tokens (runs, channel, time, batch).

        mixed: what the first layer's `prepare` gives for the tokens, or None; layers: instead of the model's own.
        """
        weights = self.split_parameters(flat)
        used = 6
        for layer in self.layers if layers is None else layers:  # here alone the raw model and the idea differ
            tokens = layer(weights[used : used + len(layer.shapes)], tokens, mixed)
            used, mixed = used + len(layer.shapes), None
        hidden = stacked_gru(tokens, weights[:4], self.workspace)
        return (weights[4] @ hidden).squeeze(1) + weights[5]

    def mixed(self, index: int, split: str) -> Tensor | None:
        """Return K(tokens) of a run's whole split for the first layer, computed once and shared by runs alike."""
        run = self.runs[index]
        key = (run.seed, run.h[0], split)
        if key not in self._mixed:
            self._mixed[key] = self.layers[0].prepare(index, self.data[index].tokens[split])
        return self._mixed[key]

    def batch(self, split: str, chosen: Sequence[Any]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gather tokens, their `mixed` and targets (runs, batch); chosen has each run's indices or slice."""
        tokens = torch.stack([data.tokens[split][..., i] for data, i in zip(self.data, chosen, strict=True)])
        targets = torch.stack([data.targets[split][i] for data, i in zip(self.data, chosen, strict=True)])
        whole = [self.mixed(index, split) for index in range(len(self.runs))] if self.layers else [None]
        if whole[0] is None:
            return tokens, None, targets
        return tokens, torch.stack([k[..., i] for k, i in zip(whole, chosen, strict=True)]), targets


# ---------------------------------------------------------------------------------------------------------------------
# 6. Training
# ---------------------------------------------------------------------------------------------------------------------


class StackedAdam:
    """Adam with a learning rate and a gradient clip for every run (Kingma and Ba 2015; PyTorch's formulas)."""

    def __init__(self, config: Config, runs: Sequence[Run], flat: Tensor) -> None:
        self.config, self.steps = config, 0
        self.lr = torch.tensor([run.lr for run in runs], dtype=flat.dtype)[:, None]
        self.mean, self.square = torch.zeros_like(flat), torch.zeros_like(flat)

    def step(self, flat: Tensor, gradient: Tensor) -> None:
        """Update the parameters (runs, parameters) in place, each run's gradient clipped to its global norm."""
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient = gradient * torch.clamp(self.config.clip / (norm + 1e-6), max=1.0)
        self.steps += 1
        first, second = self.config.betas
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (self.square.sqrt() / math.sqrt(1 - second**self.steps)).add_(self.config.epsilon)
        flat.sub_(self.lr / (1 - first**self.steps) * (self.mean / scale))


def train(model: StackedModel) -> tuple[Tensor, Tensor]:
    """Train all runs of a model.  Returns the parameters (runs, parameters) and whether every loss was finite, (runs,).

    Each run has the batch order of its own seed: one permutation an epoch, consecutive slices.
    """
    config, flat = model.config, model.initial().requires_grad_()
    rngs = [stream(run.seed, "order") for run in model.runs]
    adam = StackedAdam(config, model.runs, flat)
    count = len(model.data[0].targets["train"])
    finite = torch.ones(len(model.runs), dtype=torch.bool)
    for _ in range(config.epochs):
        orders = [torch.from_numpy(rng.permutation(count)) for rng in rngs]
        for start in range(0, count, config.batch):
            tokens, mixed, targets = model.batch("train", [order[start : start + config.batch] for order in orders])
            losses = (model(flat, tokens, mixed) - targets).square().mean(1)
            (gradient,) = torch.autograd.grad(losses.sum(), flat)
            with torch.no_grad():
                adam.step(flat, gradient)
            finite &= torch.isfinite(losses)
    return flat.detach(), finite


@torch.no_grad()
def evaluate(model: StackedModel, flat: Tensor, split: str) -> Tensor:
    """Return the MSE (runs,) of a split, in standardised target units."""
    count = len(model.data[0].targets[split])
    errors = []
    for start in range(0, count, model.config.probe_sequences):
        piece = slice(start, start + model.config.probe_sequences)
        tokens, mixed, targets = model.batch(split, [piece] * len(model.runs))
        errors.append((model(flat, tokens, mixed) - targets).square())
    return torch.cat(errors, 1).mean(1)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Runs over cores and hosts
# ---------------------------------------------------------------------------------------------------------------------

STACK = 16  # runs trained side by side: fewer waste time on dispatch, more gain nothing
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
MOST_JOBS = 1024  # a larger --jobs is a slip of the finger


@dataclass(frozen=True)
class Record:
    """What is known of a finished run: MSEs (None where it diverged), parameters, and the probes where asked for."""

    score: float | None
    validation: float | None
    weights: np.ndarray
    probe: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stack:
    """A unit of work: runs that train side by side on one thread, or whose given parameters are only probed."""

    runs: tuple[Run, ...]
    probed: frozenset[Run]
    known: tuple[Record, ...] | None = None

    @property
    def seeds(self) -> set[int]:
        """The seeds whose data the stack needs."""
        return {run.seed for run in self.runs}

    @property
    def cost(self) -> float:
        """The expected work, in trainings; a probe is about a third of one."""
        trained = len(self.runs) if self.known is None else 0
        return trained + len(self.probed.intersection(self.runs)) / 3


def finite_or_none(value: float) -> float | None:
    """Return the number, or None where it is NaN or infinite: neither may enter a statistic."""
    return float(value) if math.isfinite(value) else None


def complete(config: Config, stack: Stack) -> dict[Run, Record]:
    """Train, score and probe the runs of a stack."""
    model = StackedModel(config, stack.runs)
    if stack.known is None:
        flat, finite = train(model)
        test, validation = (evaluate(model, flat, split) for split in ("test", "val"))
        diverged = ~(finite & torch.isfinite(test))
        test[diverged] = validation[diverged] = math.nan
        rows = zip(test.tolist(), validation.tolist(), flat.numpy(), strict=True)
        known = [Record(finite_or_none(t), finite_or_none(v), weights) for t, v, weights in rows]
    else:
        known = list(stack.known)
    return probe_records(config, stack, dict(zip(stack.runs, known, strict=True)))


def probe_records(config: Config, stack: Stack, records: dict[Run, Record]) -> dict[Run, Record]:
    """Add signature and rollout to the records that want them; a diverged run has neither."""
    chosen = [run for run in stack.runs if run in stack.probed and records[run].score is not None]
    probes: dict[Run, dict[str, Any]] = {run: {} for run in stack.probed}
    if chosen:
        model = StackedModel(config, chosen)
        flat = torch.from_numpy(np.stack([records[run].weights for run in chosen]))
        signatures, rollouts = signature(model, flat), rollout(model, flat)
        probes |= {run: {"signature": s, **r} for run, s, r in zip(chosen, signatures, rollouts, strict=True)}
    return {run: dataclasses.replace(record, probe=probes.get(run)) for run, record in records.items()}


def plan(config: Config, runs: Sequence[Run], jobs: int) -> list[tuple[Run, ...]]:
    """Share runs out into groups that can train together, by model and in the order of seeds, even over the jobs."""
    kinds: dict[Any, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.seed, run.h or (), run.lr)):
        kinds.setdefault(run.h if run.h is None or config.idea != "kinetic" else len(run.h), []).append(run)
    groups = []
    for members in kinds.values():
        count = math.ceil(len(members) / min(STACK, math.ceil(len(runs) / jobs)))
        count = min(len(members), math.ceil(count / jobs) * jobs)
        edges = [round(i * len(members) / count) for i in range(count + 1)]
        groups += [tuple(members[start:stop]) for start, stop in itertools.pairwise(edges)]
    return groups


def available_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, and the quota of its container (cgroup v2 or v1)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = []
    with contextlib.suppress(OSError):
        place = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        here = Path("/sys/fs/cgroup") / (place[1].strip("/") if place else "")
        quotas = [(folder / "cpu.max") for folder in (here, *here.parents) if folder.is_relative_to("/sys/fs/cgroup")]
    for file in quotas:
        with contextlib.suppress(OSError, ValueError):
            quota, period = file.read_text().split()
            cpus = min(cpus, max(1, int(quota) // int(period)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cpus = min(cpus, max(1, int(quota) // int(period))) if int(quota) > 0 else cpus
    return cpus


def start_worker() -> None:
    """Prepare a worker process: one thread, signals left to the parent, and no life without the parent."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    torch.set_num_threads(1)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


@contextlib.contextmanager
def failure_named(stack: Stack) -> Iterator[None]:
    """Turn a worker's death, or what a user's code raised, into a RunError that names the runs lost by it."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        killed = isinstance(error, BrokenProcessPool)
        what, lost = "a worker process was killed" if killed else one_line(error), "; ".join(map(str, stack.runs))
        raise RunError(f"{what}; lost: {lost}; --resume goes on from the rest") from error


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold stop signals back while a process starts: fork hooks would swallow what a handler raises, and a new child,
    which inherits the mask, must not see them before `start_worker`.  What came meanwhile is raised at the end."""
    if not hasattr(signal, "pthread_sigmask") or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOP_SIGNALS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


class Alone:
    """Completes stacks one after the other in this process; the other backends are made from it."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, stacks: Sequence[Stack]) -> Iterator[dict[Run, Record]]:
        """Complete the stacks and yield their records as they come."""
        for stack in stacks:
            with failure_named(stack):
                found = complete(self.config, stack)
            yield found


class WorkerPool(Alone):
    """Single-process executors, so that stacks of the same seeds go to the process that has their data already."""

    def __init__(self, config: Config, jobs: int, fork: bool) -> None:
        super().__init__(config)
        self.before = set(multiprocessing.active_children())
        context = multiprocessing.get_context("fork" if fork else "spawn")
        pool = functools.partial(concurrent.futures.ProcessPoolExecutor, 1, context, start_worker)
        self.workers = [pool() for _ in range(jobs)]
        self.seeds: list[set[int]] = [set() for _ in range(jobs)]

    def __exit__(self, *_: object) -> None:
        for process in set(multiprocessing.active_children()) - self.before:
            process.kill()
        for worker in self.workers:
            worker.shutdown(wait=True, cancel_futures=True)

    def nearest(self, waiting: list[Stack], worker: int) -> Stack:
        """Take the stack with the most data that the worker has and the least that another has."""
        others = set().union(*self.seeds[:worker], *self.seeds[worker + 1 :])
        return max(waiting, key=lambda s: (len(s.seeds & self.seeds[worker]), -len(s.seeds & others), s.cost))

    def run(self, stacks: Sequence[Stack]) -> Iterator[dict[Run, Record]]:
        """Complete the stacks and yield their records as they come.  Raises RunError if a worker dies."""
        waiting, busy = list(stacks), {}
        while waiting or busy:
            for worker in set(range(len(self.workers))) - {worker for worker, _ in busy.values()}:
                if waiting:
                    stack = self.nearest(waiting, worker)
                    waiting.remove(stack)
                    self.seeds[worker] |= stack.seeds
                    with failure_named(stack), signals_held():
                        busy[self.workers[worker].submit(complete, self.config, stack)] = worker, stack
            done, _ = concurrent.futures.wait(busy, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: future.exception() is not None):  # what is sound comes first
                _, stack = busy.pop(future)
                with failure_named(stack):
                    found = future.result()
                yield found


class Ranks(Alone):
    """Share stacks over the ranks of torchrun (gloo); every rank learns every record, in the same order."""

    def __enter__(self) -> Ranks:
        torch.distributed.init_process_group("gloo")
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after a failure the peers may be gone: leave, and let torchrun end the rest
            torch.distributed.destroy_process_group()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value.  Raises RunError where a rank is lost."""
        values: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(values, value)
        except RuntimeError as error:
            raise RunError(f"a rank was lost; --resume goes on from the rest ({one_line(error)[:120]})") from None
        return values

    def run(self, stacks: Sequence[Stack]) -> Iterator[dict[Run, Record]]:
        """Complete the stacks in rounds, one a rank, and yield everybody's records.  Raises RunError if one fails."""
        for start in range(0, len(stacks), self.size):
            result: dict[Run, Record] | str = {}
            try:
                for stack in stacks[start + self.rank : start + self.rank + 1]:
                    with failure_named(stack):
                        result = complete(self.config, stack)
            except (UsageError, RunError) as error:  # the others wait for this rank: tell them, then fail together
                result = f"rank {self.rank}: {error}"
            for found in self.gather(result):
                if isinstance(found, str):
                    raise RunError(found)
                yield found


# ---------------------------------------------------------------------------------------------------------------------
# 8. Sweep and pairs
# ---------------------------------------------------------------------------------------------------------------------


class Execution:
    """Completes runs on a backend.  `recall` knows those of an earlier start, `on_records` hears of new ones."""

    def __init__(
        self,
        config: Config,
        backend: Alone,
        jobs: int,
        recall: Callable[[Run], Record | None] = lambda run: None,
        on_records: Callable[[dict[Run, Record]], None] = lambda found: None,
    ) -> None:
        self.config, self.backend, self.jobs = config, backend, jobs
        self.recall, self.on_records = recall, on_records
        self.records: dict[Run, Record] = {}

    def complete(self, runs: Iterable[Run], probed: Iterable[Run] = ()) -> None:
        """Make sure that `records` has every run, and a probe for each of `probed`."""
        wanted, probes = list(dict.fromkeys(runs)), frozenset(probed)
        recalled = {run: self.recall(run) for run in wanted if run not in self.records}
        self.records |= {run: record for run, record in recalled.items() if record}
        new = [run for run in wanted if run not in self.records]
        bare = [run for run in wanted if run in probes.difference(new) and self.records[run].probe is None]
        stacks = [Stack(group, probes) for group in plan(self.config, new, self.jobs)]
        for group in plan(self.config, bare, self.jobs):
            stacks.append(Stack(group, probes, tuple(self.records[run] for run in group)))
        for found in self.backend.run(sorted(stacks, key=lambda stack: -stack.cost)):
            self.records |= found
            self.on_records(found)


@dataclass(frozen=True)
class Arm:
    """One model of the comparison: its grid of (lr, h), the sweep's means, and the best configuration's runs."""

    grid: tuple[tuple[float, tuple[float, ...] | None], ...]
    means: tuple[float, ...]  # inf where a run of the row diverged
    validation: tuple[float, ...]
    scores: tuple[float | None, ...]  # test MSE by seed, as printed
    probes: tuple[dict[str, Any], ...]
    parameters: int

    @property
    def best(self) -> tuple[float, tuple[float, ...] | None]:
        """The configuration with the lowest mean."""
        return best_row(self.grid, self.means)


@dataclass(frozen=True)
class Outcome:
    """The three arms of a benchmark and the parameters' counts; all that the report is made of."""

    baseline: Arm
    idea: Arm
    placebo: Arm
    diverged: tuple[Run, ...]


def best_row(grid: Sequence[Any], means: Sequence[float]) -> Any:
    """Return the configuration with the lowest mean, the smaller lr (then h) on a tie; inf never beats a number."""
    return min(zip(means, grid, strict=True))[1]


def grids(config: Config) -> dict[str, list[Any]]:
    """Return the (lr, h) grid of each arm: the same rates for all, h = 0 for the placebo."""
    zeros = tuple(dict.fromkeys((0.0,) * len(h) for h in config.hs))
    steps = {"baseline": (None,), "idea": config.hs, "placebo": zeros}
    return {name: [(lr, h) for h in hs for lr in config.lrs] for name, hs in steps.items()}


def sweep_means(config: Config, records: dict[Run, Record], grid: Sequence[Any], field: str) -> list[float]:
    """Return each row's mean over the sweep's seeds, of printed numbers; inf where one of its runs diverged."""
    means = []
    for lr, h in grid:
        values = [printed(getattr(records[Run(seed, lr, h)], field)) for seed in config.sweep]
        means.append(math.inf if None in values else printed(float(np.mean(values))))
    return means


def benchmark(config: Config, execution: Execution) -> Outcome:
    """Sweep the three arms together, then run every seed at each one's best configuration.

    The placebo is the one with as many layers as the winning idea, so that their parameters are equal in number.
    """
    records, rows = execution.records, grids(config)
    execution.complete(Run(seed, lr, h) for seed in config.sweep for grid in rows.values() for lr, h in grid)
    _, idea_h = best_row(rows["idea"], sweep_means(config, records, rows["idea"], "score"))
    rows["placebo"] = [(lr, h) for lr, h in rows["placebo"] if len(h) == len(idea_h)]
    means = {name: sweep_means(config, records, grid, "score") for name, grid in rows.items()}
    pairs = {name: [Run(s, *best_row(grid, means[name])) for s in config.seeds] for name, grid in rows.items()}
    execution.complete(itertools.chain(*pairs.values()), pairs["baseline"] + pairs["idea"])

    def arm(name: str) -> Arm:
        chosen = [records[run] for run in pairs[name]]
        return Arm(
            grid=tuple(rows[name]),
            means=tuple(means[name]),
            validation=tuple(sweep_means(config, records, rows[name], "validation")),
            scores=tuple(printed(record.score) for record in chosen),
            probes=tuple(record.probe or {} for record in chosen),
            parameters=len(chosen[0].weights),
        )

    diverged = tuple(sorted((run for run, record in records.items() if record.score is None), key=str))
    return Outcome(arm("baseline"), arm("idea"), arm("placebo"), diverged)


# ---------------------------------------------------------------------------------------------------------------------
# 9. Statistics
# ---------------------------------------------------------------------------------------------------------------------

TIE = 1e-9  # relative tolerance that decides ties between resampled means and the observed one


def printed(value: float | None, digits: int = 10) -> float | None:
    """Round a number as the report prints it; None where it is missing, NaN or infinite.  Zero has no sign."""
    if value is None or not math.isfinite(value):
        return None
    return round(float(value), digits) + 0.0


def summary(scores: Sequence[float | None]) -> dict[str, Any]:
    """Return mean, population std, the scores by seed, and their number; None where a seed diverged."""
    mean = std = None
    if None not in scores:
        mean, std = printed(float(np.mean(scores))), printed(float(np.std(scores)))
    return {"mean": mean, "std": std, "per_seed": list(scores), "n": len(scores)}


def differences(first: Sequence[float | None], second: Sequence[float | None]) -> np.ndarray | None:
    """Return second - first by seed, (pairs,); None where a pair has a diverged run."""
    if None in (*first, *second):
        return None
    return np.subtract(second, first, dtype=np.float64)


def has_spread(d: np.ndarray | None) -> bool:
    """Say whether differences vary by more than rounding: what divides by their deviation needs it."""
    return d is not None and len(d) > 1 and float(np.ptp(d)) > TIE * float(np.abs(d).max())


def unit_scale(d: np.ndarray) -> np.ndarray:
    """Divide by the largest absolute value, so that no tolerance or overflow depends on the unit.  Zeros stay."""
    return d / (np.abs(d).max() or 1.0)


def reaches(means: np.ndarray, observed: float) -> np.ndarray:
    """Say which resampled means are at least as far from 0 as the observed one; ties to a relative tolerance count."""
    return np.abs(means) >= abs(observed) * (1 - TIE)


def sign_flip_p(d: np.ndarray | None, flips: int = Config.flips) -> float | None:
    """Two-sided p-value of paired differences (pairs,) by sampled sign flips.

    Null hypothesis: each difference is as likely as its negative.  The flips are default_rng(0)'s, drawn in row
    blocks of bounded memory, which gives the same stream as one draw.  Good 2005, section 3.2.
    """
    if d is None:
        return None
    d, rng = unit_scale(d), np.random.default_rng(0)
    observed, hits, block = d.mean(), 0, max(1, 4_000_000 // len(d))
    for start in range(0, flips, block):
        signs = rng.choice([-1, 1], size=(min(block, flips - start), len(d)))
        hits += int(reaches((signs * d).mean(axis=1), observed).sum())
    return hits / flips


def exact_p(d: np.ndarray | None, most: int = Config.exact_pairs) -> float | None:
    """Two-sided sign-flip p-value by enumeration of all 2^n flips; None above `most` pairs or where one diverged."""
    if d is None or len(d) > most:
        return None
    if len(d) == 1 or not d.any():
        return 1.0  # every flip ties with the observed mean
    d = unit_scale(d)
    observed = d.mean()
    result = stats.permutation_test(
        (d,),
        lambda x, axis: reaches(x.mean(axis=axis), observed).astype(float),
        permutation_type="samples",
        alternative="greater",
        n_resamples=2 ** len(d),
        vectorized=True,
    )
    assert len(result.null_distribution) == 2 ** len(d)
    return float(result.pvalue)


def bootstrap_interval(d: np.ndarray | None, resamples: int = Config.resamples) -> list[float] | None:
    """95 % BCa interval of the mean difference (Efron 1987); None with one pair, without spread, or diverged."""
    if not has_spread(d):
        return None
    scale = float(np.abs(d).max())
    interval = stats.bootstrap(
        (d / scale,), np.mean, n_resamples=resamples, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    low, high = printed(interval.low * scale), printed(interval.high * scale)
    return None if low is None or high is None else [low, high]


def detectable_difference(d: np.ndarray | None, config: Config) -> float | None:
    """Return the smallest mean difference that a two-sided paired t-test finds with 80 % power at this n and spread."""
    if not has_spread(d):
        return None
    spread = stats.chi(len(d) - 1, scale=1 / math.sqrt(len(d) - 1))  # of the estimated over the true deviation
    critical = stats.t.ppf(1 - config.significance / 2, len(d) - 1)

    def missing_power(shift: float) -> float:
        return spread.expect(lambda s: stats.norm.sf(critical * s - shift)) - config.power

    shift = optimize.brentq(missing_power, 0.0, 3 * critical + 10)
    return printed(shift * float(np.std(d, ddof=1)) / math.sqrt(len(d)))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction for several tests (Scand. J. Stat. 6, 65); None where any p is missing."""
    if None in p_values:
        return [None] * len(p_values)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return [printed(p) for p in corrected]


def verdict(delta: float | None, p: float | None, diverged: str, significance: float = Config.significance) -> str:
    """Return the verdict of a comparison; `diverged` names the diverged pairs where p is None."""
    if delta is None or p is None:
        return f"not judged: {diverged}"
    if delta == 0 and p == 1.0:
        return "no difference"
    word = "worse" if delta > 0 else "better"
    return f"idea {word} ({'' if p < significance else 'not '}significant)"


def diverged_pairs(first: Sequence[float | None], second: Sequence[float | None], seeds: Sequence[int]) -> str:
    """Name the seeds at which baseline or idea diverged."""
    parts = []
    for name, scores in (("baseline", first), ("idea", second)):
        lost = [str(seed) for seed, score in zip(seeds, scores, strict=True) if score is None]
        if lost:
            parts.append(f"{name} diverged at seed {', '.join(lost)}")
    return "; ".join(parts)


def comparison(first: Sequence[float | None], second: Sequence[float | None], seeds: Sequence[int]) -> dict[str, Any]:
    """Compare printed scores by seed, baseline first: the report's block of this name."""
    d = differences(first, second)
    delta, p = (None, None) if d is None else (printed(float(d.mean())), printed(sign_flip_p(d)))
    text = verdict(delta, p, diverged_pairs(first, second, seeds)) if d is None or d.any() else "no difference"
    finite = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return {
        "delta_mean": delta,
        "idea_wins": sum(b < a for a, b in finite),
        "n_pairs": len(first),
        "p_value": p,
        "verdict": text,
        "system_worked": text == "idea better (significant)",
    }


# ---------------------------------------------------------------------------------------------------------------------
# 10. Mechanism signature
# ---------------------------------------------------------------------------------------------------------------------

PREDICTION = "x Fourier attenuation approximately exp(-h*k^2) and transport displacement proportional to h*x"


@torch.no_grad()
def kinetic_signature(
    layer: KineticLayer, weights: Sequence[Tensor], tokens: Tensor, config: Config
) -> tuple[Tensor, Tensor]:
    """Measure attenuation a(3) / a(0) and displacement (runs,) of trained layers, gates frozen at their values.

    tokens (runs, channel, time, sequences) give the gates.  Attenuation is that of the linear branch g * W_m K(e) for
    cosine waves e in each channel, by power; displacement is that of a unit impulse in channel 0 at token T // 2
    through the whole layer, in channels.  NaN where T < 6 (attenuation) or C < 2 (displacement).
    """
    gate, mix = layer.gate(weights, tokens).double(), weights[2].double()
    runs, channels, length, _ = gate.shape
    identity = torch.eye(channels, dtype=torch.float64)

    def branch(impulses: Tensor) -> Tensor:
        return torch.einsum("rdc,rctj->rdtj", mix, layer.operator(impulses))

    def power(k: int) -> Tensor:
        wave, analysis = layer.operator.wave(k), layer.operator.analysis(k)
        response = branch(identity[:, None, :] * wave[:, None, :, None])
        coefficient = torch.einsum("rdtn,rdtj,rt->rdjn", gate + 0j, response + 0j, analysis)
        return coefficient.abs().square().mean(3).sum((1, 2)) / (wave * analysis).sum(1).abs().square()

    attenuation = torch.full((runs,), math.nan, dtype=torch.float64)
    if length >= 2 * config.wave:
        attenuation = (power(config.wave) / power(0)).sqrt()
    middle = length // 2
    impulse = torch.zeros(runs, channels, length, 1, dtype=torch.float64)
    impulse[:, 0, middle] = 1.0
    response = impulse[:, :, middle, 0] + gate[:, :, middle].mean(2) * branch(impulse)[:, :, middle, 0]
    return attenuation, displacement(response)


def displacement(response: Tensor) -> Tensor:
    """Return how far (runs,) an impulse in channel 0 has moved in response (runs, channel), modulo the channels."""
    channels = response.shape[1]
    if channels < 2:
        return torch.full((len(response),), math.nan, dtype=response.dtype)
    return -channels / (2 * math.pi) * torch.angle(torch.fft.fft(response, dim=1)[:, 1])


def signature(model: StackedModel, flat: Tensor) -> list[dict[str, float | None]]:
    """Return the signature of each run's first layer on its first test sequences; nothing for the raw model."""
    if not model.layers:
        return [{} for _ in model.runs]
    piece = slice(0, model.config.probe_sequences)
    tokens, _, _ = model.batch("test", [piece] * len(model.runs))
    layer = model.layers[0]
    with torch.no_grad():
        found = layer.signature(model.split_parameters(flat)[6 : 6 + len(layer.shapes)], tokens, model.config)
    return [{name: finite_or_none(value) for name, value in run.items()} for run in found]


def relative_error(observed: float | None, predicted: float | None) -> float | None:
    """Return abs(observed - predicted) / predicted as printed; None where either is missing or the prediction is 0."""
    if observed is None or not predicted:
        return None
    return printed(abs(observed - predicted) / abs(predicted), 7)


def confirmation(observed: float | None, predicted: float | None) -> dict[str, Any]:
    """Judge the attenuation from its printed numbers."""
    error = relative_error(observed, predicted)
    return {"attenuation_relative_error": error, "confirmed": error is not None and error <= Config.tolerance}


def seed_mean(probes: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean over the seeds of a signature's number, as printed; None where a seed lacks it."""
    values = [probe.get("signature", {}).get(name) for probe in probes]
    return None if None in values else printed(float(np.mean(values)), 7)


def mechanism_signature(config: Config, idea: Arm, length: int) -> dict[str, Any] | None:
    """Return the report's block: the kinetic layer's, or what a user's class offers of its own; else None."""
    if config.idea != "kinetic":
        return own_signature(config, idea)
    h = idea.best[1][0]
    attenuation, shift = seed_mean(idea.probes, "attenuation"), seed_mean(idea.probes, "displacement")
    predicted = printed(math.exp(-h * config.wave**2), 7)
    judged = confirmation(attenuation, predicted)
    return {
        "prediction": PREDICTION,
        "predicted_fourier_attenuation": predicted,
        "observed_fourier_attenuation": attenuation,
        "attenuation_relative_error": judged["attenuation_relative_error"],
        "predicted_transport_displacement": printed(h * (length // 2), 7),
        "observed_transport_displacement": shift,
        "confirmed": judged["confirmed"],
    }


def own_signature(config: Config, idea: Arm) -> dict[str, Any] | None:
    """Average the numbers of a user's `signature`; confirmed where each observed_X is within 10 % of predicted_X."""
    names = list(dict.fromkeys(name for probe in idea.probes for name in probe.get("signature", {})))
    if not names:
        return None
    block: dict[str, Any] = {name: seed_mean(idea.probes, name) for name in names}
    pairs = [(block[n], block.get(n.replace("observed", "predicted", 1))) for n in names if n.startswith("observed")]
    errors = [relative_error(observed, predicted) for observed, predicted in pairs]
    confirmed = bool(errors) and all(error is not None and error <= config.tolerance for error in errors)
    return block | {"confirmed": confirmed}


# ---------------------------------------------------------------------------------------------------------------------
# 11. Extensions
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def rollout(model: StackedModel, flat: Tensor) -> list[dict[str, Any]]:
    """Predict in closed loop: each prediction becomes the next position, its velocity the backward difference.

    Returns by run {"rollout": [...], "floor": [...]}: the RMSE over the first test trajectories at each horizon, in
    units of the training targets' std; the floor repeats the last measured position.  Nothing on a custom track.
    """
    config = model.config
    if model.data[0].trajectories is None:
        return [{} for _ in model.runs]
    piece = slice(0, config.probe_sequences)
    window, _, _ = model.batch("test", [piece] * len(model.runs))
    order, first = model.data[0].trajectories.order, model.data[0].trajectories.window
    history = [data.trajectories.measured[piece, -order - 1 :] for data in model.data]
    errors = [[history[i][:, -1:] - data.trajectories.position[piece, first:]] for i, data in enumerate(model.data)]
    for step in range(config.rollout_steps):
        layers = model.make_layers(step) if config.track == "irregular" else model.layers
        predicted = model(flat, window, layers=layers).double().numpy()
        tokens = []
        for i, data in enumerate(model.data):
            position = predicted[i] * data.target_std + data.target_mean
            errors[i].append(position - data.trajectories.position[piece, first + step])
            history[i] = np.column_stack([history[i][:, -order:], position])
            tokens.append(closed_loop_token(data, history[i], first + step, piece))
        window = torch.cat([window[:, :, 1:], torch.stack(tokens).to(window.dtype)[:, :, None]], 2)
    return [rollout_errors(config, data, found) for data, found in zip(model.data, errors, strict=True)]


def closed_loop_token(data: Dataset, history: np.ndarray, sample: int, piece: slice) -> Tensor:
    """Return the standardised token (channel, sequences) of a sample from the last positions (sequences, order + 1)."""
    path = data.trajectories
    recent = slice(sample - path.order, sample + 1)
    drive = None if path.drive is None else path.drive[piece, recent]
    token = encode(history, path.times[recent], drive, path.order)[:, 0]
    return torch.from_numpy(((token - data.token_mean) / data.token_std).T)


def rollout_errors(config: Config, data: Dataset, errors: list[np.ndarray]) -> dict[str, Any]:
    """Return the RMSEs at the horizons; errors has the floor's (sequences, steps), then each step's (sequences,)."""
    floor, steps = errors[0], errors[1:]

    def rmse(error: np.ndarray) -> float | None:
        return finite_or_none(float(np.sqrt(np.mean(np.square(error)))) / data.target_std)

    return {
        "rollout": [rmse(steps[horizon - 1]) for horizon in config.horizons],
        "floor": [rmse(floor[:, horizon - 1]) for horizon in config.horizons],
    }


def rollout_block(config: Config, outcome: Outcome) -> list[dict[str, Any]] | None:
    """Compare the models' closed loops at each horizon; None where the track has none or a run diverged everywhere."""
    if not any("rollout" in probe for probe in outcome.baseline.probes + outcome.idea.probes):
        return None
    rows = []
    for index, horizon in enumerate(config.horizons):
        columns = {
            name: [printed((probe.get(key) or {index: None})[index], 7) for probe in arm.probes]
            for name, arm, key in (
                ("floor", outcome.baseline, "floor"),
                ("baseline", outcome.baseline, "rollout"),
                ("idea", outcome.idea, "rollout"),
            )
        }
        means = {n: None if None in column else printed(float(np.mean(column)), 7) for n, column in columns.items()}
        p = printed(exact_p(differences(columns["baseline"], columns["idea"]), config.exact_pairs))
        per_seed = {name: columns[name] for name in ("baseline", "idea")}
        rows.append({"horizon": horizon, **means, "per_seed": per_seed, "p_exact": p})
    for row, p in zip(rows, holm([row["p_exact"] for row in rows]), strict=True):
        row["p_holm"] = p
    return rows


@torch.no_grad()
def isolated_mechanism(operator: KineticOperator, config: Config) -> dict[str, Any]:
    """Measure K alone, without gate and mixing: attenuation by mode, and displacement by token.

    Waves are equal in all channels, which transport leaves alone; an impulse is read at its own token, whose channels
    diffusion only scales.  Of several runs (an irregular clock is its seed's) the attenuation is the mean, the errors
    the largest.  Below 3 channels a displacement cannot be told, and its fields are None.
    """
    length, channels, h = operator.length, operator.channels, float(operator.h[0])
    observed = []
    for k in range(length // 2 + 1):
        wave, analysis = operator.wave(k), operator.analysis(k)
        out = operator(wave[:, None, :, None].expand(-1, channels, -1, 1))[..., 0].mean(1)
        observed.append(((out * analysis).sum(1) / (wave * analysis).sum(1)).abs().numpy())
    found, predicted = np.array(observed), np.exp(-h * np.arange(length // 2 + 1.0) ** 2)
    low = slice(0, 9)
    error = np.max(np.abs(found - predicted[:, None])[low] / np.maximum(predicted, 1e-6)[low, None])
    block = {
        "h": h,
        "attenuation": [printed(value, 7) for value in found.mean(1)],
        "attenuation_max_relative_error": printed(error, 7),
        "attenuation_confirmed": bool(error <= config.operator_tolerance),
        "displacement": None,
        "displacement_slope": None,
        "displacement_max_error": None,
        "transport_confirmed": None,
    }
    return block | (isolated_transport(operator, config) if channels >= 3 else {})


def isolated_transport(operator: KineticOperator, config: Config) -> dict[str, Any]:
    """Measure the displacement of an impulse at every token x against h x; known modulo the channels, it is read as the
    value nearest to h x.  The slope is the least-squares line's through the origin."""
    length, channels, h = operator.length, operator.channels, float(operator.h[0])
    impulses = torch.zeros(len(operator.h), channels, length, length, dtype=operator.h.dtype)
    impulses[:, 0] = torch.eye(length, dtype=operator.h.dtype)
    out = operator(impulses).diagonal(dim1=2, dim2=3)  # (runs, channel, time)
    moved = torch.stack([displacement(out[..., x]) for x in range(length)], 1).numpy()
    x = np.arange(length)
    error = (moved - h * x + channels / 2) % channels - channels / 2
    distance = (h * x + error).mean(0)
    slope = float(distance @ x / (x @ x))
    worst = float(np.abs(error).max())
    close = abs(slope - h) <= config.operator_tolerance * h + 1e-12 and worst <= config.operator_tolerance
    return {
        "displacement": [printed(value, 7) for value in distance],
        "displacement_slope": printed(slope, 7),
        "displacement_max_error": printed(worst, 7),
        "transport_confirmed": close,
    }


def statistics_block(config: Config, first: Sequence[float | None], second: Sequence[float | None]) -> dict[str, Any]:
    """Return what eight pairs can and cannot say, beyond the reference's p-value."""
    d, n = differences(first, second), len(first)
    spread, reason = has_spread(d), None
    if not spread:
        reason = "a pair diverged" if d is None else "one pair" if n == 1 else "all differences are equal"
    finite = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    return {
        "p_exact": printed(exact_p(d, config.exact_pairs)),
        "p_floor": 2.0 ** (1 - n),
        "interval_95": bootstrap_interval(d, config.resamples),
        "effect_size_dz": printed(float(d.mean() / np.std(d, ddof=1))) if spread else None,
        "detectable_difference": detectable_difference(d, config),
        "share_won": printed(sum(b < a for a, b in finite) / n) if len(finite) == n else None,
        "reason_for_null": reason,
    }


def edge(lr: float, lrs: Sequence[float]) -> str | None:
    """Say on which edge of the grid the rate lies: lower, upper, only (one rate); None inside."""
    if len(lrs) == 1:
        return "only"
    return {min(lrs): "lower", max(lrs): "upper"}.get(lr)


def config_of(row: tuple[float, Any]) -> dict[str, Any]:
    """Return a grid's row (lr, h) as the report prints it."""
    return Run(0, *row).config


def selection_block(config: Config, outcome: Outcome) -> dict[str, Any]:
    """Say whether the best rate is on the grid's edge, and what the validation split would have chosen."""
    block = {}
    for name in ("baseline", "idea"):
        arm = getattr(outcome, name)
        sound = math.isfinite(min(arm.validation))
        choice = best_row(arm.grid, arm.validation) if sound else None
        block[name] = {
            "edge": edge(arm.best[0], config.lrs),
            "validation_choice": config_of(choice) if choice else None,
            "agrees": choice == arm.best if choice else None,
        }
    return block


def flagged_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """List the sweep's rows that diverged, or that do worse than always predicting the training mean (MSE about 1)."""
    flagged = []
    for name in ("baseline", "idea", "placebo"):
        arm = getattr(outcome, name)
        for row, mean in zip(arm.grid, arm.means, strict=True):
            if mean > 1:
                reason = "worse than predicting the mean" if math.isfinite(mean) else "diverged"
                seeds = [run.seed for run in outcome.diverged if (run.lr, run.h) == row]
                flagged.append({"model": name, "cfg": config_of(row), "reason": reason, "diverged_seeds": seeds})
    return flagged


def placebo_block(config: Config, outcome: Outcome) -> dict[str, Any]:
    """Report the layer with h = 0, against baseline and idea; a delta is placebo minus the other."""
    arm = outcome.placebo
    block = {"best_cfg": config_of(arm.best), "sweep": sweep_rows(arm), "full": summary(arm.scores)}
    for name in ("baseline", "idea"):
        d = differences(getattr(outcome, name).scores, arm.scores)
        block[f"versus_{name}"] = {
            "delta_mean": None if d is None else printed(float(d.mean())),
            "placebo_wins": None if d is None else int((d < 0).sum()),
            "p_exact": printed(exact_p(d, config.exact_pairs)),
            "p_value": printed(sign_flip_p(d, config.flips)),
        }
    return block | {"parameters": arm.parameters}


def extensions(config: Config, outcome: Outcome, shape: tuple[int, int]) -> dict[str, Any]:
    """Return all that the reference report does not have."""
    isolated = moves = None
    if config.idea == "kinetic":
        seeds = config.seeds if config.track == "irregular" else config.seeds[:1]
        layer = KineticLayer(config, [Run(seed, *outcome.idea.best) for seed in seeds], 0, shape, 0)
        isolated = isolated_mechanism(layer.operator, config)
        moves = isolated.pop("transport_confirmed")
    return {
        "options": {
            "seeds": [config.seeds[0], config.seeds[-1] + 1],
            "sweep_seeds": config.sweep_seeds,
            "epochs": config.epochs,
            "dtype": config.dtype,
            "idea": config.idea if config.idea == "kinetic" else file_identity(*split_idea(config.idea)),
        },
        "statistics": statistics_block(config, outcome.baseline.scores, outcome.idea.scores),
        "selection": selection_block(config, outcome),
        "flagged": flagged_rows(outcome),
        "placebo": placebo_block(config, outcome),
        "isolated_mechanism": isolated,
        "transport_confirmed": moves,
        "rollout": rollout_block(config, outcome),
    }


# ---------------------------------------------------------------------------------------------------------------------
# 12. Report, answer and diff
# ---------------------------------------------------------------------------------------------------------------------

REPORT, OUTPUT, JOURNAL = "bench_report.json", "stage2_output.txt", ".stage2_journal.jsonl"


def split_idea(idea: str) -> tuple[str, str]:
    """Cut "path.py:Class" into path and class."""
    path, _, name = idea.rpartition(":")
    return path, name


def file_name(path: str) -> str:
    """Return a file's name without folders, as UTF-8 text in any locale."""
    return os.fsencode(Path(path).name).decode("utf-8", "backslashreplace")


def file_identity(path: str, name: str | None = None) -> dict[str, str]:
    """Return a user's file as the report names it: its name, without folders, its SHA-256, and the class if any."""
    identity = {"file": file_name(path), "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
    return identity if name is None else identity | {"class": name}


def sweep_rows(arm: Arm) -> list[dict[str, Any]]:
    """Return an arm's sweep as the report prints it; None for a diverged mean."""
    return [{"cfg": config_of(row), "mean": printed(mean)} for row, mean in zip(arm.grid, arm.means, strict=True)]


def build_report(config: Config, outcome: Outcome, shape: tuple[int, int]) -> dict[str, Any]:
    """Return the whole report, its keys in the reference's order; shape is the tokens' (channel, time)."""
    baseline, idea = outcome.baseline, outcome.idea
    name = "kinetic" if config.idea == "kinetic" else split_idea(config.idea)[1]
    built_in = config.track in TRACKS
    return {
        "bench_version": 1,
        "track": config.track if built_in else file_name(config.track).removesuffix(".py"),
        "model": f"rnn_small_{name}_vs_raw",
        "metric_direction": "lower is better",
        "n_seeds": len(config.seeds),
        "baseline": {
            "best_cfg": config_of(baseline.best),
            "sweep": sweep_rows(baseline),
            "full": summary(baseline.scores),
            "union_lr_grid": list(config.lrs),
        },
        "idea": summary(idea.scores),
        "comparison": comparison(baseline.scores, idea.scores, config.seeds),
        "mechanism_signature": mechanism_signature(config, idea, shape[1]),
        "idea_sweep": sweep_rows(idea),
        "best_idea_cfg": config_of(idea.best),
        "parameter_parity": {"baseline": baseline.parameters, "idea": idea.parameters},
        "custom_track": None if built_in else file_identity(config.track),
        "extensions": extensions(config, outcome, shape),
    }


def to_json(document: Any) -> str:
    """Serialise strictly (no NaN), indented by two spaces, with a final newline."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def write_files(folder: Path, texts: dict[str, str]) -> None:
    """Write all files or none: each whole beside its place first, then all renamed.  Raises RunError on failure."""
    parts = {name: folder / f".{name}.part" for name in texts}
    try:
        for name, text in texts.items():
            with open(parts[name], "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for name, part in parts.items():
            os.replace(part, folder / name)
    except OSError as error:
        raise RunError(
            f"cannot write {', '.join(texts)} in {folder}: {error.strerror}; older files are whole"
        ) from None
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


class Journal:
    """Finished runs on disk, a checksummed line each, under a key of everything that their numbers depend on."""

    def __init__(self, config: Config, folder: Path, resume: bool) -> None:
        self.path, self.config, self.skipped = folder / JOURNAL, config, 0
        self.known: dict[str, Record] = {}
        fixed = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if field.name not in ("seeds", "sweep_seeds", "lrs", "hs", "track", "idea")
        }
        versions = [module.__version__ for module in (torch, np, scipy)]
        sources = [__file__] + ([] if config.track in TRACKS else [config.track])
        sources += [] if config.idea == "kinetic" else [split_idea(config.idea)[0]]
        digests = [hashlib.sha256(Path(source).read_bytes()).hexdigest() for source in sources]
        self.base = json.dumps([fixed, versions, digests, Path(config.track).name, Path(config.idea).name])
        self.data: dict[int, str] = {}
        if resume:
            self._load()
        self._start_afresh = not resume

    def key(self, run: Run) -> str:
        """Return the run's key; on a custom track it covers the data themselves, wherever the file reads them."""
        if self.config.track not in TRACKS and run.seed not in self.data:
            digest, data = hashlib.sha256(), build_dataset(self.config, run.seed)
            for split in data.tokens:
                digest.update(data.tokens[split].numpy().tobytes() + data.targets[split].numpy().tobytes())
            self.data[run.seed] = digest.hexdigest()
        text = json.dumps([self.base, self.data.get(run.seed), run.seed, run.config])
        return hashlib.sha256(text.encode()).hexdigest()

    def _load(self) -> None:
        """Read the journal, later lines over earlier ones; count the lines that are torn or corrupt."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"argument --resume: cannot read {self.path}: {error.strerror}") from None
        for line in filter(None, lines):
            try:
                check, body = line.split(b" ", 1)
                if int(check, 16) != zlib.crc32(body):
                    raise ValueError("checksum")
                entry = json.loads(body)
                weights = np.frombuffer(base64.b64decode(entry["weights"]), dtype=self.config.dtype)
                self.known[entry["key"]] = Record(entry["score"], entry["validation"], weights, entry["probe"])
            except (ValueError, KeyError, TypeError):
                self.skipped += 1

    def recall(self, run: Run) -> Record | None:
        """Return the record of an earlier start, if there is one."""
        return self.known.get(self.key(run)) if self.known else None

    def append(self, found: dict[Run, Record]) -> None:
        """Write new records, in one piece and to the disk.  Raises RunError where that fails."""
        lines = b""
        for run, record in found.items():
            entry = dataclasses.asdict(record) | {"key": self.key(run), "run": str(run)}
            entry["weights"] = base64.b64encode(record.weights.tobytes()).decode()
            body = json.dumps(entry, allow_nan=False).encode()
            lines += b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            if self._start_afresh:
                self.path.unlink(missing_ok=True)
            with open(self.path, "ab+") as file:
                if file.tell() and not self._ends_whole(file):
                    lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}; earlier results are whole") from None
        self._start_afresh = False

    @staticmethod
    def _ends_whole(file: Any) -> bool:
        """Say whether the last line is complete: a kill may have torn it."""
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def show(value: Any) -> str:
    """Show a report's value in a table: numbers in full, None as null."""
    if isinstance(value, str):
        return value.encode("ascii", "backslashreplace").decode()
    return json.dumps(value)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows in columns of their own width; the first column to the left, the last as it is, the rest right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join([*cells[:-1], row[-1]]).rstrip())
    return lines


def chart(differences_by_seed: Sequence[float | None], width: int = 12) -> list[str]:
    """Draw each difference as a bar from the middle: '<' to the left is better, '>' to the right worse."""
    largest = max((abs(d) for d in differences_by_seed if d is not None), default=0.0) or 1.0

    def bar(d: float | None) -> str:
        if d is None:
            return "diverged".center(2 * width + 1)
        size = math.ceil(abs(d) / largest * width)
        return f"{'<' * size:>{width}}|" if d < 0 else f"{'|':>{width + 1}}{'>' * size}"

    return [bar(d) for d in differences_by_seed]


def sweep_lines(report: dict[str, Any]) -> list[str]:
    """Return the sweep table: every row of the three arms, with what is to be said of it."""
    extra = report["extensions"]
    arms = (
        ("baseline", report["baseline"]["sweep"], report["baseline"]["best_cfg"]),
        ("idea", report["idea_sweep"], report["best_idea_cfg"]),
        ("placebo", extra["placebo"]["sweep"], extra["placebo"]["best_cfg"]),
    )
    flags = {json.dumps([f["model"], f["cfg"]]): f["reason"] for f in extra["flagged"]}
    rows = [("model", "lr", "h", "mean test MSE", "")]
    for name, sweep, best in arms:
        for row in sweep:
            notes = [flags.get(json.dumps([name, row["cfg"]])), "best" if row["cfg"] == best else None]
            side = extra["selection"].get(name, {}).get("edge")
            if row["cfg"] == best and side in ("lower", "upper"):
                notes.append(f"on the {side} edge of the grid: extend it with --lrs")
            cfg = row["cfg"]
            rows.append((name, show(cfg["lr"]), show(cfg["h"]), number(row["mean"]), ", ".join(filter(None, notes))))
    return table(rows)


def number(value: float | None, digits: int = 10) -> str:
    """Show a measured number with its printed digits, or n/a."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def pair_lines(report: dict[str, Any], seeds: Sequence[int]) -> list[str]:
    """Return a line a seed: both scores, their difference, and a bar."""
    first, second = report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"]
    deltas = [None if None in (a, b) else b - a for a, b in zip(first, second, strict=True)]
    rows = [("seed", "baseline", "idea", "idea - baseline", "  better | worse")]
    for seed, a, b, d, bar in zip(seeds, first, second, deltas, chart(deltas), strict=True):
        rows.append((str(seed), number(a), number(b), "n/a" if d is None else f"{d:+.10f}", bar))
    return table(rows)


def mechanism_lines(report: dict[str, Any]) -> list[str]:
    """Return the mechanism table, and what the operator does alone."""
    block, alone = report["mechanism_signature"], report["extensions"]["isolated_mechanism"]
    if block is None:
        return ["the idea offers no signature"]
    if "prediction" not in block:
        return [f"{name}: {show(value)}" for name, value in block.items()]
    rows = [("", "predicted", "observed", "relative error", "")]
    for title, name, note in (
        ("Fourier attenuation, k = 3", "fourier_attenuation", f"{'' if block['confirmed'] else 'not '}confirmed"),
        ("transport displacement", "transport_displacement", "not judged: gate and mixing confound it"),
    ):
        pair = block[f"observed_{name}"], block[f"predicted_{name}"]
        rows.append((title, number(pair[1], 7), number(pair[0], 7), number(relative_error(*pair), 7), note))
    moves = {True: "confirmed", False: "not confirmed", None: "not measurable"}
    return [
        *table(rows),
        f"operator alone: attenuation error at most {number(alone['attenuation_max_relative_error'], 7)} (k <= 8), "
        f"slope of the displacement {number(alone['displacement_slope'], 7)} for h = {show(alone['h'])}, "
        f"transport {moves[report['extensions']['transport_confirmed']]}",
    ]


def rollout_lines(report: dict[str, Any]) -> list[str]:
    """Return the table of the closed loops."""
    rows = [("horizon", "repeat last", "baseline", "idea", "exact p", "Holm p")]
    for row in report["extensions"]["rollout"] or ():
        values = [number(row[name], 7) for name in ("floor", "baseline", "idea", "p_exact", "p_holm")]
        rows.append((str(row["horizon"]), *values))
    return table(rows) if len(rows) > 1 else ["not on a track without built-in physics"]


def placebo_sentence(report: dict[str, Any]) -> str:
    """Say what the placebo shows: whether the operator, or gate and mixing alone, made the difference."""
    block, idea = report["extensions"]["placebo"], report["idea"]["mean"]
    if None in (block["full"]["mean"], idea):
        return "The placebo cannot be judged, as a run diverged."
    against = {}
    for name in ("baseline", "idea"):
        versus = block[f"versus_{name}"]
        p = versus["p_value"] if versus["p_exact"] is None else versus["p_exact"]
        word = "better than" if versus["delta_mean"] < 0 else "worse than"
        against[name] = f"{word if p < Config.significance else 'no different from'} the {name} (p = {p:.3g})"
    what = "the kinetic operator" if report["extensions"]["options"]["idea"] == "kinetic" else "the step h"
    cause = f"{what} itself makes a difference"
    if "no different" in against["idea"]:
        cause = f"no sign that {what}, rather than the parameters around it, matters"
    found = f"{against['baseline']} and {against['idea']}"
    return f"The placebo (h = 0, mean {block['full']['mean']:.3g}) is {found}: {cause}."


def verdict_sentence(report: dict[str, Any]) -> str:
    """Return the verdict in words, from the report's numbers alone."""
    block = report["comparison"]
    if block["p_value"] is None:
        return f"On track {show(report['track'])} the comparison is {block['verdict']}. {placebo_sentence(report)}"
    first, second = report["baseline"]["full"]["mean"], report["idea"]["mean"]
    times = f" ({second / first:.2f} times)" if first else ""
    return (
        f"On track {show(report['track'])}: {block['verdict']}. The idea's mean test MSE is {second:.4g}, the "
        f"baseline's {first:.4g}{times}, with {block['idea_wins']} of {block['n_pairs']} pairs won and "
        f"p = {block['p_value']:.4g}. {placebo_sentence(report)}"
    )


def limitations(report: dict[str, Any]) -> list[str]:
    """Return the limits of this run, from its own numbers and options."""
    extra, n = report["extensions"], report["n_seeds"]
    sentences = [f"One track ({show(report['track'])}), one architecture, {extra['options']['epochs']} epochs."]
    floor = extra["statistics"]["p_floor"]
    if floor >= Config.significance:
        sentences.append(f"{n} pairs cannot reach p < {Config.significance}: the smallest possible p is {floor:.4g}.")
    else:
        sentences.append(f"{n} pairs: no exact p below {floor:.4g} is possible.")
    if extra["statistics"]["detectable_difference"] is not None:
        least = extra["statistics"]["detectable_difference"]
        sentences.append(f"A mean difference smaller than {least:.3g} would be found in less than 80 % of repetitions.")
    for name, chosen in extra["selection"].items():
        if chosen["edge"]:
            sentences.append(
                f"The {name}'s best rate is on the grid's edge ({chosen['edge']}); --lrs extends the grid."
            )
        if chosen["agrees"] is False:
            sentences.append(f"The validation split would have chosen another configuration for the {name}.")
    sentences.append("The best configuration is chosen by the test MSE of the sweep's seeds, as in the reference.")
    block = report["mechanism_signature"]
    if block is None:
        sentences.append("The idea offers no mechanism signature.")
    elif "prediction" in block:
        sentences.append("The transport displacement of the whole layer is confounded by gate and mixing.")
    return sentences


def build_answer(report: dict[str, Any], options: str) -> dict[str, Any]:
    """Return the stage-2 answer, its keys in the specified order."""
    block = report["comparison"]
    worked, p = block["system_worked"], block["p_value"]
    confirmed = bool((report["mechanism_signature"] or {}).get("confirmed"))
    significant = p is not None and p < Config.significance and block["delta_mean"] != 0
    return {
        "worked": worked,
        "confidence": 0 if p is None else math.floor(printed(10 * (1 - p))),
        "verdict": verdict_sentence(report),
        "metrics": {
            "baseline": report["baseline"]["full"]["mean"],
            "idea": report["idea"]["mean"],
            "paired_delta": block["delta_mean"],
            "permutation_p_value": p,
            "idea_wins": block["idea_wins"],
            "n_pairs": block["n_pairs"],
            "parameter_counts": report["parameter_parity"],
        },
        "how_to_run": f"python stage2_bench.py {options}".strip(),
        "files": ["stage2_bench.py", REPORT, OUTPUT],
        "limitations": limitations(report),
        "bench_report": report,
        "system_verdict": "works" if worked else "partial" if confirmed else "fails",
        "practical_verdict": ("helps" if block["delta_mean"] < 0 else "harms") if significant else "neutral",
        "mechanism_ok": int(confirmed),
        "system_judged": p is not None,
    }


def build_log(config: Config, report: dict[str, Any], options: str, machine: str, seconds: float) -> str:
    """Return the log that a person reads, in ASCII: tables, the verdict in one sentence, the answer as JSON."""
    block, numbers = report["comparison"], report["extensions"]["statistics"]
    interval = numbers["interval_95"]
    lines = [
        f"stage2_bench: {report['model']} on track {show(report['track'])}",
        f"options: {options or 'defaults'} (seeds {config.seeds[0]}..{config.seeds[-1]}, sweep on the first "
        f"{config.sweep_seeds}, {config.epochs} epochs, {config.dtype})",
        f"machine: {machine}",
        f"wall time: {seconds:.1f} s",
        "",
        f"Sweep (mean over {config.sweep_seeds} seeds)",
        *sweep_lines(report),
        "",
        f"Pairs (test MSE of {report['parameter_parity']['baseline']} and "
        f"{report['parameter_parity']['idea']} parameters)",
        *pair_lines(report, config.seeds),
        f"mean difference {number(block['delta_mean'])}, 95 % interval "
        f"{'n/a' if interval is None else f'[{interval[0]:.10f}, {interval[1]:.10f}]'}, sampled p "
        f"{show(block['p_value'])}, exact p {show(numbers['p_exact'])}, effect d_z {show(numbers['effect_size_dz'])}",
        "",
        "Mechanism",
        *mechanism_lines(report),
        "",
        "Closed loop (RMSE in target std)",
        *rollout_lines(report),
        "",
        f"Verdict: {verdict_sentence(report)}",
    ]
    if numbers["p_floor"] >= config.significance:
        lines.append(
            f"Note: {len(config.seeds)} pairs cannot reach p < {config.significance}; "
            f"the floor is 2 / 2^n = {numbers['p_floor']:g}."
        )
    return "\n".join([*lines, "", to_json(build_answer(report, options))])


# The keys that a report must have, and how --diff treats a path: derived values must follow from the report's own
# scores, measured ones are judged by --rtol, all others are contract and must be equal.
KEYS = {
    "": "bench_version track model metric_direction n_seeds baseline idea comparison mechanism_signature idea_sweep "
    "best_idea_cfg parameter_parity custom_track",
    "baseline": "best_cfg sweep full union_lr_grid",
    "baseline.full": "mean std per_seed n",
    "idea": "mean std per_seed n",
    "comparison": "delta_mean idea_wins n_pairs p_value verdict system_worked",
    "parameter_parity": "baseline idea",
}
DERIVED = r"(full|idea)\.(mean|std)$|comparison\.(?!n_pairs)|best_(idea_)?cfg\.|signature\.(attenuation_rel|confirmed)"
MEASURED = r"\.per_seed\[|sweep\[.*mean$|signature\..*observed|^extensions\.(?!options)"
SHARED_IN_PART = (
    r"\.per_seed\[|sweep\[|union_lr_grid\[|^extensions\."  # where reports of other seeds or grids may differ
)


def strict_json(text: str) -> Any:
    """Parse JSON; raises ValueError for what is none, NaN, infinities and numbers beyond float64 included."""

    def refuse(token: str) -> Any:
        raise ValueError(f"holds {token[:24]}, which is not a JSON number of this format")

    def finite(token: str) -> float:
        return float(token) if math.isfinite(float(token)) else refuse(token)

    try:
        return json.loads(
            text,
            parse_constant=refuse,
            parse_float=finite,
            parse_int=lambda token: int(token) if len(token) < 16 else refuse(token),
        )
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def load_report(path: Path) -> dict[str, Any]:
    """Read a report and check its form.  Raises UsageError with one line on what is wrong."""
    where = f"--diff: {show(str(path))}"
    try:
        report = strict_json(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{where}: not a JSON report: {show(' '.join(str(error).split()))[:200]}") from None
    version = report.get("bench_version") if isinstance(report, dict) else None
    if version != 1 or isinstance(version, bool):
        raise UsageError(f"{where}: bench_version is {show(version)[:40]}, not 1")
    for parent, names in KEYS.items():
        block = functools.reduce(lambda value, key: value[key], filter(None, parent.split(".")), report)
        lacking = [name for name in names.split() if not isinstance(block, dict) or name not in block]
        if lacking:
            raise UsageError(f"{where}: lacks the key {parent}{'.' if parent else ''}{lacking[0]}")
    try:
        derive(report)
        flatten(report, "", first_seed(report))
    except Exception as error:  # any JSON may come here: whatever does not fit the formulas is no report
        raise UsageError(f"{where}: malformed ({show(one_line(error))[:120]})") from None
    return report


def flatten(value: Any, path: str = "", first_seed: int = 0) -> dict[str, Any]:
    """Return {path: leaf} of a report: a sweep's rows named by configuration, scores by seed, other lists by number."""
    if isinstance(value, dict):
        items = [(f".{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        names: Iterable[Any] = range(len(value))
        if path.endswith("sweep"):
            names = [json.dumps(row["cfg"]) for row in value]
        elif "per_seed" in path:
            names = [f"seed {first_seed + i}" for i in names]
        items = [(f"[{name}]", item) for name, item in zip(names, value, strict=True)]
    else:
        return {path: value}
    return {name: leaf for key, item in items for name, leaf in flatten(item, path + key, first_seed).items()}


def first_seed(report: dict[str, Any]) -> int:
    """Return the seed of a report's first pair; the reference's reports, without extensions, begin at 0."""
    return report["extensions"]["options"]["seeds"][0] if "extensions" in report else 0


def derive(report: dict[str, Any]) -> dict[str, Any]:
    """Return {path: value} of everything that follows from the report's own scores, sweeps and signature."""
    first, second = report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"]
    start = first_seed(report)
    seeds = range(start, start + len(first))
    found = {
        "comparison": comparison(first, second, seeds),
        "baseline": {"full": summary(first), "best_cfg": best_config(report["baseline"]["sweep"])},
        "idea": summary(second),
        "best_idea_cfg": best_config(report["idea_sweep"]),
    }
    block = report["mechanism_signature"]
    if block is not None and "prediction" in block:
        found["mechanism_signature"] = confirmation(
            block["observed_fourier_attenuation"], block["predicted_fourier_attenuation"]
        )
    return {path: value for path, value in flatten(found).items() if re.search(DERIVED, path)}


def best_config(sweep: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration of the row that wins a printed sweep."""
    grid = [(row["cfg"]["lr"], row["cfg"]["h"]) for row in sweep]
    lr, h = best_row(grid, [math.inf if row["mean"] is None else row["mean"] for row in sweep])
    return {"lr": lr, "h": h}


def follows(value: Any, recomputed: Any) -> bool:
    """Say whether a printed value is the recomputed one, to one unit of the last printed digit."""
    if isinstance(value, float) and isinstance(recomputed, float):
        return abs(value - recomputed) <= 1.01e-10
    return value == recomputed


def is_number(value: Any) -> bool:
    """Say whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def compare_reports(theirs: dict[str, Any], ours: dict[str, Any], rtol: float) -> list[tuple[str, Any, Any, str]]:
    """Return (path, theirs, ours, status) for every field; a status that starts with DIFFERS is a difference.

    What one report alone has of seeds, rates or extensions is said and not compared.  Derived fields need not be
    equal, but must each follow from their own report.
    """
    reports = {"theirs": theirs, "ours": ours}
    only = [name for name, report in reports.items() if "extensions" in report]
    sides = {
        name: flatten({k: v for k, v in report.items() if k != "extensions" or len(only) == 2}, "", first_seed(report))
        for name, report in reports.items()
    }
    recomputed = {name: derive(report) for name, report in reports.items()}
    rows = []
    for path in dict.fromkeys([*sides["theirs"], *sides["ours"]]):
        having = [name for name, side in sides.items() if path in side]
        wrong = [name for name in having if path in recomputed[name]]
        wrong = [name for name in wrong if not follows(sides[name][path], recomputed[name][path])]
        if wrong:
            status = f"DIFFERS: {' and '.join(wrong)} not from own scores"
        elif len(having) == 1:
            shared = re.search(SHARED_IN_PART, path)
            status = f"only in {having[0]}, not compared" if shared else f"DIFFERS: only in {having[0]}"
        else:
            status = field_status(path, sides["theirs"][path], sides["ours"][path], rtol)
        rows.append((path, *(side.get(path, "-") for side in sides.values()), status))
    if key_order(theirs) != key_order(ours):
        rows.append(("(order of keys)", "-", "-", "DIFFERS"))
    if len(only) == 1:
        rows.append(("extensions", "-", "-", f"only in {only[0]}, not compared"))
    return rows


def field_status(path: str, theirs: Any, ours: Any, rtol: float) -> str:
    """Return the status of a field that both reports have, by the class of its path."""
    numbers = is_number(theirs) and is_number(ours)
    if theirs == ours and (numbers or type(theirs) is type(ours)):
        return "same"
    if re.search(DERIVED, path):
        return "follows from its own scores"
    if numbers and re.search(MEASURED, path):
        close = abs(ours - theirs) <= rtol * max(abs(ours), abs(theirs))
        return f"{'within rtol' if close else 'DIFFERS'}{f', ratio {ours / theirs:.4g}' if theirs else ''}"
    return "DIFFERS"


def key_order(report: Any) -> Any:
    """Return the keys of a report, nested, in their order, without the extensions."""
    if isinstance(report, dict):
        return [(key, key_order(value)) for key, value in report.items() if key != "extensions"]
    return [key_order(report[0])] if isinstance(report, list) and report else None


def diff_lines(rows: Sequence[tuple[str, Any, Any, str]]) -> list[str]:
    """Return the comparison as a table, and a last line with the count."""
    cells = [("path", "theirs", "ours", "relative difference", "status")]
    for path, theirs, ours, status in rows:
        relative = ""
        if is_number(theirs) and is_number(ours) and theirs:
            relative = f"{(ours - theirs) / abs(theirs):+.3e}"
        shown = [text if len(text) <= 34 else text[:31] + "..." for text in map(show, (theirs, ours))]
        cells.append((show(path), *shown, relative, status))
    count = sum(row[3].startswith("DIFFERS") for row in rows)
    return [*table(cells), f"{count} of {len(rows)} fields differ" if count else f"no difference in {len(rows)} fields"]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the report in one figure: sweep, pairs, differences, rollout, attenuation, displacement."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "stage2"}):
        figure, axes = pyplot.subplots(2, 3, figsize=(12.5, 7.2), layout="constrained")
        panels = (draw_sweep, draw_pairs, draw_differences, draw_rollout, draw_attenuation, draw_displacement)
        for axis, panel in zip(axes.flat, panels, strict=True):
            panel(axis, report)
        verdict_text = report["comparison"]["verdict"]
        figure.suptitle(f"{report['model']} on {report['track']}: {verdict_text}".replace("$", r"\$"), fontsize=12)
        try:
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise RunError(f"--plot {path}: {error.strerror}; the report is complete") from None
        finally:
            pyplot.close(figure)


ARM_STYLE = {
    "baseline": {"color": "0.0", "marker": "o", "linestyle": "-"},
    "idea": {"color": "tab:blue", "marker": "s", "linestyle": "--"},
    "placebo": {"color": "0.55", "marker": "^", "linestyle": ":"},
}


def draw_sweep(axis: Any, report: dict[str, Any]) -> None:
    """Mean test MSE over the learning rate, a line for each arm and step size."""
    sweeps = {"baseline": report["baseline"]["sweep"], "idea": report["idea_sweep"]}
    sweeps["placebo"] = report["extensions"]["placebo"]["sweep"]
    for name, rows in sweeps.items():
        for h in dict.fromkeys(json.dumps(row["cfg"]["h"]) for row in rows):
            own = [row for row in rows if json.dumps(row["cfg"]["h"]) == h and row["mean"]]
            own.sort(key=lambda row: row["cfg"]["lr"])
            label = name if h == "null" else f"{name}, h = {h}"
            axis.plot([r["cfg"]["lr"] for r in own], [r["mean"] for r in own], label=label, **ARM_STYLE[name])
    axis.set(xscale="log", yscale=scale_of(axis), xlabel="learning rate", ylabel="mean test MSE", title="Sweep")
    rates = sorted(report["baseline"]["union_lr_grid"])
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.xaxis.minorticks_off()
    axis.legend()


def draw_pairs(axis: Any, report: dict[str, Any]) -> None:
    """Both scores of each seed, joined by a line, and the means."""
    first, second = report["baseline"]["full"], report["idea"]
    pairs = [(a, b) for a, b in zip(first["per_seed"], second["per_seed"], strict=True) if a and b]
    for pair in pairs:
        axis.plot([0, 1], pair, color="0.6", marker="o", markersize=4, linewidth=1)
    if first["mean"] and second["mean"]:
        means = [first["mean"], second["mean"]]
        axis.plot([0, 1], means, color="black", marker="D", linewidth=2.5, label="mean")
        axis.legend()
    axis.set(ylabel="test MSE (target variance = 1)", title=f"{len(pairs)} pairs", xlim=(-0.3, 1.3))
    axis.set(yscale=scale_of(axis))
    axis.set_xticks([0, 1], ["baseline", "idea"])


def draw_differences(axis: Any, report: dict[str, Any]) -> None:
    """The differences by seed, their mean and its 95 % interval."""
    first, second = report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"]
    found = [(i, b - a) for i, (a, b) in enumerate(zip(first, second, strict=True)) if None not in (a, b)]
    start = report["extensions"]["options"]["seeds"][0]
    axis.axhline(0, color="black", linewidth=1)
    axis.plot([start + i for i, _ in found], [d for _, d in found], "o", color="0.4", label="one seed")
    mean, interval = report["comparison"]["delta_mean"], report["extensions"]["statistics"]["interval_95"]
    if mean is not None:
        axis.axhline(mean, color="tab:blue", linestyle="--", label="mean")
    if interval is not None:
        axis.axhspan(*interval, color="tab:blue", alpha=0.15, label="95 % interval (BCa)")
    axis.set(xlabel="seed", ylabel="idea - baseline, test MSE", title="Paired differences (below 0: idea better)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()


def draw_rollout(axis: Any, report: dict[str, Any]) -> None:
    """Closed-loop error against the horizon."""
    rows = report["extensions"]["rollout"] or []
    labels = {"baseline": "baseline", "idea": "idea", "floor": "repeat last position"}
    styles = ARM_STYLE | {"floor": ARM_STYLE["placebo"] | {"marker": "x"}}
    for name, label in labels.items():
        known = [(row["horizon"], row[name]) for row in rows if row[name]]
        if known:
            axis.plot(*zip(*known, strict=True), label=label, **styles[name])
    axis.set(xlabel="horizon (steps)", ylabel="RMSE (target std)", title="Closed-loop rollout")
    if not rows:
        return unavailable(axis)
    axis.set(xscale="log", yscale=scale_of(axis))
    axis.set_xticks([row["horizon"] for row in rows], [str(row["horizon"]) for row in rows])
    axis.xaxis.minorticks_off()
    axis.legend()
    return None


def scale_of(axis: Any) -> str:
    """Return "log", or "linear" where nothing is drawn yet: a log axis needs a positive number."""
    return "log" if any(len(line.get_ydata()) for line in axis.get_lines()) else "linear"


def unavailable(axis: Any) -> None:
    """Say in a panel that this run has nothing to show there."""
    axis.text(0.5, 0.5, "not available for this run", ha="center", va="center", transform=axis.transAxes)


def draw_attenuation(axis: Any, report: dict[str, Any]) -> None:
    """Attenuation by mode: predicted, the operator alone, and the trained layers at k = 3."""
    alone, block = report["extensions"]["isolated_mechanism"], report["mechanism_signature"]
    axis.set(xlabel="Fourier mode k along the tokens", ylabel="attenuation", title="Diffusion")
    if alone is None:
        return unavailable(axis)
    modes = np.arange(len(alone["attenuation"]))
    axis.plot(modes, np.exp(-alone["h"] * modes**2), color="black", label="predicted exp(-h k^2)")
    axis.plot(modes, alone["attenuation"], "o", color="tab:blue", markerfacecolor="none", label="operator alone")
    if block["observed_fourier_attenuation"] is not None:
        axis.plot(
            3, block["observed_fourier_attenuation"], "k*", markersize=12, label="trained layers, relative to k = 0"
        )
    axis.set(ylim=(-0.03, 1.08), xlim=(-0.5, min(len(modes), 12) + 0.5))
    axis.legend()
    return None


def draw_displacement(axis: Any, report: dict[str, Any]) -> None:
    """Displacement by token: predicted, the operator alone, and the trained layers at the middle token."""
    alone, block = report["extensions"]["isolated_mechanism"], report["mechanism_signature"]
    axis.set(xlabel="token x", ylabel="displacement (channels)", title="Transport")
    if alone is None or alone["displacement"] is None:
        return unavailable(axis)
    tokens = np.arange(len(alone["displacement"]))
    axis.plot(tokens, alone["h"] * tokens, color="black", label="predicted h x")
    axis.plot(tokens, alone["displacement"], "o", color="tab:blue", markerfacecolor="none", label="operator alone")
    if block["observed_transport_displacement"] is not None:
        middle = len(tokens) // 2
        axis.plot(
            middle, block["observed_transport_displacement"], "k*", markersize=12, label="trained layers, confounded"
        )
    axis.legend()
    return None


# ---------------------------------------------------------------------------------------------------------------------
# 13. Command line
# ---------------------------------------------------------------------------------------------------------------------

LARGEST_SEED = 2**32
MOST_SEEDS = 10**6


class Interrupted(BaseException):
    """A signal asked the program to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and a help that survives `| head`."""

    def error(self, message: str) -> Any:
        """Raise UsageError instead of printing the usage and leaving."""
        raise UsageError(f"{message} (--help lists the options)")

    def print_help(self, file: Any = None) -> None:
        """Print the help."""
        emit(self.format_help())


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """Return a parser of whole numbers from least to most."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{show(text)} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def real(text: str, zero: bool = True) -> float:
    """Parse a finite number that is not negative, and not 0 unless zero says so."""
    number_like = re.fullmatch(r"[0-9]*\.?[0-9]*([eE][-+]?[0-9]+)?", text) and re.search(r"^\.?[0-9]", text)
    value = float(text) if number_like else math.nan
    if not math.isfinite(value) or (value == 0 and not zero):
        raise argparse.ArgumentTypeError(f"{show(text)} is not a finite number {'>= 0' if zero else '> 0'}")
    return value


def rate(text: str) -> float:
    """Parse a learning rate."""
    return real(text, zero=False)


def steps(text: str) -> tuple[float, ...]:
    """Parse a step size, or several joined by + for a multiscale stack."""
    try:
        return tuple(real(part) for part in re.split(r"(?<![eE])\+", text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{show(text)} is not a finite number >= 0, or several joined by +") from None


def seed_range(text: str) -> tuple[int, ...]:
    """Parse N, seeds 0..N-1, or A:B, seeds A..B-1."""
    found = re.fullmatch(r"(?:([0-9]{1,10}):)?([0-9]{1,10})", text)
    start, stop = (int(found[1] or 0), int(found[2])) if found else (0, 0)
    if not start < stop <= LARGEST_SEED or stop - start > MOST_SEEDS:
        raise argparse.ArgumentTypeError(f"{show(text)} is not N or A:B, from 1 to {MOST_SEEDS} seeds below 2^32")
    return tuple(range(start, stop))


def build_parser() -> Parser:
    """Return the parser of all options."""
    parser = Parser(
        prog="stage2_bench.py",
        description="Does a kinetic-mixing layer help a small GRU to predict dynamics? Writes an honest verdict.",
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser._negative_number_matcher = re.compile(r"-[0-9.]|-inf|-nan")  # values to refuse, not unknown options
    add = parser.add_argument_group("experiment").add_argument
    seeds_help = "pairs: seeds 0..N-1, or A..B-1 for a replication on fresh seeds (default: 8)"
    add("--seeds", type=seed_range, metavar="N|A:B", help=seeds_help)
    add("--sweep-seeds", type=whole(1), metavar="N", help="first seeds, for the sweep (default: 4, at most the seeds)")
    add("--lrs", type=rate, nargs="+", metavar="LR", help="learning rates of all arms (default: 0.0015 0.003 0.006)")
    add("--h", type=steps, nargs="+", metavar="H", help="step sizes; 0.02+0.08 is a multiscale stack (default: 0.08)")
    add("--epochs", type=whole(1), metavar="N", help="passes over the training split (default: 16)")
    track_help = f"data: {', '.join(TRACKS)}, or FILE.py\nthat defines make(seed, split) (default: dynamics)"
    add("--track", default="dynamics", metavar="NAME", help=track_help)
    add("--idea", default="kinetic", metavar="FILE.py:Class", help="your own token-mixing layer (default: kinetic)")
    dtype_help = "float32 is faster, its digits may vary (default: float64)"
    add("--dtype", default="float64", choices=("float64", "float32"), help=dtype_help)
    add("--smoke", action="store_true", help="2 seeds and 2 epochs, into stage2_smoke/: for continuous integration")
    add = parser.add_argument_group("execution").add_argument
    jobs_help = (
        "worker processes (default: the CPUs this process may use);\nnot under torchrun, whose ranks do the work"
    )
    add("--jobs", type=whole(1, MOST_JOBS), metavar="N", help=jobs_help)
    add("--resume", action="store_true", help="go on from the journal of an earlier start (default: start afresh)")
    add = parser.add_argument_group("output").add_argument
    add("--out-dir", type=Path, metavar="DIR", help="where the files go (default: . or stage2_smoke)")
    add("--plot", type=Path, metavar="FILE", help="draw the result: png, svg or pdf; needs matplotlib (default: no)")
    add("--quiet", action="store_true", help="no progress on stderr (default: show it)")
    diff_help = (
        "train nothing; compare bench_report.json in --out-dir with REPORT;\nstatus 0 same, 1 differs, 2 trouble"
    )
    add("--diff", type=Path, metavar="REPORT", help=diff_help)
    add("--rtol", type=real, metavar="X", help="relative tolerance of measured fields in --diff (default: 0)")
    return parser


def distinct(option: str, values: Sequence[Any] | None) -> None:
    """Raise UsageError where an option's list names a value twice."""
    for index, value in enumerate(values or ()):
        if value in values[:index]:
            name = "+".join(map(str, value)) if isinstance(value, tuple) else value
            raise UsageError(f"argument {option}: {name} is given twice")


def config_from(options: argparse.Namespace) -> Config:
    """Turn options into the experiment's configuration.  Raises UsageError where they contradict each other."""
    distinct("--lrs", options.lrs)
    distinct("--h", options.h)
    changes: dict[str, Any] = {"seeds": tuple(range(2)), "epochs": 2} if options.smoke else {}
    named = {"seeds": options.seeds, "epochs": options.epochs, "dtype": options.dtype}
    named |= {"lrs": options.lrs and tuple(options.lrs), "hs": options.h and tuple(options.h)}
    changes |= {name: value for name, value in named.items() if value is not None}
    count = len(changes.get("seeds", Config.seeds))
    if (options.sweep_seeds or 0) > count:
        raise UsageError(f"argument --sweep-seeds: {options.sweep_seeds} is more than the {count} seeds")
    changes["sweep_seeds"] = options.sweep_seeds or min(Config.sweep_seeds, count)
    changes["track"] = options.track
    if options.track not in TRACKS:
        if not options.track.endswith(".py"):
            raise UsageError(f"argument --track: {show(options.track)} is neither of {', '.join(TRACKS)} nor FILE.py")
        changes["track"] = existing_file("--track", options.track)
    if options.idea != "kinetic":
        path, name = split_idea(options.idea)
        if not path.endswith(".py") or not name.isidentifier():
            raise UsageError(f"argument --idea: {show(options.idea)} is not FILE.py:Class")
        changes["idea"] = f"{existing_file('--idea', path)}:{name}"
    return Config(**changes)


def existing_file(option: str, name: str) -> str:
    """Return the absolute path of a file that can be read.  Raises UsageError where there is none."""
    path = Path(name).absolute()
    try:
        path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"argument {option}: {show(name)}: {getattr(error, 'strerror', error)}") from None
    return str(path)


def check_track(config: Config) -> tuple[int, int]:
    """Return the tokens' shape (channel, time); of a custom track, check every seed's splits for equal shapes."""
    if config.track in TRACKS:
        return BUILT_IN_CHANNELS, config.length
    expected: dict[str, tuple[int, ...]] = {}
    for seed in config.seeds:
        for split in ("train", "test", "val"):
            tokens, targets = custom_split(config.track, seed, split)
            if expected.setdefault(split, tokens.shape) != tokens.shape or tokens.shape[1:] != expected["train"][1:]:
                wanted = expected[split] if tokens.shape != expected[split] else expected["train"]
                raise UsageError(
                    f"{config.track}: make({seed}, {split!r}): tokens have shape {tokens.shape} after {wanted}; "
                    "all seeds need equal shapes, and all splits equal T and C"
                )
            if split == "train" and np.ptp(targets) == 0:
                raise UsageError(f"{config.track}: make({seed}, 'train'): the targets are all equal; nothing to learn")
    return expected["train"][2], expected["train"][1]


def check_idea(config: Config, shape: tuple[int, int]) -> None:
    """Try the user's layer on real tokens, for every step size and the placebo's 0.

    Raises UsageError where it cannot be built, has no parameters, leaves one unused, changes shape or dtype, is not
    finite, gives two answers to one question, or mixes the sequences of a batch.
    """
    if config.idea == "kinetic":
        return
    small = config if config.track not in TRACKS else dataclasses.replace(config, sizes=(4, 1, 1))
    tokens = build_dataset(small, config.seeds[0]).tokens["train"][..., :4].permute(2, 1, 0).contiguous()
    for h in sorted({0.0, *sum(config.hs, ())}):
        where = f"{config.idea} with (channels={shape[0]}, length={shape[1]}, h={h})"
        try:
            module = build_modules(config, config.seeds[0], [h], shape)[0]
            problem = layer_problem(module, tokens)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{where}: {one_line(error)}") from error
        if problem:
            raise UsageError(f"{where}: {problem}")


def layer_problem(module: torch.nn.Module, tokens: Tensor) -> str:
    """Return what is wrong with a layer on tokens (batch, time, channel), or ""."""
    named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    if not named or len(named) != len(list(module.parameters())):
        return "has no parameters, or frozen ones"
    out = module(tokens.clone())
    if not isinstance(out, Tensor) or out.shape != tokens.shape or out.dtype != tokens.dtype:
        what = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        return f"turns tokens {tuple(tokens.shape)} {tokens.dtype} into {what}"
    if not torch.isfinite(out).all():
        return "gives NaN or infinity"
    if not torch.equal(out, module(tokens.clone())):
        return "gives two answers for the same tokens (dropout, or a state it keeps?)"
    if not torch.allclose(out[:1], module(tokens[:1].clone())):
        return "mixes the sequences of a batch (batch normalisation?)"
    if not out.requires_grad:
        return "has parameters, but its output does not depend on them"
    grads = torch.autograd.grad(out.sum(), [value for _, value in named], allow_unused=True)
    unused = [name for (name, _), grad in zip(named, grads, strict=True) if grad is None]
    return f"never uses its parameter {unused[0]}" if unused else ""


def check_folder(folder: Path) -> None:
    """Make the output folder and try it.  Raises UsageError where the files could not be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"argument --out-dir: {show(str(folder))}: {error.strerror}") from None
    for name in (REPORT, OUTPUT, JOURNAL):
        if (folder / name).is_dir():
            raise UsageError(f"argument --out-dir: {show(str(folder / name))} is a folder")


def check_plot(path: Path | None, folder: Path) -> None:
    """Raise UsageError where --plot could not be drawn or written at the end; the output folder is made later."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"argument --plot: {show(str(path))} does not end in .png, .svg or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("argument --plot: needs matplotlib, which is not installed: pip install matplotlib")
    in_place = os.access(path.parent, os.W_OK) or path.parent.absolute() == folder.absolute()
    if os.path.isdir(path) or len(os.fsencode(path.name)) > 255 or not in_place:
        raise UsageError(f"argument --plot: {show(str(path))} cannot be written")


def option_words(options: argparse.Namespace, config: Config) -> str:
    """Return the options that the result depends on, as typed, without a path of this machine."""
    words = ["--smoke"] if options.smoke else []
    if options.seeds:
        first, last = options.seeds[0], options.seeds[-1] + 1
        words += ["--seeds", f"{first}:{last}" if first else str(last)]
    words += ["--sweep-seeds", str(options.sweep_seeds)] if options.sweep_seeds else []
    words += ["--lrs", *map(repr, options.lrs)] if options.lrs else []
    words += ["--h", *("+".join(map(repr, h)) for h in options.h)] if options.h else []
    words += ["--epochs", str(options.epochs)] if options.epochs else []
    words += ["--track", Path(config.track).name] if config.track != Config.track else []
    words += ["--idea", Path(config.idea).name] if config.idea != Config.idea else []
    words += ["--dtype", config.dtype] if config.dtype != Config.dtype else []
    return show(" ".join(words))


class Progress:
    """Progress on stderr with an estimate of the time left: a live line on a terminal, else a line now and then."""

    INTERVAL = 10.0  # seconds between plain lines

    def __init__(self, total: int, quiet: bool) -> None:
        self.total, self.done, self.trained, self.start = total, 0, 0, time.monotonic()
        self.shown, self.width = self.start, 0
        self.out = None if quiet else sys.stderr
        self.live = self.out is not None and self.out.isatty()
        if self.live:
            self._write(f"\r{self.text()}")

    def text(self) -> str:
        """Return the line."""
        elapsed = time.monotonic() - self.start
        left = f", {elapsed / self.trained * (self.total - self.done):.0f} s left" if self.trained else ""
        return f"{self.done} of {self.total} runs, {elapsed:.0f} s{left if self.done < self.total else ''}"

    def advance(self, count: int, recalled: bool = False) -> None:
        """Count finished runs and show it, if it is time."""
        self.done += count
        self.trained += 0 if recalled else count
        if self.live:
            line = self.text()
            self._write(f"\r{line:<{self.width}}")
            self.width = len(line)
        elif time.monotonic() - self.shown >= self.INTERVAL:
            self.shown = time.monotonic()
            self._write(f"stage2_bench: {self.text()}\n")

    def close(self) -> None:
        """Clear the live line."""
        if self.live:
            self._write(f"\r{'':<{max(self.width, 40)}}\r")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self.out is not None:
                self.out.write(text)
                self.out.flush()


def emit(text: str) -> bool:
    """Print to stdout; says whether that went well.  A reader that left is no error: the files are complete."""
    if sys.stdout is None:
        return True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # what is still buffered must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            complain(f"stdout: {error.strerror}")
            return False
    return True


def complain(message: str) -> None:
    """Print one line on stderr, whatever line breaks the message has; nothing where stderr is closed."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"stage2_bench.py: {' '.join(message.split())}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into Interrupted, once: while leaving, further ones are ignored."""

    def stop(number: int, _: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    for each in STOP_SIGNALS:
        if before[each] is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def choose_backend(options: argparse.Namespace, config: Config) -> tuple[Alone, int]:
    """Return what completes the runs, and how many do it at once: torchrun's ranks, worker processes, or this one.

    Forking is fastest and safe while no thread pool has started: as a script on Linux, without a user's code.
    """
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        if options.jobs:
            raise UsageError("argument --jobs: not under torchrun, whose ranks do the work (--nproc-per-node)")
        return Ranks(config), int(os.environ["WORLD_SIZE"])
    jobs = min(options.jobs or available_cpus(), count_runs(config))
    if jobs == 1:
        return Alone(config), 1
    built_in = config.track in TRACKS and config.idea == "kinetic"
    return WorkerPool(config, jobs, fork=__name__ == "__main__" and sys.platform == "linux" and built_in), jobs


def count_runs(config: Config) -> int:
    """Return how many trainings a benchmark has, at the most."""
    rows = {row for grid in grids(config).values() for row in grid}
    return len(rows) * config.sweep_seeds + 3 * (len(config.seeds) - config.sweep_seeds)


def execute(config: Config, options: argparse.Namespace, folder: Path) -> tuple[Outcome, bool, int]:
    """Run the benchmark on the chosen backend, with journal and progress.

    Returns the outcome, whether this process is to write it, and the number of processes at work.
    """
    backend, jobs = choose_backend(options, config)
    with backend:
        writes = not isinstance(backend, Ranks) or backend.rank == 0
        if writes:
            check_folder(folder)
        journal = Journal(config, folder, options.resume and writes)
        if isinstance(backend, Ranks):
            journal.known = backend.gather(journal.known)[0]
        if journal.skipped:
            complain(
                f"warning: {journal.path}: {journal.skipped} torn or corrupt lines skipped; those runs train again"
            )
        progress = Progress(count_runs(config), options.quiet or not writes)
        counted: set[Run] = set()

        def count(found: Iterable[Run], recalled: bool) -> None:
            fresh = set(found) - counted
            counted.update(fresh)
            progress.advance(len(fresh), recalled)

        def recall(run: Run) -> Record | None:
            record = journal.recall(run)
            count([run] if record else [], recalled=True)
            return record

        def on_records(found: dict[Run, Record]) -> None:
            if writes:
                journal.append(found)
            count(found, recalled=False)

        try:
            return benchmark(config, Execution(config, backend, jobs, recall, on_records)), writes, jobs
        finally:
            progress.close()


def machine_line(jobs: int) -> str:
    """Return the machine and the libraries in one line, without its name."""
    libraries = f"Python {platform.python_version()}, " + ", ".join(
        f"{module.__name__} {module.__version__}" for module in (torch, np, scipy)
    )
    return f"{platform.system()} {platform.machine()}, {available_cpus()} CPUs, {jobs} processes; {libraries}"


def run(options: argparse.Namespace) -> int:
    """Check everything, run the benchmark, write and print its results.  Returns the exit status."""
    start = time.monotonic()
    if options.rtol is not None:
        raise UsageError("argument --rtol: goes with --diff")
    config = config_from(options)
    folder = output_folder(options)
    check_plot(options.plot, folder)
    shape = check_track(config)
    check_idea(config, shape)
    outcome, writes, jobs = execute(config, options, folder)
    if not writes:
        return 0
    report = build_report(config, outcome, shape)
    words, seconds = option_words(options, config), time.monotonic() - start
    log = build_log(config, report, words, machine_line(jobs), seconds)
    write_files(folder, {REPORT: to_json(report), OUTPUT: log})
    if options.plot:
        draw(report, options.plot)
    well = emit(log)
    everything_diverged = all(score is None for score in outcome.baseline.scores + outcome.idea.scores)
    return 0 if well and not everything_diverged else 1


def output_folder(options: argparse.Namespace) -> Path:
    """Return --out-dir, or its default."""
    return options.out_dir or Path("stage2_smoke" if options.smoke else ".")


def diff(options: argparse.Namespace) -> int:
    """Compare the report in --out-dir with another.  Returns the exit status of diff(1)."""
    with np.errstate(all="ignore"):  # a foreign report may hold any number
        theirs, ours = load_report(options.diff), load_report(output_folder(options) / REPORT)
        rows = compare_reports(theirs, ours, options.rtol or 0.0)
    emit("\n".join(diff_lines(rows)) + "\n")
    return int(any(row[3].startswith("DIFFERS") for row in rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; every foreseen failure is one line on stderr."""
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="backslashreplace")
    torch.set_num_threads(1)
    try:
        with signals_raise():
            options = build_parser().parse_args(argv)
            return diff(options) if options.diff else run(options)
    except UsageError as error:
        complain(f"error: {error}")
        return 2
    except RunError as error:
        complain(f"error: {error}")
        return 1
    except Interrupted as stop:
        complain(f"stopped by {signal.Signals(stop.number).name}; finished runs are kept, --resume goes on")
        return 128 + stop.number


if __name__ == "__main__":
    sys.exit(main())
