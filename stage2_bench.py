"""Does a kinetic-mixing layer help a small recurrent network to predict dynamics?

Question.  A GRU reads 32 tokens of a driven oscillator and predicts the next position.  Does it predict better
when a kinetic-mixing layer (diffusion exp(-h k^2) along the tokens, transport by h x along the channels) mixes the
tokens first?

Design.  Both models get the same data, GRU weights and batch order, seed by seed.  Both sweep one learning-rate
grid on the first seeds; then every seed is a pair at each model's best configuration, by the mean test MSE as in the
reference.  A placebo, the same layer with h = 0, has the extra parameters without the physics.  Floors that need no
network, learning curves and a knockout of the trained layer say what the verdict hangs on.

Decision rule, fixed before the data.  Two-sided sign-flip test of the paired differences of the test MSE, sampled as
in the reference (the exact p stands beside it): p < 0.05 is significant, and the sign of the mean difference says
better or worse.  Nothing is judged where a run diverged, or where both models are worse than predicting the mean.  The
mechanism counts as confirmed where the layer's measured Fourier attenuation is within 10 % of exp(-9 h).

Run.      python stage2_bench.py            the full benchmark
          python stage2_bench.py --smoke    2 seeds, 2 epochs: for continuous integration
          python stage2_bench.py --diff R   compare bench_report.json with the report R
          torchrun --nproc-per-node 2 stage2_bench.py
Written.  bench_report.json (a pure function of the options), stage2_output.txt (the log), and .stage2_runs/, a file
for each training, from which --resume goes on.

References.
  Cho et al. 2014, arXiv:1406.1078 (GRU); Kingma and Ba 2015, arXiv:1412.6980 (Adam).
  Kolmogorov 1934, Ann. Math. 35, 116 (the operator d_xx + x d_y); Trotter 1959 (operator splitting).
  Good 2005, Permutation, Parametric and Bootstrap Tests of Hypotheses; Horowitz and Sahni 1974, J. ACM 21, 277 (sums
  by halves); Hartigan 1969, JASA 64, 1303 (typical values); Holm 1979, Scand. J. Stat. 6, 65.

Sections.  The experiment: 1 configuration, 2 random streams, 3 tracks (data sets), 4 layers, 5 many GRUs at once,
6 training, 7 sweep and pairs, 8 statistics, 9 mechanism and closed loop.  The machinery, which nobody needs in order
to understand or change the experiment: 10 cores and hosts, 11 report and diff, 12 log and figure, 13 command line.
"""

from __future__ import annotations

import os
import signal
import warnings

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
STOP_SIGNALS = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1")  # of NumPy
if __name__ in ("__main__", "__mp_main__"):  # a script or its worker: what libraries warn of is not the user's concern
    warnings.simplefilter("ignore")  # of variables, those that the user has set stay
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "PYTHONWARNINGS": "ignore"} | ONE_THREAD | os.environ
if __name__ == "__main__" and hasattr(signal, "sigwait"):  # before any library starts a thread: `leave` takes signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

import argparse
import collections
import concurrent.futures.process
import contextlib
import copy
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
import secrets
import shlex
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import scipy
import torch
from scipy import integrate
from torch import Tensor, nn

VERSION = "2.0"

# 1. Configuration -----------------------------------------------------------------------------------------------------


def option(default: Any, flag: str, metavar: str | None, text: str, parser: str = "str", **how: Any) -> Any:
    """Declare a field of Config that the command line sets, read by a parser of section 13; `how` goes to argparse."""
    return field(default=default, metadata={"flag": flag, "parser": parser, "metavar": metavar, "help": text} | how)


@dataclass(frozen=True)
class Config:
    """Every experimental number.  The first block has options; the rest is fixed."""

    seeds: tuple[int, ...] = option((*range(8),), "--seeds", "N|A:B", "pairs: 0..N-1, or fresh A..B-1", "seed_range")
    sweep_seeds: int = option(4, "--sweep-seeds", "N", "first seeds, for the sweep; at most all", "count")
    lrs: tuple[float, ...] = option(
        (0.0015, 0.003, 0.006), "--lrs", "LR", "of all arms; auto: grows while a best is at an edge", "rate", nargs="+"
    )
    hs: tuple[tuple[float, ...], ...] = option(((0.08,),), "--h", "H", "steps; 0.02+0.08 stacks", "steps", nargs="+")
    epochs: int = option(16, "--epochs", "N", "passes over the training split", "count")
    hidden: int = option(32, "--hidden", "N", "GRU units of both models", "count")
    batch: int = option(64, "--batch", "N", "sequences a step; a short last one is kept", "count")
    track: str = option(
        "dynamics", "--track", "NAME", "dynamics, lorenz, irregular, or FILE.py with make(seed, split)", "track_name"
    )
    idea: str = option("kinetic", "--idea", "FILE.py:Class", "your own token-mixing layer", "idea_name")
    dtype: str = option("float64", "--dtype", None, "float32: faster, digits vary", choices=("float64", "float32"))

    lr_search: str = "grid"  # "auto" (--lrs auto): the grid grows until no best rate is at an edge
    growth: float = 2.0  # by which the next rate of --lrs auto lies beyond the edge
    most_growth: int = 3  # rates that --lrs auto adds on either side, at the most
    length: int = 32  # tokens of a built-in track
    sizes: tuple[int, int, int] = (512, 1024, 256)  # trajectories in train, test, val
    rollout_steps: int = 64  # samples after the tokens, for the closed loop
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's decay rates
    epsilon: float = 1e-8  # Adam's denominator offset
    clip: float = 1.0  # largest global gradient norm of a run
    probe_sequences: int = 256  # first test sequences, for learning curve, signature and rollout
    flips: int = 20_000  # sampled sign flips of the reference's p-value
    significance: float = 0.05  # a smaller p is significant
    exact_pairs: int = 40  # up to here all 2^n sign flips are counted; the halves' 2^20 sums take half a second
    tail: float = 0.025  # of the interval, on either side
    subset_pairs: int = 16  # up to here the interval is made of all subsets, above of a sample of them
    subsets: int = 9_999  # sampled subsets
    power: float = 0.8  # of the smallest detectable difference
    power_samples: int = 1_000  # simulated studies that it is read from
    learning: float = 0.9  # a model whose error fell below this share over half of its epochs is still learning
    parity: float = 0.05  # parameters that differ by a larger share are said
    horizons: tuple[int, ...] = (1, 4, 16, 64)  # rollout steps reported
    tolerance: float = 0.1  # relative error up to which the signature confirms the mechanism
    operator_tolerance: float = 0.01  # the same for the operator alone, which no training blurs

    @property
    def sweep(self) -> tuple[int, ...]:
        return self.seeds[: self.sweep_seeds]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def checkpoints(self) -> list[int]:
        """The epochs of the learning curve: 1, 2, 4, 8, ... and the last."""
        return sorted({2**i for i in range(self.epochs.bit_length())} | {self.epochs})


@dataclass(frozen=True, order=True)
class Run:
    """One training: a model's configuration and a seed.  h is None for the raw baseline."""

    seed: int
    lr: float
    h: tuple[float, ...] | None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the report prints it: h a number, or a list for a multiscale stack."""
        return {"lr": self.lr, "h": self.h if self.h is None else self.h[0] if len(self.h) == 1 else list(self.h)}

    def __str__(self) -> str:
        return f"{'baseline' if self.h is None else 'h ' + '+'.join(map(repr, self.h))} lr {self.lr!r} seed {self.seed}"


# 2. Random streams ----------------------------------------------------------------------------------------------------

STREAMS = {"train": 0, "test": 1, "val": 2, "weights": 3, "order": 4, "clock": 5}


def stream(seed: int, purpose: str) -> np.random.Generator:
    """Return a fresh generator for one purpose (a key of STREAMS) of one seed: the experiment's only randomness, but
    for a user's layer, which has torch's generator.  The statistics of section 8 sample by default_rng(0)."""
    return np.random.default_rng([seed, STREAMS[purpose]])


# 3. Tracks (data sets) ------------------------------------------------------------------------------------------------

SPLITS = ("train", "val", "test")
SOLVER_MARGIN = 1.0  # time; the solver's steps are about a tenth of it
SENSOR_NOISE = 0.005  # standard deviation of a measured oscillator's position
Simulated = tuple[np.ndarray, Any, np.ndarray | None]  # position, noise of what is measured, drive


@dataclass(frozen=True)
class Trajectories:
    """Simulated positions of one split, from which tokens, targets and the closed loop are made.

    times (samples,); position (trajectories, samples), true; measured (trajectories, window), what the tokens show;
    drive (trajectories, samples) or None; differences: how many backward differences follow the position in a token.
    """

    times: np.ndarray
    position: np.ndarray
    measured: np.ndarray
    drive: np.ndarray | None
    differences: int

    def encode(self, position: np.ndarray, samples: slice) -> np.ndarray:
        """Turn positions (n, samples) of the first n trajectories into tokens (n, samples - differences, channels):
        position, its backward differences over the true intervals, drive."""
        channels, times = [position], self.times[samples]
        for _ in range(self.differences):
            channels.append(np.diff(channels[-1], axis=1) / np.diff(times))
            times = times[1:]
        channels += [] if self.drive is None else [self.drive[: len(position), samples]]
        return np.stack([channel[:, self.differences - position.shape[1] :] for channel in channels], axis=-1)


@dataclass(frozen=True)
class Track:
    """A built-in data set: its simulator, its clock, and how many backward differences follow the position in a token.

    The clock is regular, or with jitter (share of a step, to either side) uneven: diffusion then acts on true times.
    """

    simulate: Callable[..., Simulated]
    step: float
    start: float = 0.0
    jitter: float = 0.0
    differences: int = 1

    def times(self, config: Config, seed: int) -> np.ndarray:
        """Return the sample times: those that the first token's differences need, the tokens, then the rollout's."""
        count = self.differences + config.length + config.rollout_steps
        times = self.start + self.step * np.arange(count)
        if self.jitter:
            times[1:] += self.step * stream(seed, "clock").uniform(-self.jitter, self.jitter, count)[1:]
        return times

    def split(self, config: Config, seed: int, split: str) -> Trajectories:
        """Simulate a split of a seed; only the test split is integrated past the target, for the closed loop."""
        times, window = self.times(config, seed), self.differences + config.length
        count = config.sizes[("train", "test", "val").index(split)]
        wanted = len(times) if split == "test" else window + 1
        position, noise, drive = self.simulate(config, stream(seed, split), count, times, wanted)
        return Trajectories(times, position, position[:, :window] + noise, drive, self.differences)


def solve(slope: Callable[..., Any], state: np.ndarray, times: np.ndarray, wanted: int, count: int) -> np.ndarray:
    """Integrate all trajectories at once; returns the first variable (trajectories, samples) at `wanted` times.

    The solver goes on a little: its steps up to there are then to the bit those of an integration to the last time.
    """
    end, seen = min(float(times[-1]), float(times[wanted - 1]) + SOLVER_MARGIN), times[:wanted]
    solution = integrate.solve_ivp(slope, (0.0, end), state, method="DOP853", t_eval=seen, rtol=1e-10, atol=1e-12)
    return solution.y[:count].copy()


def duffing(config: Config, rng: np.random.Generator, count: int, times: np.ndarray, wanted: int) -> Simulated:
    """Simulate q'' = -delta q' + alpha q - beta q^3 + gamma cos(omega t + phi), coefficients drawn by trajectory;
    returns position (count, wanted), sensor noise (count, window) and drive (count, samples)."""
    bounds = [(0.5, 1.5), (0.5, 1.5), (0.1, 0.4), (0.2, 0.5), (0.8, 1.6), (0.0, 2 * np.pi), (-1.5, 1.5), (-1.0, 1.0)]
    alpha, beta, delta, gamma, omega, phi, q0, v0 = (rng.uniform(low, high, count) for low, high in bounds)
    noise = SENSOR_NOISE * rng.standard_normal((count, config.length + 1))

    def slope(t: float, state: np.ndarray) -> np.ndarray:
        q, v = state[:count], state[count:]
        return np.concatenate([v, (alpha - beta * q * q) * q - delta * v + gamma * np.cos(omega * t + phi)])

    drive = gamma[:, None] * np.cos(omega[:, None] * times + phi[:, None])
    return solve(slope, np.concatenate([q0, v0]), times, wanted, count), noise, drive


def lorenz(config: Config, rng: np.random.Generator, count: int, times: np.ndarray, wanted: int) -> Simulated:
    """Simulate Lorenz-63 (sigma 10, rho 28, beta 8/3; J. Atmos. Sci. 20, 130), observed by x; no noise, no drive."""
    start = [rng.uniform(low, high, count) for low, high in ((-15.0, 15.0), (-15.0, 15.0), (10.0, 40.0))]

    def slope(_: float, state: np.ndarray) -> np.ndarray:
        x, y, z = state.reshape(3, count)
        return np.concatenate([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])

    return solve(slope, np.concatenate(start), times, wanted, count), 0.0, None


TRACKS = {
    "dynamics": Track(duffing, step=0.15),
    "lorenz": Track(lorenz, step=0.06, start=1.0, differences=2),  # so coarse that a parabola errs by 0.15 std
    "irregular": Track(duffing, step=0.15, jitter=0.2),  # below 1/4 trigonometric interpolation is well conditioned
}


def token_angles(config: Config, seed: int, start: int = 0) -> np.ndarray | None:
    """Return the angles (length,) of the tokens from number `start` on the circle of one window; None where the track's
    clock is regular."""
    track = TRACKS.get(config.track)
    if track is None or not track.jitter:
        return None
    times = track.times(config, seed)[track.differences + start :][: config.length]
    return 2 * np.pi * (times - times[0]) / (config.length * track.step)


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of the training split, by channel or target column."""

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray) -> Scale:
        """Measure columns (columns, values); a constant one has std 1.  A power of two taken out keeps the squares of
        tiny values from underflow, and changes no digit of others."""
        exponent = np.frexp(np.abs(columns).max(axis=1))[1]
        scaled = np.ldexp(columns, -exponent[:, None])
        mean, std = (np.ldexp(moment, exponent) for moment in (scaled.mean(axis=1), scaled.std(axis=1)))
        constant = np.ptp(columns, axis=1) == 0  # whose mean and std are not exact in floating point
        return cls(np.where(constant, columns[:, 0], mean), np.where(constant, 1.0, std))

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Standardise values (..., columns)."""
        return (values - self.mean) / self.std

    def invert(self, values: np.ndarray) -> np.ndarray:
        """Return the raw values of standardised ones (..., columns)."""
        return values * self.std + self.mean


@dataclass(frozen=True)
class Dataset:
    """The splits of one seed.

    raw[split]: float64 tokens (N, T, C) and targets (N, K) as made; tokens[split] and targets[split]: the same in the
    dtype that trains, standardised by the training split; trajectories: the test split's, None on a custom track.
    """

    raw: dict[str, tuple[np.ndarray, np.ndarray]]
    tokens: dict[str, Tensor]
    targets: dict[str, Tensor]
    token_scale: Scale
    target_scale: Scale
    trajectories: Trajectories | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, tokens, target columns."""
        tokens, targets = self.raw["train"]
        return tokens.shape[2], tokens.shape[1], targets.shape[1]


@functools.lru_cache(maxsize=16)  # seeds of a worker: about 5 MB each
def build_dataset(config: Config, seed: int) -> Dataset:
    """Build the three splits of a seed, standardised by the training split."""
    raw, paths = {}, {}
    for split in SPLITS:
        if config.track in TRACKS:
            path = paths[split] = TRACKS[config.track].split(config, seed, split)
            window = path.measured.shape[1]
            raw[split] = path.encode(path.measured, slice(window)), path.position[:, window : window + 1]
        else:
            raw[split] = custom_split(config.track, seed, split)
    tokens, targets = raw["train"]
    scales = Scale.of(tokens.reshape(-1, tokens.shape[2]).T), Scale.of(np.ascontiguousarray(targets.T))
    ready = [
        {split: torch.from_numpy(scale.apply(own[i])).to(config.torch_dtype) for split, own in raw.items()}
        for i, scale in enumerate(scales)
    ]
    return Dataset(raw, *ready, *scales, paths.get("test"))


# 4. Layers ------------------------------------------------------------------------------------------------------------


def trigonometric_fit(length: int, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the trigonometric polynomials at the angles (token, function), cosines then sines, as many as tokens (the
    last sine of an even length vanishes at regular places and is left out), and the pseudo-inverse that fits them."""
    phase = angles[:, None] * np.arange(length // 2 + 1)
    basis = np.concatenate([np.cos(phase), np.sin(phase[:, 1 : (length + 1) // 2])], axis=1)
    return basis, np.linalg.pinv(basis)


def waves_and_analyses(length: int, angles: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return, for modes k = 0 to T/2 (mode, token): the waves cos(k theta), and the complex weights whose sum with a
    signal is its k-th Fourier coefficient: the FFT's, or on uneven angles the least-squares fit's."""
    modes = np.arange(length // 2 + 1)
    if angles is None:
        phase = 2 * np.pi * np.outer(modes, np.arange(length)) / length
        return np.cos(phase), np.exp(-1j * phase)
    analyses = trigonometric_fit(length, angles)[1].astype(complex)
    analyses[1 : (length + 1) // 2] -= 1j * analyses[len(modes) :]  # cosine - i sine; mode 0, and T/2, have no sine
    return np.cos(np.outer(modes, angles)), analyses[: len(modes)]


def diffusion_matrix(length: int, h: float, angles: np.ndarray | None = None) -> np.ndarray:
    """Return the matrix (token, token) that multiplies the k-th Fourier mode along the tokens by exp(-h k^2).

    At h = 0 it is the identity to the bit.  With angles (length,), the tokens' places on the circle, the modes are
    those of the least-squares fit; at regular angles that is the FFT's operator.
    """
    decay = np.exp(-h * np.arange(length // 2 + 1.0) ** 2)
    if h == 0:
        return np.eye(length)
    if angles is None:
        return np.fft.irfft(np.fft.rfft(np.eye(length), axis=0) * decay[:, None], n=length, axis=0)
    basis, coefficients = trigonometric_fit(length, angles)
    return (basis * np.concatenate([decay, decay[1 : (length + 1) // 2]])) @ coefficients


def transport_matrix(length: int, channels: int, h: float) -> np.ndarray:
    """Return the matrices (token, channel, channel) that shift token x by h x along the channels: the fractional
    circular shift, mode l times exp(-2 pi i l h x / C), its real part.  At h = 0 they are the identity to the bit."""
    if h == 0:
        return np.tile(np.eye(channels), (length, 1, 1))
    shift = h * np.arange(length)[:, None] * (np.fft.fftfreq(channels) * channels) / channels
    spectrum = np.exp(-2j * np.pi * shift)[:, :, None] * np.fft.fft(np.eye(channels), axis=0)
    return np.fft.ifft(spectrum, axis=1).real


def uniform(rng: np.random.Generator, fan: int, *shape: int) -> np.ndarray:
    """Draw weights from [-1/sqrt(fan), 1/sqrt(fan))."""
    return rng.uniform(-1 / math.sqrt(fan), 1 / math.sqrt(fan), shape)


class KineticLayer(nn.Module):
    """W_m ((1 - g) * u + g * K(u)) + b_m with the gate g = sigmoid(W_g u + b_g), by token and channel.

    K is one Lie-Trotter step of size h of the Kolmogorov operator d_xx + x d_y on the (token x, channel y) grid, both
    axes periodic: first diffusion along the tokens, then transport along the channels (Kolmogorov 1934).  Tokens u are
    (batch, token, channel).  `draw`, `place` and `signature` are what any layer may offer.
    """

    prediction = "x Fourier attenuation approximately exp(-h*k^2) and transport displacement proportional to h*x"
    judged: ClassVar = {"fourier_attenuation": "attenuation_relative_error"}  # observed_X that decides: its error
    mode = 3  # Fourier mode of the attenuation signature
    gate_bias = -2.5  # where the gate's bias starts, fitted to the reference's mean: g is about 0.08, nearly closed

    def __init__(self, channels: int, length: int, h: float) -> None:
        super().__init__()
        self.h = h
        self.gate, self.mix = nn.Linear(channels, channels), nn.Linear(channels, channels)
        nn.init.constant_(self.gate.bias, self.gate_bias)
        transport = torch.from_numpy(transport_matrix(length, channels, h)).to(self.mix.weight)
        self.register_buffer("transport", transport.mT.contiguous().mT)  # the order in which `operator` reads it
        self.register_buffer("diffusion", self.mix.weight.new_empty(length, length))
        self.place(None)

    def place(self, angles: np.ndarray | None) -> None:
        """Take the tokens' places (length,) on the circle; None: regular ones."""
        self.angles = angles
        self.diffusion.copy_(torch.from_numpy(diffusion_matrix(len(self.diffusion), self.h, angles)))

    def draw(self, rng: np.random.Generator) -> None:
        """Draw the initial weights from the run's own stream."""
        for weight in (self.gate.weight, self.gate.bias, self.mix.weight, self.mix.bias):
            weight.data.copy_(torch.from_numpy(uniform(rng, len(self.mix.bias), *weight.shape)))
        nn.init.constant_(self.gate.bias, self.gate_bias)

    def operator(self, u: Tensor) -> Tensor:
        """Return K(u)."""
        diffused = torch.tensordot(self.diffusion, u, ([1], [1]))  # (token, batch, channel)
        return (diffused @ self.transport.mT).transpose(0, 1)

    def forward(self, u: Tensor) -> Tensor:
        """Return the mixed tokens."""
        return self.mix(torch.lerp(u, self.operator(u), torch.sigmoid(self.gate(u))))  # lerp(u, k, g) = (1 - g) u + g k

    def signature(self, tokens: Tensor) -> dict[str, float]:
        """Return what the mechanism predicts, and what the layer does to these tokens."""
        return kinetic_signature(self, tokens)


LAYERS: dict[str, type[nn.Module]] = {"kinetic": KineticLayer}


@contextlib.contextmanager
def computing(config: Config) -> Iterator[None]:
    """Compute in the dtype that trains, also what a user's layer makes anew; what libraries warn of is not said."""
    before = torch.get_default_dtype()
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        torch.set_default_dtype(config.torch_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_layers(config: Config, run: Run, channels: int, length: int) -> list[nn.Module]:
    """Construct the layers of one run, in the dtype that trains: none for the baseline, several for a stack.

    torch's generator is seeded by the run's seed, and restored afterwards; lazy parameters are initialised.
    """
    layers, dtype = [], config.torch_dtype
    with torch.random.fork_rng(devices=[]), computing(config):
        torch.manual_seed(run.seed)
        for h in run.h or ():
            layer = layer_class(config.idea)(channels, length, h)
            if any(map(nn.parameter.is_lazy, (*layer.parameters(), *layer.buffers()))):
                layer(torch.zeros(2, length, channels))
            for value in (*layer.parameters(), *layer.buffers()):
                if value.is_floating_point() or value.is_complex():
                    value.data = value.data.to(dtype.to_complex() if value.is_complex() else dtype)
            layers.append(layer)
    return layers


# 5. Many GRUs at once -------------------------------------------------------------------------------------------------

ALIGNMENT = 16  # numbers: rows of parameters and batches are multiples, so that a run's bits don't hang on its place


def pack_gru(w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """Pack GRU weights of PyTorch's gate order (r, z, n) into one matrix (runs, 4 hidden, hidden + channels + 1).

    The GRU (Cho et al. 2014) is  r, z = sigmoid(W x + b + U h + c),  n = tanh(W x + b + r (U h + c)),
    h' = (1 - z) n + z h.  With g = (h + 1) / 2, y = 1 - z and s = (n + 1) / 2 it reads
        r = sigmoid(a_r),  y = sigmoid(-a_z),  s = sigmoid(2 (a_x + r a_h)),  g' = g + y (s - g),
    where each a is linear in the column (g, x, 1): U h = 2 U g - U 1.  So all sums of a step are one product with that
    column, and give the rows (2 a_h, a_r, -a_z, 2 a_x); no tanh, and one lerp for the state.
    """
    runs, rows, channels = w_ih.shape
    hidden = rows // 3
    packed = w_ih.new_zeros(runs, 4 * hidden, hidden + channels + 1)
    packed[:, hidden:, hidden:-1] = w_ih
    packed[:, hidden:, -1] = b_ih
    packed[:, : 3 * hidden, :hidden] = 2 * w_hh.roll(hidden, 1)  # gates (r, z, n) become (n, r, z)
    packed[:, : 3 * hidden, -1] += (b_hh - w_hh.sum(2)).roll(hidden, 1)
    return packed * packed.new_tensor([2.0, 1.0, -1.0, 2.0]).repeat_interleave(hidden)[:, None]


class Scan:
    """The recurrences of many GRUs over tokens of one shape: buffers, and views of them, that every step uses again.

    columns (time + 1, runs, hidden + channels + 1, batch) hold (g, x, 1); gates (time, runs, 4 hidden, batch) the rows
    of `pack_gru`.  Slicing costs as much as arithmetic here, so all slices are made once.  What a forward pass leaves
    is read by its backward pass; in between, the same scan must not be used.  NumPy multiplies the matrices: its BLAS
    is the faster one on many processors, and takes each run's by itself, so that bits don't hang on the neighbours.
    """

    def __init__(self, tokens: Tensor, hidden: int, backward: bool) -> None:
        runs, batch, length, channels = tokens.shape
        self.hidden = hidden
        self.columns = tokens.new_empty(length + 1, runs, hidden + channels + 1, batch)
        self.columns[0, :, :hidden] = 0.5
        self.columns[:, :, -1] = 1.0
        self.inputs, states = self.columns[:-1, :, hidden:-1], self.columns[:, :, :hidden]
        gates = tokens.new_empty(length if backward else 1, runs, 4 * hidden, batch)
        self.slopes, self.scratch = torch.empty_like(gates[0]), torch.empty_like(states[0])
        self.turned = tokens.new_empty(length, runs, batch, hidden + channels + 1)  # the columns, transposed
        self.token_gradient = tokens.new_empty(length, runs, channels, batch)
        self.steps: list[tuple[Any, ...]] = []
        self.back: list[tuple[Any, ...]] = []
        for t in range(length):
            gate = gates[t if backward else 0]
            n_h, r, y, s = gate.chunk(4, 1)  # before the sigmoids: 2 a_h, a_r, -a_z, 2 a_x
            r_y = gate[:, hidden : 3 * hidden]
            self.steps.append((self.columns[t].numpy(), gate.numpy(), r_y, s, r, n_h, states[t], y, states[t + 1]))
            self.back.append((n_h, r, y, s, states[t], self.turned[t].numpy(), self.token_gradient[t].numpy()))

    def forward(self, packed: Tensor, tokens: Tensor) -> Tensor:
        """Return the last hidden state (runs, hidden, batch) of tokens (runs, batch, time, channel)."""
        self.inputs.copy_(tokens.permute(2, 0, 3, 1))
        weights = packed.detach().numpy()
        for column, gate, r_y, s, r, n_h, g, y, g_next in self.steps:
            np.matmul(weights, column, out=gate)
            r_y.sigmoid_()
            s.addcmul_(r, n_h).sigmoid_()
            torch.lerp(g, s, y, out=g_next)
        return 2 * self.columns[-1, :, : self.hidden] - 1

    def backward(self, packed: Tensor, grad_hidden: Tensor, wants_tokens: bool) -> tuple[Tensor, Tensor | None]:
        """Propagate dL/dh_T (runs, hidden, batch) back through time; returns the gradients of packed and tokens.

        slopes is what delta = dL/dg' is multiplied by to give the gradient of each row of the gates: dg'/ds = y,
        dg'/dy = s - g; ds/d(2 a_x) = s (1 - s), and through it 2 a_h (times r) and r (times 2 a_h).
        """
        hidden, slopes, scratch = self.hidden, self.slopes, self.scratch
        to_n_h, to_r, to_y, to_n_x = slopes.chunk(4, 1)
        by_gate, local = slopes.unflatten(1, (4, hidden)), slopes.numpy()
        recurrent = packed[:, : 3 * hidden, :hidden].mT.detach().numpy()
        inputs = packed[:, hidden:, hidden:-1].mT.detach().numpy()
        gradient, delta = torch.zeros_like(packed), (2 * grad_hidden).contiguous()
        share, carried = torch.empty_like(packed), torch.empty_like(delta)
        sigmoid_backward = torch.ops.aten.sigmoid_backward
        self.turned.copy_(self.columns[:-1].mT)
        for n_h, r, y, s, g, column, token_gradient in reversed(self.back):
            sigmoid_backward(y, s, grad_input=to_n_x)
            torch.mul(to_n_x, r, out=to_n_h)
            sigmoid_backward(torch.mul(to_n_x, n_h, out=scratch), r, grad_input=to_r)
            sigmoid_backward(torch.sub(s, g, out=scratch), y, grad_input=to_y)
            by_gate.mul_(delta[:, None])
            np.matmul(recurrent, local[:, : 3 * hidden], out=carried.numpy())
            delta.addcmul_(delta, y, value=-1).add_(carried)
            np.matmul(local, column, out=share.numpy())
            gradient.add_(share)
            if wants_tokens:
                np.matmul(inputs, local[:, hidden:], out=token_gradient)
        return gradient, self.token_gradient.permute(1, 3, 0, 2).contiguous() if wants_tokens else None


class StackedGRU(torch.autograd.Function):
    """The last hidden state of many GRUs at once, with a hand-derived backward pass."""

    @staticmethod
    def forward(ctx: Any, scan: Scan, tokens: Tensor, packed: Tensor) -> Tensor:
        """Return h_T (runs, hidden, batch) of tokens (runs, batch, time, channel) and the weights of `pack_gru`."""
        ctx.scan = scan
        ctx.save_for_backward(packed)
        return scan.forward(packed, tokens)

    @staticmethod
    def backward(ctx: Any, grad_hidden: Tensor) -> tuple[Tensor | None, ...]:
        gradient, grad_tokens = ctx.scan.backward(*ctx.saved_tensors, grad_hidden, ctx.needs_input_grad[1])
        return None, grad_tokens, gradient


class Model:
    """The models of several runs, side by side: raw, or behind the mixing layers that each run has for itself.

    All runs have the same number of layers.  The parameters of a run are one row of `flat` (runs, numbers), their
    gradients one row of `gradient`; the GRU's stacked weights and the layers' own tensors are views into them, so that
    optimiser, clipping and store see one matrix, and a layer sees its own parameters.
    """

    def __init__(self, config: Config, runs: Sequence[Run]) -> None:
        self.config, self.runs = config, tuple(runs)
        self.data = [build_dataset(config, run.seed) for run in runs]
        channels, length, outputs = self.data[0].shape
        self.layers = [build_layers(config, run, channels, length) for run in runs]
        rows, hidden = 3 * config.hidden, config.hidden
        shapes = [(rows, channels), (rows, hidden), (rows,), (rows,), (outputs, hidden), (outputs,)]
        edges = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        own = [[p for layer in layers for p in layer.parameters() if p.requires_grad] for layers in self.layers]
        numbers = [[p.numel() * (1 + p.is_complex()) for p in mine] for mine in own]
        self.parameters = [edges[-1] + sum(mine) for mine in numbers]  # the real numbers that train
        width = edges[-1] + max(sum(mine) + len(mine) for mine in numbers)  # `adopt` may skip one before each
        self.flat = torch.zeros(len(runs), math.ceil(width / ALIGNMENT) * ALIGNMENT, dtype=config.torch_dtype)
        self.gradient = torch.zeros_like(self.flat)
        for run, row, gradient, layers, mine in zip(runs, self.flat, self.gradient, self.layers, own, strict=True):
            rng = stream(run.seed, "weights")
            row[: edges[-1]] = torch.from_numpy(uniform(rng, hidden, edges[-1]))
            for layer in layers:
                if hasattr(layer, "draw"):
                    layer.draw(rng)
            adopt(mine, row, gradient, edges[-1])
        self.core: list[Tensor] = []  # w_ih, w_hh, b_ih, b_hh, readout weight and bias, runs in front
        for (start, stop), shape in zip(itertools.pairwise(edges), shapes, strict=True):
            self.core.append(self.flat[:, start:stop].unflatten(1, shape).requires_grad_())
            self.core[-1].grad = self.gradient[:, start:stop].unflatten(1, shape)
        self.scans: dict[Any, Scan] = {}
        self.place(0)

    def place(self, start: int) -> None:
        """Tell layers that want to know it where the window's tokens lie, from token `start` of an uneven clock on."""
        for run, layers in zip(self.runs, self.layers, strict=True):
            angles = token_angles(self.config, run.seed, start)
            for layer in layers if angles is not None else ():
                if hasattr(layer, "place"):
                    layer.place(angles)

    def batch(self, split: str, chosen: Sequence[Any]) -> tuple[list[Tensor], Tensor]:
        """Return each run's tokens (batch, time, channel), and all targets (runs, batch, outputs); chosen has each
        run's indices or slice."""
        pairs = list(zip(self.data, chosen, strict=True))
        targets = torch.stack([data.targets[split][i] for data, i in pairs])
        return [data.tokens[split][i].clone() for data, i in pairs], targets  # a layer may work in place

    def __call__(self, batches: Sequence[Tensor]) -> Tensor:
        """Predict (runs, batch, outputs) from each run's tokens (batch, time, channel)."""
        mixed = []
        for tokens, layers in zip(batches, self.layers, strict=True):
            for layer in layers:  # here alone the raw model and the idea differ
                tokens = layer(tokens)
            mixed.append(tokens)
        stacked = torch.stack(mixed)
        count, spare = stacked.shape[1], -stacked.shape[1] % ALIGNMENT
        if spare:  # sequences of zeros, so that BLAS takes the same way wherever in memory a run's numbers lie
            stacked = nn.functional.pad(stacked, (0, 0, 0, 0, 0, spare))
        key = stacked.shape, torch.is_grad_enabled()
        if key not in self.scans:
            self.scans[key] = Scan(stacked, self.config.hidden, backward=key[1])
        *weights, readout, bias = self.core
        hidden = StackedGRU.apply(self.scans[key], stacked, pack_gru(*weights))
        return (readout @ hidden)[..., :count].transpose(1, 2) + bias[:, None]


def adopt(parameters: Sequence[Tensor], row: Tensor, gradient: Tensor, start: int) -> None:
    """Move a run's parameters and gradients into its rows, from place `start` on, and make them views of those.  Each
    begins at an even place, as complex views want it."""
    for parameter in parameters:
        start += start % 2
        stop = start + parameter.numel() * (1 + parameter.is_complex())
        pieces = [row[start:stop], gradient[start:stop]]
        if parameter.is_complex():
            pieces = [torch.view_as_complex(piece.view(*parameter.shape, 2)) for piece in pieces]
        value, parameter.grad = (piece.view(parameter.shape) for piece in pieces)
        parameter.data = value.copy_(parameter.data)
        start = stop


# 6. Training ----------------------------------------------------------------------------------------------------------

PIECE = 128  # sequences that are evaluated at once: more outgrow the cache


@dataclass
class State:
    """A training between two epochs: all that it goes on from.

    weights, mean, square (numbers,): the run's row of parameters and Adam's moments; finite: whether every loss was;
    curve: the MSE on the first test sequences at the checkpoints passed.
    """

    epoch: int
    weights: np.ndarray
    mean: np.ndarray
    square: np.ndarray
    finite: bool
    curve: dict[int, float]


class Training:
    """The training of a model's runs, side by side, from the start or from states of one epoch.

    Adam with a learning rate and a gradient clip for every run (Kingma and Ba 2015; PyTorch's formulas).  Each run has
    the batch order of its own seed: one permutation an epoch, consecutive slices.
    """

    def __init__(self, model: Model, states: Sequence[State] | None = None) -> None:
        self.model, self.config, self.epoch = model, model.config, states[0].epoch if states else 0
        self.lr = torch.tensor([run.lr for run in model.runs], dtype=model.flat.dtype)[:, None]
        self.mean, self.square = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
        self.finite = torch.ones(len(model.runs), dtype=torch.bool)
        self.curves: list[dict[int, float]] = [dict(state.curve) for state in states or ()] or [{} for _ in model.runs]
        for i, state in enumerate(states or ()):
            for tensor, array in ((model.flat, state.weights), (self.mean, state.mean), (self.square, state.square)):
                tensor.data[i] = torch.from_numpy(array)
            self.finite[i] = state.finite
        self.count = len(model.data[0].targets["train"])
        self.steps = self.epoch * math.ceil(self.count / self.config.batch)
        self.orders = [stream(run.seed, "order") for run in model.runs]
        for order, _ in itertools.product(self.orders, range(self.epoch)):  # go on from where they stood
            order.permutation(self.count)

    def states(self) -> list[State]:
        """Return where every run stands."""
        arrays = (tensor.numpy().copy() for tensor in (self.model.flat, self.mean, self.square))
        rows = zip(*arrays, self.finite.tolist(), map(dict, self.curves), strict=True)
        return [State(self.epoch, *row) for row in rows]

    def run(self) -> Iterator[int]:
        """Train to the configuration's last epoch; yields after each."""
        self.measure()  # what was the last epoch of a shorter training may be a checkpoint of this one
        while self.epoch < self.config.epochs:
            orders = [torch.from_numpy(order.permutation(self.count)) for order in self.orders]
            for start in range(0, self.count, self.config.batch):
                self.learn([order[start : start + self.config.batch] for order in orders])
            self.epoch += 1
            self.measure()
            yield self.epoch

    def measure(self) -> None:
        """Note the learning curve at a checkpoint that it does not have yet."""
        if self.epoch in self.config.checkpoints and self.epoch not in self.curves[0]:
            scores = evaluate(self.model, "test", self.config.probe_sequences)
            for curve, score in zip(self.curves, scores, strict=True):
                curve[self.epoch] = float(score)

    def learn(self, chosen: Sequence[Any]) -> None:
        """Take one step, each run on its chosen sequences (indices or a slice) of the training split.

        Each run's gradient is clipped to its global norm; the parameters change in place, the gradient starts anew.
        """
        tokens, targets = self.model.batch("train", chosen)
        losses = (self.model(tokens) - targets).square().mean((1, 2))
        losses.sum().backward()
        self.finite &= torch.isfinite(losses)
        gradient = self.model.gradient
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_(torch.clamp(self.config.clip / (norm + 1e-6), max=1.0))
        self.steps += 1
        first, second = self.config.betas
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = (self.square.sqrt() / math.sqrt(1 - second**self.steps)).add_(self.config.epsilon)
        self.model.flat.sub_(self.lr / (1 - first**self.steps) * (self.mean / scale))
        gradient.zero_()


@torch.no_grad()
def evaluate(model: Model, split: str, most: int | None = None) -> np.ndarray:
    """Return the MSE (runs,) of a split, or of its first sequences, in standardised target units."""
    count, errors = len(model.data[0].targets[split][:most]), []
    for start in range(0, count, PIECE):
        tokens, targets = model.batch(split, [slice(start, min(start + PIECE, count))] * len(model.runs))
        errors.append((model(tokens) - targets).square())
    return torch.cat(errors, 1).mean((1, 2)).double().numpy()


@dataclass(frozen=True)
class Record:
    """A finished run: MSEs of test and validation, None where it diverged; its state, and its number of parameters."""

    score: float | None
    validation: float | None
    state: State
    parameters: int


def records(training: Training) -> list[Record]:
    """Score finished runs.  A run whose loss or score was ever not finite has diverged."""
    scores = np.array([evaluate(training.model, split) for split in ("test", "val")])
    scores[:, ~(training.finite.numpy() & np.isfinite(scores[0]))] = np.nan
    printed = np.where(np.isfinite(scores), scores, None).tolist()
    return [Record(*row) for row in zip(*printed, training.states(), training.model.parameters, strict=True)]


# 7. Sweep and pairs ---------------------------------------------------------------------------------------------------

Row = tuple[float, tuple[float, ...] | None]  # a configuration: learning rate, and step sizes or None
ARMS = ("baseline", "idea", "placebo")


@dataclass(frozen=True)
class Arm:
    """One model of the comparison: its grid, the sweep's means, and the runs at its best configuration.

    means and validation: by row, inf where one of its runs diverged; lost: the sweep's seeds that diverged, by row;
    records, probes: by seed (a probe is what `probe_runs` measures of a run).
    """

    grid: tuple[Row, ...]
    means: tuple[float, ...]
    validation: tuple[float, ...]
    lost: tuple[tuple[int, ...], ...]
    records: tuple[Record, ...]
    probes: tuple[dict[str, Any], ...]

    @property
    def best(self) -> Row:
        return best_row(self.grid, self.means)

    @property
    def scores(self) -> list[float | None]:
        """The test MSE by seed, as printed."""
        return [rounded(record.score) for record in self.records]


def best_row(grid: Sequence[Row], means: Sequence[float]) -> Row:
    """Return the configuration with the lowest mean, the smaller lr (then h) on a tie; inf never beats a number."""
    return min(zip(means, grid, strict=True))[1]


def edge(value: float, values: Sequence[float]) -> str | None:
    """Say on which edge of the grid a value lies: lower, upper, only (the one value); None inside."""
    return "only" if len(values) == 1 else {min(values): "lower", max(values): "upper"}.get(value)


def grids(config: Config, lrs: Sequence[float], placebo: bool = True) -> dict[str, list[Row]]:
    """Return the grid of each arm: the same rates for all, h = 0 for the placebo, which may be left out."""
    zeros = tuple(dict.fromkeys((0.0,) * len(h) for h in config.hs))  # one for each depth of a stack
    hs = {"baseline": (None,), "idea": config.hs} | ({"placebo": zeros} if placebo else {})
    return {name: [(lr, h) for h in own for lr in lrs] for name, own in hs.items()}


def next_rates(config: Config, lrs: Sequence[float], best: Iterable[float]) -> list[float]:
    """Return the rates that join the grid of --lrs auto: beyond each edge at which one of the best rates lies."""
    edges, found = {edge(lr, lrs) for lr in best}, []
    if edges & {"lower", "only"} and sum(lr < min(config.lrs) for lr in lrs) < config.most_growth:
        found.append(min(lrs) / config.growth)
    if edges & {"upper", "only"} and sum(lr > max(config.lrs) for lr in lrs) < config.most_growth:
        found.append(max(lrs) * config.growth)
    return found


def benchmark(config: Config, backend: Any, placebo: bool = True) -> dict[str, Arm]:
    """Sweep the arms together, then run every seed at each one's best configuration; returns the arms by name.

    backend.train(runs) returns {run: Record}, backend.probe({run: Record}) returns {run: what was measured}.  The
    placebo is the one with as many layers as the winning idea, so that their parameters are equal in number; it is left
    out for an idea whose output does not depend on h.
    """
    found: dict[Run, Record] = {}

    def row_mean(row: Row, name: str = "score") -> float:
        mean = mean_of([rounded(getattr(found[Run(seed, *row)], name)) for seed in config.sweep])
        return math.inf if mean is None else mean

    def best(rows: Sequence[Row]) -> Row:
        return best_row(rows, [row_mean(row) for row in rows])

    lrs, new = list(config.lrs), list(config.lrs)
    while new:
        rows = grids(config, lrs, placebo)
        found |= backend.train([Run(seed, *row) for seed in config.sweep for grid in rows.values() for row in grid])
        new = next_rates(config, lrs, {best(rows[name])[0] for name in ARMS[:2]}) if config.lr_search == "auto" else []
        lrs = sorted([*lrs, *new])
    if placebo:
        rows["placebo"] = [(lr, h) for lr, h in rows["placebo"] if len(h) == len(best(rows["idea"])[1])]
    pairs = {name: [Run(seed, *best(grid)) for seed in config.seeds] for name, grid in rows.items()}
    found |= backend.train(list(itertools.chain(*pairs.values())))
    probes = backend.probe({run: found[run] for name in ARMS[:2] for run in pairs[name]})
    return {
        name: Arm(
            grid=tuple(grid),
            means=tuple(map(row_mean, grid)),
            validation=tuple(row_mean(row, "validation") for row in grid),
            lost=tuple(tuple(s for s in config.sweep if found[Run(s, *row)].score is None) for row in grid),
            records=tuple(found[run] for run in pairs[name]),
            probes=tuple(probes.get(run, {}) for run in pairs[name]),
        )
        for name, grid in rows.items()
    }


# 8. Statistics --------------------------------------------------------------------------------------------------------

DIGITS = 10  # of a printed score: the unit of all sums is 1e-10


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """Round a number as the report prints it; None where it is missing, NaN or infinite.  Zero has no sign."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits) + 0.0


def units(value: float, digits: int = DIGITS) -> int:
    """Return a printed number as a whole number of its last digit's units: sums, ties and signs are then exact."""
    return int(Decimal(repr(value)).scaleb(digits))


def mean_of(printed: Sequence[float | None], digits: int = DIGITS) -> float | None:
    """Return the exact mean of printed numbers, rounded to the nearest, halves to even; None where one is missing."""
    if None in printed:
        return None
    return round(Fraction(sum(units(value, digits) for value in printed), len(printed))) / 10**digits


def std_of(printed: Sequence[float | None]) -> float | None:
    """Return the population standard deviation of printed numbers, as printed; None where one is missing."""
    return None if None in printed else round(statistics.pstdev(map(Decimal, map(units, printed)))) / 10**DIGITS


def integers(values: Any, bound: int) -> np.ndarray:
    """Return whole numbers as int64, or as Python's integers where sums up to `bound` could overflow."""
    return np.array(values).astype(np.int64) if bound < 2**62 else np.array(values, dtype=object)


def statistic(method: Callable[[Pairs], Any]) -> Any:
    """Declare a property of Pairs that is computed once, and is None where a pair diverged."""
    return functools.cached_property(functools.wraps(method)(lambda self: None if self.d is None else method(self)))


@dataclass(frozen=True)
class Pairs:
    """Two models' printed scores by seed, and all that is inferred from their differences, second - first.

    The null hypothesis is that each difference is as likely as its negative (Good 2005, section 3.2).  Statistics are
    None where a pair has a diverged run (a score that is None), or where too few pairs can tell nothing.
    """

    first: Sequence[float | None]
    second: Sequence[float | None]
    config: Config

    @functools.cached_property
    def d(self) -> list[int] | None:
        """The differences in units of the last printed digit."""
        if None in (*self.first, *self.second):
            return None
        return [units(b) - units(a) for a, b in zip(self.first, self.second, strict=True)]

    @property
    def wins(self) -> int:
        """Pairs in which the second model is lower."""
        return sum(b < a for a, b in zip(self.first, self.second, strict=True) if None not in (a, b))

    @statistic
    def delta_mean(self) -> float:
        """The mean difference."""
        return round(Fraction(sum(self.d), len(self.d))) / 10**DIGITS

    @statistic
    def p_value(self) -> float:
        """Two-sided p by sampled sign flips: the share whose sum is at least as far from 0 as the observed one."""
        d, rng, flips, hits = integers(self.d, sum(map(abs, self.d))), np.random.default_rng(0), self.config.flips, 0
        for start in range(0, flips, 1000):  # in blocks, as there may be thousands of pairs
            signs = rng.choice([-1, 1], size=(min(1000, flips - start), len(d)))
            hits += int((abs(signs @ d) >= abs(sum(self.d))).sum())
        return hits / flips

    @statistic
    def p_exact(self) -> float | None:
        """Two-sided p over all 2^n sign flips; None above 40 pairs.

        The sums of the two halves' flips, sorted, are counted against each other by binary search (Horowitz and Sahni
        1974); by symmetry, as many sums lie at or below -t as at or above t.
        """
        if len(self.d) > self.config.exact_pairs:
            return None
        observed, halves = abs(sum(self.d)), []
        for half in (self.d[::2], self.d[1::2]):
            sums = integers([0], sum(map(abs, self.d)))
            for x in half:
                sums = np.concatenate([sums - x, sums + x])
            halves.append(np.sort(sums))
        reached = sum(len(halves[1]) - np.searchsorted(halves[1], observed - halves[0]))
        return min(1.0, 2 * int(reached) / 2 ** len(self.d))  # at 0, both sides count the sums that are 0

    @functools.cached_property
    def subsets(self) -> tuple[np.ndarray, int]:
        """Subsets of the pairs, (subsets, pairs) of bool: all that are not empty, or above 16 pairs a sample of them;
        and k: the k-th means from either end are the interval's."""
        n, config = len(self.first), self.config
        if n <= config.subset_pairs:
            masks = (np.arange(1, 2**n)[:, None] >> np.arange(n) & 1).astype(bool)
        else:
            masks = np.random.default_rng(0).random((config.subsets, n)) < 0.5
            masks[~masks.any(axis=1)] = True
        return masks, int(config.tail * (len(masks) + 1))

    @statistic
    def interval(self) -> list[float] | None:
        """The values of the mean difference that the test does not reject: from the k-th smallest to the k-th largest
        mean of all subsets (Hartigan 1969).  None below six pairs, which no p < 0.05 can come from."""
        masks, k = self.subsets
        if k == 0:
            return None
        sizes = masks.sum(axis=1)
        common = math.lcm(*map(int, set(sizes)))  # a mean is sum / size; times this, a whole number
        means = np.sort(
            masks.astype(object) @ np.array(self.d, object) * (common // sizes.astype(object))
        )  # Python's integers: exact
        return [round(Fraction(end, common)) / 10**DIGITS for end in (means[k - 1], means[-k])]

    @property
    def coverage(self) -> float | None:
        """The probability that the interval covers the mean of symmetric differences."""
        masks, k = self.subsets
        return None if self.interval is None else rounded(1 - 2 * k / (len(masks) + 1))

    @statistic
    def spread(self) -> Decimal | None:
        """The standard deviation of the differences (ddof 1), in units; None for one pair, or where all are equal."""
        return None if len(set(self.d)) == 1 else statistics.stdev(map(Decimal, self.d))

    @property
    def effect_size(self) -> float | None:
        """d_z, the mean over the standard deviation of the differences."""
        return None if self.spread is None else rounded(float(Decimal(sum(self.d)) / len(self.d) / self.spread))

    @functools.cached_property
    def detectable(self) -> float | None:
        """The smallest mean difference that this test finds with 80 % power at this n and spread.

        Of simulated studies with standard normal differences z, the shift that lifts the interval's lower end above 0.
        """
        if self.interval is None or self.spread is None:
            return None
        masks, k = self.subsets
        weights = masks / masks.sum(axis=1, keepdims=True)
        z = np.random.default_rng(0).standard_normal((self.config.power_samples, len(self.d)))
        needed = [-np.partition(weights @ study, k - 1)[k - 1] for study in z]
        shift = float(np.percentile(needed, 100 * self.config.power))
        return rounded(shift * float(self.spread.scaleb(-DIGITS)))

    @property
    def reason_for_null(self) -> str | None:
        """The first reason why one of the statistics is None."""
        n = len(self.first)
        reasons = {
            "a pair diverged": self.d is None,
            "one pair": n == 1,
            "five pairs or fewer": self.interval is None,
            "all differences are equal": self.spread is None,
            f"more than {self.config.exact_pairs} pairs": n > self.config.exact_pairs,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction for several tests; None where any p is missing."""
    if None in p_values:
        return [None] * len(p_values)
    order, corrected = np.argsort(p_values, kind="stable"), np.array(p_values, dtype=float)
    corrected[order] = np.maximum.accumulate(np.minimum(1.0, np.arange(len(order), 0, -1) * corrected[order]))
    return [rounded(p) for p in corrected]


def floors(data: Dataset) -> dict[str, float]:
    """Return the test MSEs, in standardised target units, of what needs no network.

    predict_mean: the training mean; repeat_last: channel 0 of the last token as the prediction, NaN for several
    targets; linear: least squares of the target on the standardised tokens and a one, fitted on the training split.
    """
    design = {}
    for split in ("train", "test"):
        tokens = data.token_scale.apply(data.raw[split][0])
        design[split] = np.column_stack([tokens.reshape(len(tokens), -1), np.ones(len(tokens))])
    truth = {split: data.target_scale.apply(data.raw[split][1]) for split in design}
    fit = np.linalg.lstsq(design["train"], truth["train"], rcond=1e-7)[0]  # at the default's, digits are rounding
    last = data.target_scale.apply(data.raw["test"][0][:, -1, :1]) if truth["test"].shape[1] == 1 else math.nan
    guesses = {"predict_mean": 0.0, "repeat_last": last, "linear": design["test"] @ fit}
    return {name: float(np.square(guess - truth["test"]).mean()) for name, guess in guesses.items()}


def verdict(pairs: Pairs, seeds: Sequence[int], predict_mean: float | None = None) -> str:
    """Return the verdict of a comparison, baseline first: the decision rule of the docstring.

    predict_mean is that floor's mean, None where a report has none.
    """
    lost = []
    for name, scores in (("baseline", pairs.first), ("idea", pairs.second)):
        if None in scores:
            diverged = [str(seed) for seed, score in zip(seeds, scores, strict=True) if score is None]
            lost.append(f"{name} diverged at seed {', '.join(diverged)}")
    if lost:
        return f"not judged: {'; '.join(lost)}"
    if predict_mean is not None and min(mean_of(pairs.first), mean_of(pairs.second)) > predict_mean:
        return "not judged: both models are worse than predicting the mean"
    if not any(pairs.d):
        return "no difference"
    if pairs.p_value >= pairs.config.significance:
        return "no significant difference"
    return f"idea {'worse' if sum(pairs.d) > 0 else 'better'} (significant)"


# 9. Mechanism and closed loop -----------------------------------------------------------------------------------------


@torch.no_grad()
def kinetic_signature(layer: KineticLayer, tokens: Tensor) -> dict[str, float]:
    """Measure attenuation a(3) / a(0) and displacement of a layer, its gates frozen at their values on tokens.

    tokens (sequences, token, channel).  Attenuation is that of the kinetic branch W_m (g * K(e)) for cosine waves e in
    each channel, by power; displacement is that of a unit impulse in channel 0 at token T // 2 through the whole layer,
    in channels and modulo their number.  NaN where T < 6 (attenuation) or C < 3 (displacement).
    """
    gate = torch.sigmoid(layer.gate(tokens)).double().numpy()  # (sequence, token, channel)
    mix, transport, diffusion = (m.double().numpy() for m in (layer.mix.weight, layer.transport, layer.diffusion))
    (length, channels), mode = tokens.shape[1:], layer.mode
    waves, analyses = waves_and_analyses(length, layer.angles)

    def power(k: int) -> float:
        moved = (diffusion @ waves[k])[:, None, None] * transport  # K(e): token, channel, the wave's channel
        coefficient = mix @ np.einsum("nxe,xec,x->nec", gate, moved, analyses[k], optimize=True)
        return float(np.square(np.abs(coefficient)).mean(0).sum() / np.abs(waves[k] @ analyses[k]) ** 2)

    x, impulse, g = length // 2, np.eye(channels)[0], gate[:, length // 2].mean(0)
    response = mix @ ((1 - g) * impulse + g * (diffusion[x, x] * transport[x] @ impulse))
    return {
        "predicted_fourier_attenuation": math.exp(-layer.h * mode**2),
        "observed_fourier_attenuation": math.sqrt(power(mode) / power(0)) if length >= 2 * mode else math.nan,
        "predicted_transport_displacement": layer.h * x,
        "observed_transport_displacement": displacement(response) if channels >= 3 else math.nan,
    }


def displacement(response: np.ndarray) -> Any:
    """Return how far an impulse in channel 0 has moved in response (..., channel), modulo the channels."""
    channels = response.shape[-1]
    return -channels / (2 * np.pi) * np.angle(np.fft.fft(response, axis=-1)[..., 1])


@torch.no_grad()
def isolated_mechanism(config: Config, h: float, shape: tuple[int, ...]) -> dict[str, Any]:
    """Measure K alone, without gate and mixing: attenuation by mode, and displacement by token.

    shape: channels, tokens.  Waves are equal in all channels, which transport leaves alone; an impulse is read at its
    token, whose channels diffusion only scales.  Of uneven clocks, one a seed, the attenuation is the mean and the
    error the largest.  The displacement is unwrapped from token to token, its slope is of the least-squares line
    through the origin; None where h >= C / 2, at which it cannot be told, or C < 3.
    """
    (channels, length), modes, found = shape[:2], np.arange(shape[1] // 2 + 1), []
    clocks = [token_angles(config, seed) for seed in config.seeds]
    with computing(dataclasses.replace(config, dtype="float64")):
        layer = KineticLayer(channels, length, h)
    for angles in clocks if clocks[0] is not None else clocks[:1]:
        layer.place(angles)
        waves, analyses = waves_and_analyses(length, angles)
        moved = layer.operator(torch.from_numpy(waves)[:, :, None].expand(-1, -1, channels)).mean(2).numpy()
        found.append(np.abs((moved * analyses).sum(1) / (waves * analyses).sum(1)))
    predicted, low = np.exp(-h * modes.astype(float) ** 2), slice(0, 9)  # k > 8, or below 1e-6, is rounding
    error = float(np.max(np.abs(found - predicted)[:, low] / np.maximum(predicted, 1e-6)[low]))
    block = {
        "h": h,
        "attenuation": [rounded(value, 7) for value in np.mean(found, axis=0)],
        "attenuation_max_relative_error": rounded(error, 7),
        "attenuation_confirmed": error <= config.operator_tolerance,
    }
    told: tuple[Any, ...] = (None, None, None, None)
    if channels >= 3 and h < channels / 2:
        x, impulses = np.arange(length), layer.diffusion.diagonal()[:, None] * layer.transport[:, :, 0]
        distance = np.unwrap(displacement(impulses.numpy()), period=channels)
        slope, worst = float(distance @ x / (x @ x)), float(np.abs(distance - h * x).max())
        close = abs(slope - h) <= config.operator_tolerance * h + 1e-12 and worst <= config.operator_tolerance
        told = [rounded(value, 7) for value in distance], rounded(slope, 7), rounded(worst, 7), close
    names = ("displacement", "displacement_slope", "displacement_max_error", "transport_confirmed")
    return block | dict(zip(names, told, strict=True))


def layer_signatures(model: Model) -> list[dict[str, float]]:
    """Return what each run's first layer says of itself on its first test sequences; nothing where it has no say."""
    tokens, _ = model.batch("test", [slice(0, model.config.probe_sequences)] * len(model.runs))
    found = []
    for batch, layers in zip(tokens, model.layers, strict=True):
        said = layers[0].signature(batch) if hasattr(layers[0], "signature") else {}
        found.append({name: float(value) for name, value in said.items()})
    return found


@torch.no_grad()
def rollout(model: Model) -> list[dict[str, np.ndarray]]:
    """Predict in closed loop: each prediction becomes the next position, its velocity the backward difference.

    Returns by run the RMSEs over the first test trajectories at each horizon, in units of the training targets' std:
    of the model ("rollout"), of repeating the last measured position ("floor"), and of the training mean
    ("predict_mean").  Nothing on a custom track.
    """
    config, paths = model.config, [data.trajectories for data in model.data]
    if paths[0] is None:
        return [{} for _ in model.runs]
    piece, back, first = slice(0, config.probe_sequences), paths[0].differences, paths[0].measured.shape[1]
    window, _ = model.batch("test", [piece] * len(model.runs))
    history = [path.measured[piece, -back - 1 :] for path in paths]
    truths = [path.position[piece, first:] for path in paths]
    guesses = [{"rollout": np.empty_like(truth), "floor": last[:, -1:], "predict_mean": data.target_scale.mean}
               for truth, last, data in zip(truths, history, model.data, strict=True)]  # fmt: skip
    for step in range(config.rollout_steps):
        model.place(step)
        predicted = model(window).double().numpy()
        recent = slice(first + step - back, first + step + 1)
        for i, (data, path) in enumerate(zip(model.data, paths, strict=True)):
            history[i] = np.column_stack([history[i][:, 1:], data.target_scale.invert(predicted[i])])
            guesses[i]["rollout"][:, step] = history[i][:, -1]
            token = data.token_scale.apply(path.encode(history[i], recent))
            window[i] = torch.cat([window[i][:, 1:], torch.from_numpy(token).to(window[i].dtype)], 1)
    model.place(0)
    columns, found = np.array(config.horizons) - 1, []
    for truth, own, data in zip(truths, guesses, model.data, strict=True):
        rmse = {name: np.sqrt(np.square(guess - truth).mean(0)) for name, guess in own.items()}
        found.append({name: error[columns] / data.target_scale.std for name, error in rmse.items()})
    return found


def knockout(model: Model) -> list[float]:
    """Return the test MSE of each trained idea with h set to 0: the same weights, the identity for the operator."""
    without = Model(model.config, [dataclasses.replace(run, h=(0.0,) * len(run.h)) for run in model.runs])
    shapes = [[[p.shape for layer in own for p in layer.parameters()] for own in m.layers] for m in (model, without)]
    if shapes[0] != shapes[1]:  # another layer's weights would mean nothing
        return [math.nan] * len(model.runs)
    without.flat.data.copy_(model.flat)
    return evaluate(without, "test").tolist()


# 10. Cores and hosts --------------------------------------------------------------------------------------------------

TOKEN = secrets.token_hex(6)  # in the names of what this process and its workers are writing
FOLDERS: set[Path] = set()  # where that is
ENDING = threading.Lock()  # held by the thread that ends the program, and while a worker starts that it must know
GROUP = 16  # runs trained side by side: fewer waste time on dispatch, more gain nothing
SAVE_EVERY = 3.0  # seconds of training that a kill may cost
INTERVAL = 3.0  # seconds between two lines of progress
RENDEZVOUS = 45.0  # seconds that a rank waits for the others to start
Group = Sequence[tuple[Run, State | None]]  # runs that train together, and where they stand


class UsageError(Exception):
    """The user's options or files are wrong: one line, exit status 2, nothing trained."""


class RunError(Exception):
    """A run could not go on: one line, exit status 1."""


def sha256(*files: str) -> str:
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()


def digest(data: Dataset, *splits: str) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for split in splits for array in data.raw[split])).hexdigest()


def share_in_train(data: Dataset, split: str) -> float:
    known = {sequence.tobytes() for sequence in data.raw["train"][0]}
    return float(np.mean([sequence.tobytes() in known for sequence in data.raw[split][0]]))


@contextlib.contextmanager
def new_file(path: Path, token: str = TOKEN) -> Iterator[Any]:
    """Write a file beside its place under a name that nobody has, then rename it: it is there whole or not at all."""
    part = path.with_name(f".{token}.{secrets.token_hex(6)}.part")
    FOLDERS.add(path.parent)
    try:
        with open(part, "xb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_parts() -> None:
    """Remove what this process and workers that were killed have half written."""
    for folder in list(FOLDERS):
        with contextlib.suppress(OSError):  # there may be no such folder
            for part in list(folder.glob(f".{TOKEN}.*.part")):
                part.unlink(missing_ok=True)


class Store:
    """Trainings on disk: one .npz for a run, named by a key of all that its numbers depend on, and the epoch reached.
    The number of epochs asked for is not part of the key, and a raw run's does not name the idea.  zip has the
    checksum, the rename the atomicity.  `data` holds the digest of a custom track's data by seed."""

    def __init__(self, config: Config, folder: Path, resume: bool, data: Mapping[int, str]) -> None:
        self.folder, self.resume, self.data, self.epochs, self.rotten = folder / STORE, resume, data, config.epochs, 0
        self.must_write = True  # but for a rank on a host that does not share the first one's folder
        self.token = TOKEN  # the main process's, also in a spawned worker
        FOLDERS.add(self.folder)
        track, (path, name) = config.track, config.idea.rpartition(":")[::2]
        track = track if track in TRACKS else sha256(track, *load_file(track)[1])
        self.idea = config.idea if config.idea in LAYERS else f"{sha256(path, *load_file(path)[1])}:{name}"
        fields = ("hidden", "batch", "dtype", "length", "sizes", "rollout_steps", "betas", "epsilon", "clip")
        self.base = [getattr(config, name) for name in (*fields, "probe_sequences")]
        try:
            script = inspect.getsource(sys.modules[__name__]).encode()
            self.base += [versions(), hashlib.sha256(script).hexdigest(), track]
        except (OSError, TypeError):
            text = "the script can't read its own text, a part of a run's key: start it from a file"
            raise UsageError(text) from None

    def key(self, run: Run) -> str:
        parts = [self.base, self.data.get(run.seed), None if run.h is None else self.idea, run.seed, run.config]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]

    def files(self, run: Run) -> dict[int, Path]:
        """Return {epoch reached: file} of a run."""
        found = {path.suffixes[0][1:]: path for path in self.folder.glob(f"{self.key(run)}.*.npz") if path.is_file()}
        return {int(epoch): path for epoch, path in found.items() if epoch.isdecimal()}

    def load(self, run: Run) -> State | None:
        """Return the longest training on disk up to this command's epochs, if --resume; `rotten` counts bad files."""
        reached = self.files(run) if self.resume else {}
        for epoch in sorted((epoch for epoch in reached if epoch <= self.epochs), reverse=True):
            try:
                with np.load(reached[epoch], allow_pickle=False) as file:
                    if str(file["key"]) != self.key(run):
                        raise ValueError("another run's, under this one's name")
                    curve = {int(epoch): score for epoch, score in file["curve"].reshape(-1, 2).tolist()}
                    return State(epoch, file["weights"], file["mean"], file["square"], bool(file["finite"]), curve)
            except Exception:  # zipfile, zlib and NumPy raise a dozen kinds for a file that was bent
                self.rotten += 1
        return None

    def save(self, run: Run, state: State) -> None:
        """Write where a run stands, in place of where it stood.  Raises RunError where that fails."""
        arrays = {name: getattr(state, name) for name in ("weights", "mean", "square", "finite")}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            earlier, key = self.files(run), self.key(run)
            with new_file(self.folder / f"{key}.{state.epoch}.npz", self.token) as file:
                np.savez(file, key=key, curve=list(state.curve.items()), **arrays)
            for epoch in [epoch for epoch in earlier if epoch < state.epoch]:
                earlier[epoch].unlink(missing_ok=True)
        except OSError as error:
            if self.must_write:
                raise RunError(f"cannot write in {self.folder}: {error.strerror}; earlier results are whole") from None


def train_runs(config: Config, store: Store, group: Group, tick: Callable[[int], None]) -> dict[Run, Record]:
    """Train a group to its last epoch and score it; saved now and then, and told to `tick` by epochs of runs."""
    runs, states = zip(*group, strict=True)
    for seed in {run.seed for run in runs} & set(store.data):  # hash(), for instance, answers otherwise elsewhere
        if digest(build_dataset(config, seed), *SPLITS) != store.data[seed]:
            raise RunError(f"{config.track}: make({seed}, ...) differs in another process: seed its randomness")
    with computing(config):
        training, saved = Training(Model(config, runs), states if states[0] else None), time.monotonic()
        for epoch in training.run():
            tick(len(runs))
            if epoch == config.epochs or time.monotonic() - saved > SAVE_EVERY:
                for run, state in zip(runs, training.states(), strict=True):
                    store.save(run, state)
                saved = time.monotonic()
        return dict(zip(runs, records(training), strict=True))


def probe_runs(config: Config, group: Group, tick: Callable[[int], None]) -> dict[Run, dict[str, Any]]:
    """Measure finished runs: closed loop, of a baseline floors and facts of data, of an idea signatures, knockout."""
    runs, states = zip(*group, strict=True)
    with computing(config):
        model = Training(Model(config, runs), states).model
        found = rollout(model)
        if runs[0].h is None:
            for row, data in zip(found, model.data, strict=True):
                row |= {"floors": floors(data), "shape": data.shape, "test_digest": digest(data, "test")}
                sequences = {split: len(data.raw[split][0]) for split in SPLITS}
                row |= {"sequences": sequences, "test_in_train": share_in_train(data, "test")}
        else:
            parts = zip(layer_signatures(model), layer_signatures(Model(config, runs)), knockout(model), strict=True)
            for row, own in zip(found, parts, strict=True):
                row |= dict(zip(("signature", "untrained", "knockout"), own, strict=True))
        return dict(zip(runs, found, strict=True))


def plan(group: Group, jobs: int) -> list[Group]:
    """Share runs out into groups that can train together, in the order of seeds, as many for each job as for another.
    Together trains what has the same number of layers and stands at the same epoch, at most GROUP runs.  Dealt like
    cards, the groups of a seed come to the same job, which has its data already."""
    kinds, groups = collections.defaultdict(list), []
    for run, state in sorted(group, key=lambda pair: (pair[0].seed, pair[0].h or (), pair[0].lr)):
        kinds[-len(run.h or ()), state.epoch if state else 0].append((run, state))
    for _, members in sorted(kinds.items()):
        count = min(len(members), jobs * math.ceil(len(members) / (jobs * GROUP)))
        edges = [round(i * len(members) / count) for i in range(count + 1)]
        groups += [members[start:stop] for start, stop in itertools.pairwise(edges)]
    return groups


@contextlib.contextmanager
def failure_named(group: Group) -> Iterator[None]:
    """Turn a worker's death, or what a user's code raised, into a RunError that names the runs lost by it."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except (Exception, SystemExit) as error:
        killed = isinstance(error, concurrent.futures.process.BrokenProcessPool)
        what, lost = "a worker process was killed" if killed else one_line(error), [str(run) for run, _ in group]
        raise RunError(f"{what}; lost: {'; '.join(lost)}; --resume goes on from the rest") from error


def start_worker(counters: Any, index: int) -> None:
    """Prepare a worker: one thread, Ctrl-C left to the parent, no life without it, its own one of shared counters."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwait"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    torch.set_num_threads(1)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    def tick(count: int) -> None:
        counters[index] += count

    threading.Thread(target=follow_parent, daemon=True).start()
    work.tick = tick


def work(task: Callable[..., Any], group: Group) -> dict[Run, Any]:
    return task(group, work.tick)


@contextlib.contextmanager
def workers(progress: Any, jobs: int, fork: bool) -> Iterator[Callable[..., Any]]:
    """Deal the groups to single-process executors like cards.  Raises RunError if a worker dies, or can't start."""
    before, pools = set(multiprocessing.active_children()), []

    def over(task: Callable[..., Any], groups: Sequence[Group]) -> Iterator[dict[Run, Any]]:
        waiting, counted = {}, sum(counters)
        for i, group in enumerate(groups):
            with failure_named(group), ENDING:
                waiting[pools[i % jobs].submit(work, task, group)] = group
        while waiting:
            done, _ = concurrent.futures.wait(waiting, 0.5, concurrent.futures.FIRST_COMPLETED)
            progress.tick(sum(counters) - counted)
            counted = sum(counters)
            for future in sorted(done, key=lambda future: future.exception() is not None):  # what is sound comes first
                with failure_named(waiting.pop(future)):
                    found = future.result()
                yield found

    try:
        context = multiprocessing.get_context("fork" if fork else "spawn")
        counters = context.RawArray("Q", jobs)
        os.environ |= ONE_THREAD | os.environ
        for i in range(jobs):
            pools.append(concurrent.futures.ProcessPoolExecutor(1, context, start_worker, (counters, i)))
        if __name__ == "__main__" and hasattr(signal, "sigwait"):  # only `leave` sees signals, but
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # multiprocessing has let them through by now
    except OSError as error:  # no shared memory or semaphores to be had
        raise RunError(f"worker processes can't start ({one_line(error)}): try --jobs 1") from None
    try:
        yield over
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)
        remove_parts()


class Execution:
    """Trains and probes a benchmark's runs on torchrun's ranks (gloo), which all learn every result in the same order,
    on worker processes, or here alone: `over` yields the results of a task for groups of runs.  Shows progress."""

    def __init__(self, config: Config, options: argparse.Namespace, data: Mapping[int, str]) -> None:
        self.config, self.records, self.rank, self.size = config, {}, 0, 1
        self.torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if self.torchrun and options.jobs:
            raise UsageError("argument --jobs: not under torchrun, whose ranks do the work (--nproc-per-node)")
        if self.torchrun:
            distributed = torch.distributed
            try:
                distributed.init_process_group("gloo", timeout=timedelta(seconds=RENDEZVOUS))
                self.group = distributed.new_group(backend="gloo", timeout=timedelta(days=365))
            except Exception as error:
                what = f"the ranks that RANK and WORLD_SIZE speak of did not meet within {RENDEZVOUS:.0f} s"
                raise RunError(f"{what}: start under torchrun, or unset both ({one_line(error)[:160]})") from None
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.store = Store(config, options.out_dir, options.resume, data)
        self.writes = self.store.must_write = self.rank == 0
        if self.writes:
            check_folder(options.out_dir)
        runs = sum(map(len, grids(config, config.lrs).values())) * config.sweep_seeds  # at once, of the sweep
        jobs = min(options.jobs or available_cpus(), max(runs, 3 * len(config.seeds)))
        self.jobs = self.size if self.torchrun else jobs
        self.shows = self.writes and not options.quiet
        self.start, self.shown, self.done, self.left = time.monotonic(), -math.inf, 0, 0  # epochs of runs

    def gather(self, value: Any) -> list[Any]:
        values = [value] * self.size
        try:
            if self.torchrun:
                torch.distributed.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise RunError(f"a rank was lost; --resume goes on from the rest ({one_line(error)[:120]})") from None
        return values

    def here(self, task: Callable[..., Any], groups: Sequence[Group]) -> Iterator[dict[Run, Any]]:
        """Do the groups in this process, in rounds of one a rank, after which all tell each other the results."""
        for start in range(0, len(groups), self.size):
            result, trouble = {}, ""
            try:
                for group in groups[start + self.rank : start + self.rank + 1]:
                    with failure_named(group):
                        result = task(group, lambda count: self.tick(count * self.size))
            except (UsageError, RunError) as error:  # the others wait for this rank: tell them, then fail together
                if not self.torchrun:
                    raise
                trouble = f"rank {self.rank}: {error}"
            told = self.gather((result, trouble))
            yield from (found for found, _ in told)
            if lost := "; ".join(trouble for _, trouble in told if trouble):
                raise RunError(lost)

    def tick(self, count: int) -> None:
        self.done, self.left, now = self.done + count, max(0, self.left - count), time.monotonic()
        if not self.shows or now - self.shown < INTERVAL or not self.done + self.left:
            return
        self.shown, elapsed = now, round(now - self.start)
        left = f", about {elapsed / self.done * self.left:.0f} s left" if self.done else ""
        with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be closed, or None
            sys.stderr.write(
                f"stage2_bench: {self.done} of {self.done + self.left} epochs of runs, {elapsed} s{left}\n"
            )

    def benchmark(self, placebo: bool) -> dict[str, Arm]:
        """Run the benchmark.  Forking is fastest, and safe while no thread pool has started: as a script on Linux,
        without a user's code; a spawned worker needs the script."""
        own = self.config.track in TRACKS and self.config.idea in LAYERS
        fork = __name__ == "__main__" and sys.platform == "linux" and own
        here = self.torchrun or self.jobs == 1 or not (fork or Path(__file__).is_file())
        with contextlib.nullcontext(self.here) if here else workers(self, self.jobs, fork) as self.over:
            arms = benchmark(self.config, self, placebo)
        if self.torchrun:  # after a failure the peers may be gone: torchrun ends the rest
            torch.distributed.destroy_process_group()
        return arms

    def train(self, runs: Sequence[Run]) -> dict[Run, Record]:
        """Return the records of runs, and all earlier ones; trains what is neither known nor on disk."""
        config, store = self.config, self.store
        wanted = [run for run in dict.fromkeys(runs) if run not in self.records]
        states = self.gather({run: store.load(run) for run in wanted} if self.writes else None)[0]
        if store.rotten:
            complain(f"warning: {store.folder}: {store.rotten} files could not be read; those runs train again")
            store.rotten = 0
        self.left = sum(config.epochs - (state.epoch if state else 0) for state in states.values())
        if not self.records:  # after the sweep, the pairs
            self.left += 3 * (len(config.seeds) - config.sweep_seeds) * config.epochs
        self.tick(0)
        for found in self.over(functools.partial(train_runs, config, store), plan(list(states.items()), self.jobs)):
            self.records |= found
            for run in (
                found if self.writes and self.torchrun else ()
            ):  # trained by a host that does not share this folder
                if config.epochs not in store.files(run):
                    store.save(run, found[run].state)
        return self.records

    def probe(self, found: Mapping[Run, Record]) -> dict[Run, dict[str, Any]]:
        groups = plan([(run, record.state) for run, record in found.items()], self.jobs)
        return dict(collections.ChainMap(*self.over(functools.partial(probe_runs, self.config), groups)))


def available_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, and the quota of its container (cgroup v2)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        place = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        here = Path("/sys/fs/cgroup") / (place[1] if place else "")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()
                cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


# 11. Report and diff --------------------------------------------------------------------------------------------------

REPORT, OUTPUT, STORE = "bench_report.json", "stage2_output.txt", ".stage2_runs"
# The classes of a report's fields, by a name on their way.  Measured: numbers from training, compared within --rtol.
# Derived: what `derive` makes of the others; must follow from their own report, and need not be equal.  All others are
# contract: what was run, with what, in which form; must be equal.
MEASURED = {"per_seed", "sweep", "idea_sweep", "isolated_mechanism", "mechanism_untrained", "floor"}
DERIVED = {
    *("best_cfg", "best_idea_cfg", "mean", "std", "comparison", "attenuation_relative_error", "confirmed", "best"),
    *("beaten_by", "statistics", "edge", "h_edge", "configurations", "agrees", "flagged", "p_exact", "p_holm", "ratio"),
    *("still_learning", "versus_baseline", "versus_idea"),
}
CONCLUSIONS = {
    "verdict": "comparison.verdict",
    "best configuration, baseline": "baseline.best_cfg",
    "best configuration, idea": "best_idea_cfg",
    "best configuration, placebo": "extensions.placebo.best_cfg",
    "mechanism confirmed": "mechanism_signature.confirmed",
    "parameters": "parameter_parity",
}


def best_config(sweep: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the configuration of the row that wins a printed sweep, by the rule of `best_row`."""
    means, cfgs = [math.inf if row["mean"] is None else row["mean"] for row in sweep], [row["cfg"] for row in sweep]
    order = [(mean, cfg["lr"], np.ravel(cfg["h"]).tolist()) for mean, cfg in zip(means, cfgs, strict=True)]
    best = cfgs[order.index(min(order))]
    return {"lr": best["lr"], "h": best["h"]}


def relative_error(observed: float | None, predicted: float | None) -> float | None:
    return None if observed is None or not predicted else rounded(abs(observed - predicted) / abs(predicted), 7)


def arms_of(report: Mapping[str, Any]) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Return (sweep, block of scores) of each arm of a report; no placebo where none was trained."""
    baseline, placebo = report["baseline"], report.get("extensions", {}).get("placebo", {})
    arms = {"baseline": (baseline["sweep"], baseline["full"]), "idea": (report["idea_sweep"], report["idea"])}
    return arms | ({"placebo": (placebo["sweep"], placebo["full"])} if "sweep" in placebo else {})


def derive(report: dict[str, Any], config: Config) -> dict[str, Any]:
    """Fill in the derived fields of a report, a new one or one to be checked, from the others; returns it."""
    extra, arms, block = report.get("extensions"), arms_of(report), report["mechanism_signature"]
    pairs, first, predict_mean = Pairs(*(arms[name][1]["per_seed"] for name in ARMS[:2]), config), 0, None
    for sweep, full in arms.values():
        scores = full["per_seed"]
        full |= {"mean": mean_of(scores), "std": std_of(scores), "n": len(scores)}
        for row in sweep if extra else ():  # the winner's mean is that of the first of its own scores
            if row["cfg"] == best_config(sweep):
                row["mean"] = mean_of(scores[: extra["options"]["sweep_seeds"]])
    if extra:
        derive_scores(extra, arms, pairs)
        derive_selection(extra, arms)
        first, predict_mean = extra["options"]["seeds"][0], (extra["floors"]["predict_mean"] or {}).get("mean")
    rates = list(dict.fromkeys(row["cfg"]["lr"] for row in arms["baseline"][0]))
    report["baseline"] |= {"best_cfg": best_config(arms["baseline"][0]), "union_lr_grid": rates}
    text = verdict(pairs, range(first, first + len(pairs.first)), predict_mean)
    report["best_idea_cfg"] = best_config(arms["idea"][0])
    report["comparison"] = {
        "delta_mean": pairs.delta_mean,
        "idea_wins": pairs.wins,
        "n_pairs": len(pairs.first),
        "p_value": rounded(pairs.p_value),
        "verdict": text,
        "system_worked": text == "idea better (significant)",
    }
    if block is not None:  # the built-in layer is judged by its attenuation, another by every observed_X that it gives
        built_in, errors = isinstance(block.get("prediction"), str), []
        for name in KineticLayer.judged if built_in else [key[9:] for key in block if key.startswith("observed_")]:
            errors.append(relative_error(block[f"observed_{name}"], block.get(f"predicted_{name}")))
            block |= {KineticLayer.judged[name]: errors[-1]} if built_in else {}
        block["confirmed"] = bool(errors) and all(error is not None and error <= config.tolerance for error in errors)
    return report


def half_way(curve: Sequence[Any]) -> list[Any]:
    """Return the last row of a learning curve at no more than half of its epochs, in a list; [] where there is none."""
    return [row for row in curve if row["epoch"] <= curve[-1]["epoch"] / 2][-1:]


def derive_scores(extra: dict[str, Any], arms: Mapping[str, tuple[list[Any], Any]], pairs: Pairs) -> None:
    config, curve, loop, placebo = pairs.config, extra["learning_curve"], extra["rollout"] or (), extra["placebo"]
    means = {name: full["mean"] for name, (_, full) in arms.items()}
    floors = {name: extra["floors"][name] for name in FLOOR_NAMES if extra["floors"][name]}
    for block in floors.values():
        block["mean"] = mean_of(block["per_seed"])
    best = min(floors, key=lambda name: floors[name]["mean"], default=None)
    beaten_by = [name for name, mean in means.items() if best and mean is not None and mean < floors[best]["mean"]]
    extra["floors"] |= {"best": best, "beaten_by": beaten_by}
    extra["statistics"] = {
        "p_exact": pairs.p_exact,
        "p_floor": 2.0 ** (1 - len(pairs.first)),
        "interval_95": pairs.interval,
        "interval_coverage": pairs.coverage,
        "effect_size_dz": pairs.effect_size,
        "detectable_difference": pairs.detectable,
        "share_won": None if pairs.d is None else rounded(pairs.wins / len(pairs.d)),
        "reason_for_null": pairs.reason_for_null,
    }
    for rows, names, digits in ((curve, ARMS, DIGITS), (loop, ARMS[:2], 7)):
        for row in rows:
            scores = [row["per_seed"][name] for name in names]
            row |= {n: None if own is None else mean_of(own, digits) for n, own in zip(names, scores, strict=True)}
            row["p_exact"] = Pairs(*scores[:2], config).p_exact
    for row, p in zip(loop, holm([row["p_exact"] for row in loop]), strict=True):
        row["p_holm"] = p
    for name in ARMS:
        told = [row[name] for row in (*half_way(curve), curve[-1])]
        extra["still_learning"][name] = None if len(told) < 2 or None in told else told[1] < config.learning * told[0]
    for name in ARMS[:2] if "placebo" in arms else ():
        versus = Pairs(arms[name][1]["per_seed"], arms["placebo"][1]["per_seed"], config)
        own = {"delta_mean": versus.delta_mean, "placebo_wins": None if versus.d is None else versus.wins}
        placebo[f"versus_{name}"] = own | {"p_exact": versus.p_exact, "p_value": rounded(versus.p_value)}
    if (block := extra["knockout"]) is not None:
        mean = mean_of(block["per_seed"])
        block |= {"mean": mean, "ratio": rounded(mean / means["idea"]) if mean is not None and means["idea"] else None}


def derive_selection(extra: dict[str, Any], arms: Mapping[str, tuple[list[Any], Any]]) -> None:
    """Fill in what the extensions say of the sweeps: where the winner lies, and which rows are flagged."""
    lost, limit = {json.dumps([row["model"], row["cfg"]]): row for row in extra["flagged"]}, math.inf
    extra["flagged"] = []
    if extra["floors"]["predict_mean"]:
        limit = mean_of(extra["floors"]["predict_mean"]["per_seed"][: extra["options"]["sweep_seeds"]])
    for name, (sweep, _) in arms.items():
        block, best, hs = extra["selection"][name], best_config(sweep), [row["cfg"]["h"] for row in sweep]
        block["edge"] = edge(best["lr"], [row["cfg"]["lr"] for row in sweep if row["cfg"]["h"] == best["h"]])
        block["configurations"] = len(sweep)
        if "h_edge" in block:
            single = sorted({h for h in hs if not isinstance(h, list)})
            block["h_edge"] = edge(best["h"], single) if len(single) > 1 and best["h"] in single else None
        if "agrees" in block:
            block["agrees"] = None if block["validation_choice"] is None else block["validation_choice"] == best
        for row in [row for row in sweep if row["mean"] is None or row["mean"] > limit]:
            reason = "diverged" if row["mean"] is None else "worse than predicting the mean"
            seeds = lost.get(json.dumps([name, row["cfg"]]), {"diverged_seeds": []})["diverged_seeds"]
            extra["flagged"].append({"model": name, "cfg": row["cfg"], "reason": reason, "diverged_seeds": seeds})
    if "placebo" in arms:
        extra["placebo"]["best_cfg"] = best_config(arms["placebo"][0])


def file_name(path: str) -> str:
    """Return a file's name without folders, as UTF-8 text in any locale."""
    return os.fsencode(Path(path).name).decode("utf-8", "backslashreplace")


def seed_means(dicts: Sequence[Mapping[str, float]], kind: str = "") -> dict[str, float | None] | None:
    """Return the means over the seeds of a signature's numbers of a kind: None where a seed lacks it; None for none."""
    names = dict.fromkeys(name for one in dicts for name in one if name.startswith(kind))
    return {name: rounded(np.mean([one.get(name, math.nan) for one in dicts]), 7) for name in names} or None


def printed_arm(arm: Arm) -> dict[str, Any]:
    sweep = [{"cfg": Run(0, *row).config, "mean": rounded(mean)} for row, mean in zip(arm.grid, arm.means, strict=True)]
    return {"sweep": sweep, "full": {"mean": None, "std": None, "per_seed": arm.scores, "n": None}}


def build_report(config: Config, arms: Mapping[str, Arm], reason: str | None) -> dict[str, Any]:
    """Return the report of a benchmark, its keys in the reference's order; reason: why there is no placebo.  What is
    measured is put in its place here, beside the names of derived fields, which `derive` fills in."""
    built_in, (path, name), track = config.idea in LAYERS, config.idea.rpartition(":")[::2], None
    signature = seed_means([probe["signature"] for probe in arms["idea"].probes])
    if built_in:
        order = ("prediction", *list(signature)[:2], "attenuation_relative_error")  # then the displacement
        signature = dict.fromkeys(order) | {"prediction": KineticLayer.prediction} | signature
    if config.track not in TRACKS:
        track = {"file": file_name(config.track), "sha256": sha256(config.track)}
    known_as = config.idea if built_in else {"file": file_name(path), "sha256": sha256(path), "class": name}
    report = {
        "bench_version": 1,
        "track": track["file"].removesuffix(".py") if track else config.track,
        "model": f"rnn_small_{config.idea if built_in else name}_vs_raw",
        "metric_direction": "lower is better",
        "n_seeds": len(config.seeds),
        "baseline": {"best_cfg": None} | printed_arm(arms["baseline"]) | {"union_lr_grid": None},
        "idea": printed_arm(arms["idea"])["full"],
        "comparison": None,
        "mechanism_signature": signature,
        "idea_sweep": printed_arm(arms["idea"])["sweep"],
        "best_idea_cfg": None,
        "parameter_parity": {name: arms[name].records[0].parameters for name in ARMS[:2]},
        "custom_track": track,
        "extensions": build_extensions(config, arms, reason, known_as),
    }
    return derive(report, config)


def scores_on_the_way(config: Config, arms: Mapping[str, Arm]) -> tuple[list[Any], list[Any]]:
    """Return the learning curve, a row for each epoch, and the closed loop, a row for each horizon."""
    curve, loop, probes, empty = [], [], {name: arms[name].probes for name in ARMS[:2]}, dict.fromkeys
    curves = {name: [record.state.curve for record in arms[name].records] if name in arms else None for name in ARMS}
    for epoch in config.checkpoints:
        scores = {name: own and [rounded(curve[epoch]) for curve in own] for name, own in curves.items()}
        curve.append({"epoch": epoch, **empty(ARMS), "per_seed": scores, "p_exact": None})
    for i, horizon in enumerate(config.horizons if "rollout" in probes["idea"][0] else ()):
        row = {"horizon": horizon}
        for key in ("floor", "predict_mean"):
            row[key] = mean_of([rounded(probe[key][i], 7) for probe in probes["baseline"]], 7)
        scores = {name: [rounded(probe["rollout"][i], 7) for probe in own] for name, own in probes.items()}
        loop.append(row | empty(ARMS[:2]) | {"per_seed": scores, "p_exact": None, "p_holm": None})
    return curve, loop


def build_extensions(config: Config, arms: Mapping[str, Arm], reason: str | None, known_as: Any) -> dict[str, Any]:
    (curve, loop), empty = scores_on_the_way(config, arms), dict.fromkeys
    idea, placebo = arms["idea"], arms.get("placebo")
    probes, selection, flagged, without = arms["baseline"].probes, empty(ARMS), [], {"reason": reason}
    floors = {name: [rounded(probe["floors"][name]) for probe in probes] for name in FLOOR_NAMES}
    for name, arm in arms.items():
        selection[name] = empty(("edge", "h_edge", "configurations") if name == "idea" else ("edge", "configurations"))
        if name != "placebo":
            best = best_row(arm.grid, arm.validation) if math.isfinite(min(arm.validation)) else None
            selection[name] |= {"validation_choice": best and Run(0, *best).config, "agrees": None}
        for row, seeds in zip(arm.grid, arm.lost, strict=True):
            flagged.append({"model": name, "cfg": Run(0, *row).config, "diverged_seeds": list(seeds)})
    isolated = isolated_mechanism(config, idea.best[1][0], probes[0]["shape"]) if config.idea in LAYERS else None
    if placebo:
        versus = empty(("versus_baseline", "versus_idea")) | {"parameters": placebo.records[0].parameters}
        without = {"best_cfg": None} | printed_arm(placebo) | versus
    options = ("sweep_seeds", "epochs", "hidden", "batch", "dtype", "lr_search")
    tests, shared = {probe["test_digest"] for probe in probes}, max(probe["test_in_train"] for probe in probes)
    knocked = [rounded(probe["knockout"]) for probe in idea.probes]
    return {
        "options": {"seeds": [config.seeds[0], config.seeds[-1] + 1]}
        | {name: getattr(config, name) for name in options}
        | {"idea": known_as},
        "data": probes[0]["sequences"] | {"distinct_test_sets": len(tests), "test_in_train": rounded(shared)},
        "floors": {n: None if None in scores else {"mean": None, "per_seed": scores} for n, scores in floors.items()}
        | empty(("best", "beaten_by")),
        "statistics": None,
        "selection": selection,
        "flagged": flagged,
        "learning_curve": curve,
        "still_learning": empty(ARMS),
        "placebo": without,
        "knockout": placebo and {"mean": None, "per_seed": knocked, "ratio": None},
        "isolated_mechanism": isolated,
        "transport_confirmed": isolated and isolated.pop("transport_confirmed"),
        "mechanism_untrained": seed_means([probe["untrained"] for probe in idea.probes], "observed_"),
        "rollout": loop or None,
    }


def finite(token: str) -> float:
    if not math.isfinite(float(token)):
        raise ValueError(f"holds {token[:24]}, which is not a JSON number of this format")
    return int(token) if re.fullmatch("-?[0-9]{1,15}", token) else float(token)


class Side:
    """A report to be compared, rebuilt from its own scores: its leaves as they stand and rebuilt, the paths at which
    these are not the same, and the keys that stand twice.  Raises UsageError with one line on what is wrong."""

    def __init__(self, path: Path, config: Config) -> None:
        self.twice, where = [], f"argument --diff: {show(str(path))}"
        numbers = dict.fromkeys(("parse_constant", "parse_float", "parse_int"), finite)
        try:
            report = json.loads(read_file("--diff", path).decode(), object_pairs_hook=self.unique, **numbers)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not a JSON report: {show(' '.join(str(error).split()))[:200]}") from None
        version = report.get("bench_version") if isinstance(report, dict) else None
        if not same(version, 1):
            raise UsageError(f"{where}: bench_version is {show(version)[:40]}, not 1")
        try:
            self.report = derive(copy.deepcopy(report), config)
            first = report["extensions"]["options"]["seeds"][0] if "extensions" in report else 0
            self.leaves, self.rebuilt = (flatten(each, first) for each in (report, self.report))
        except Exception as error:  # any JSON may come here: whatever does not fit the formulas is no report
            raise UsageError(f"{where}: malformed, or lacks a key ({show(one_line(error))[:120]})") from None
        missing, paths = object(), self.leaves | self.rebuilt
        self.wrong = {p for p in paths if not same(self.leaves.get(p, missing), self.rebuilt.get(p, missing))}

    def unique(self, items: list[tuple[str, Any]]) -> dict[str, Any]:
        self.twice += [key for key, times in collections.Counter(key for key, _ in items).items() if times > 1]
        return dict(items)


def same(a: Any, b: Any) -> bool:
    """Say whether two leaves are the same; true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def flatten(value: Any, first: int, path: str = "") -> dict[str, Any]:
    """Return {path: leaf} of a report: a sweep's rows named by configuration, scores by seed, other lists by number."""
    if not value or not isinstance(value, dict | list):
        return {path: value}
    if isinstance(value, dict):
        names, value = [f".{key}" if path else key for key in value], value.values()
    elif path.endswith("sweep"):
        names = [f"[{json.dumps(row['cfg'])}]" for row in value]
    else:
        names = [f"[seed {first + i}]" if "per_seed" in path else f"[{i}]" for i in range(len(value))]
    items = zip(names, value, strict=True)
    return {inner: leaf for name, item in items for inner, leaf in flatten(item, first, path + name).items()}


def field_status(path: str, theirs: Side, ours: Side, rtol: float) -> str:
    """Return how a field compares; a difference starts with DIFFERS.  So does what one side lacks, unless it lacks the
    whole extensions, or did not run that seed or that learning rate."""
    sides = {"theirs": theirs, "ours": ours}
    if wrong := [name for name, side in sides.items() if path in side.wrong]:
        return f"DIFFERS: {' and '.join(wrong)} not from own scores"
    for name, side in [(name, side) for name, side in sides.items() if path not in side.leaves]:
        seed, row = re.search(r"\[seed (\d+)\]$", path), re.search(r"sweep\[(?={)", path)
        missing = path.startswith("extensions") and "extensions" not in side.report
        missing = missing or (seed and f"idea.per_seed{seed[0]}" not in side.leaves)
        cfg = row and json.JSONDecoder().raw_decode(path, row.end())[0]
        missing = missing or (cfg and cfg["lr"] not in side.report["baseline"]["union_lr_grid"])
        return "not compared" if missing else f"DIFFERS: {name} lacks it"
    a, b, names = theirs.leaves[path], ours.leaves[path], set(re.split(r"[.\[]", path))
    if same(a, b):
        return "same"
    if (names & MEASURED and not names & {"cfg", "h"}) or re.search(r"\.observed_|rollout.*\.predict_mean$", path):
        close = {type(a), type(b)} <= {int, float} and abs(b - a) <= rtol * max(abs(a), abs(b))
        return "within rtol" if close else "DIFFERS"
    mean_of_arm = re.fullmatch(r"extensions\.(learning_curve|rollout)\[\d+\]\.(baseline|idea|placebo)", path)
    return "derived" if names & DERIVED or mean_of_arm else "DIFFERS"


def conclusions(theirs: Side, ours: Side) -> list[tuple[str, str, str, str]]:
    """Return (conclusion, theirs, ours, status) of what the reports conclude, each rebuilt from its own scores; and the
    arms' means and deviations, with their ratio and how many standard errors apart they are in place of a status."""
    rows = []
    for name, path in CONCLUSIONS.items():
        texts, wrong, inside = [], False, re.compile(re.escape(path) + r"($|[.\[])")
        for side in (theirs, ours):
            keys = [key for key in side.rebuilt | side.leaves if inside.match(key)]
            parts = [f"{key[len(path) + 1 :]} {show(side.rebuilt.get(key))}".strip() for key in keys]
            texts.append(", ".join(parts) or "-")
            wrong = wrong or not side.wrong.isdisjoint(keys)
        status = "DIFFERS: not from own scores" if wrong else "same" if texts[0] == texts[1] else "DIFFERS"
        rows.append((name, *texts, "not compared" if "-" in texts and "placebo" in name else status))
    for name, path in (("baseline", "baseline.full"), ("idea", "idea")):
        found, apart = [[side.rebuilt[f"{path}.{key}"] for key in ("mean", "std", "n")] for side in (theirs, ours)], []
        texts = ["diverged" if mean is None else f"{mean:.4g} +- {std:.4g}" for mean, std, _ in found]
        if "diverged" not in texts:
            (first, *_), (second, *_) = found
            error = math.hypot(*(std / math.sqrt(n - 1) if n > 1 else math.nan for _, std, n in found))
            apart += [f"ratio {second / first:.4g}"] if first else []
            apart += [f"{abs(second - first) / error:.1f} standard errors apart"] if error > 0 else []
        rows.append((f"{name}, mean +- std", *texts, ", ".join(apart)))
    return rows


def compare(theirs: Side, ours: Side, rtol: float, everything: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the comparison in lines, and the statuses of its conclusions and of its fields."""
    rows, concluded = [], conclusions(theirs, ours)
    for path in theirs.leaves | ours.leaves | theirs.rebuilt | ours.rebuilt:
        values = (side.leaves.get(path, "-") for side in (theirs, ours))
        rows.append((path, *values, field_status(path, theirs, ours, rtol)))
    orders = [[path for path in a.leaves if path in b.leaves] for a, b in ((theirs, ours), (ours, theirs))]
    if orders[0] != orders[1]:
        rows.append(("(order of keys)", "-", "-", "DIFFERS"))
    for name, side in (("theirs", theirs), ("ours", ours)):
        rows += [(f"(key {key!r} of {name})", "-", "-", "DIFFERS: stands twice") for key in side.twice]
    cells = [("path", "theirs", "ours", "relative difference", "status")]
    for path, a, b, status in [row for row in rows if everything or row[3].startswith("DIFFERS")]:
        relative = f"{(b - a) / abs(a):+.3e}" if a and {type(a), type(b)} <= {int, float} else ""
        shown = [text if len(text) <= 34 else text[:31] + "..." for text in map(show, (a, b))]
        cells.append((show(path), *shown, relative, status))
    kinds = ("same", "within rtol", "derived", "DIFFERS", "not compared")
    counts = [f"{sum(row[3].startswith(k) for row in rows)} {k.replace('DIFFERS', 'differing')}" for k in kinds]
    lines = [*table(("conclusion", "theirs", "ours", ""), *concluded), ""]
    lines += [*table(*cells), ""] if len(cells) > 1 else []
    lines.append(f"{len(rows)} fields: {', '.join(counts)}")
    return lines, *([row[3] for row in own] for own in (concluded, rows))


# 12. Log and figure ---------------------------------------------------------------------------------------------------

FLOOR_NAMES = {
    "predict_mean": "predicting the training mean",
    "repeat_last": "repeating the last value",
    "linear": "a linear least-squares fit of the tokens",
}
BAR = 12  # characters of the longest bar
# matplotlib's format strings: colour, line, and last the arms' marker, which tells other step sizes apart
STYLES = {"baseline": "k-o", "idea": "C0--s", "placebo": "C7:^", "floor": "C3-", "predict_mean": "C3:"}


def show(value: Any) -> str:
    """Show a report's value in ASCII: numbers in full, None as null."""
    return value.encode("ascii", "backslashreplace").decode() if isinstance(value, str) else json.dumps(value)


def brief(value: Any) -> str:
    """Show a person a measured number, with four significant digits, or n/a; whole numbers and text as they are."""
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table(*rows: Sequence[Any]) -> list[str]:
    """Align rows in columns; the first to the left, the last as it is, the others to the right."""
    shown, lines = [list(map(brief, row)) for row in rows], []
    start, *widths, _ = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for first, *middle, last in shown:
        cells = map(str.rjust, middle, widths)
        lines.append("  ".join([first.ljust(start), *cells, last]).rstrip())
    return lines


def and_list(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def p_of(block: Mapping[str, Any], config: Config) -> float:
    """Return the p for sentences: exact, or above 40 pairs (hits + 1) / (flips + 1), which is never 0."""
    sampled = (block["p_value"] * config.flips + 1) / (config.flips + 1)
    return sampled if block["p_exact"] is None else block["p_exact"]


def caveats(report: Mapping[str, Any], config: Config) -> list[tuple[str, str]]:
    """Return what the verdict hangs on, (in a word, in a sentence), only where it applies, in the order of weight."""
    extra, block, n, found = report["extensions"], report["comparison"], report["n_seeds"], []
    means, chosen = [report["baseline"]["full"]["mean"], report["idea"]["mean"]], extra["selection"]

    def say(applies: Any, tag: str, sentence: str) -> None:
        found.extend([(tag, sentence)] if applies else [])

    worse = []
    for name, text in FLOOR_NAMES.items():
        floor = (extra["floors"][name] or {}).get("mean")
        if None not in (floor, *means) and min(means) > floor:
            worse.append(f"{text} ({brief(floor)}{f', {brief(min(means) / floor)} times' if floor else ''})")
    tag = f"both worse than {FLOOR_NAMES.get(extra['floors']['best'])}"
    say(worse, tag, f"Both models are worse than {and_list(worse)}.")
    learning, last = [name for name in ARMS[:2] if extra["still_learning"][name]], extra["learning_curve"][-1]
    for half in half_way(extra["learning_curve"]):
        shares = [f"the {name}'s error fell to {last[name] / half[name]:.2f}" for name in learning if half[name]]
        text = f"from epoch {half['epoch']} to {last['epoch']} {and_list(shares)} of what it was"
        tag = f"{and_list(learning)} still learning"
        say(learning, tag, f"Still learning: {text}; more epochs may say otherwise.")
    for side in ("lower", "upper"):
        at = [f"the {name}'s" for name in ARMS[:2] if chosen[name]["edge"] == side]
        text = f"The best rate is at the grid's {side} edge ({and_list(at)}): --lrs auto extends it."
        say(at, f"best rate at the {side} edge", text)
    only = "only" in (chosen["baseline"]["edge"], chosen["idea"]["edge"])
    say(only, "one learning rate", "Only one learning rate was tried: --lrs takes more, or auto.")
    side, sets, overlap = chosen["idea"]["h_edge"], extra["data"]["distinct_test_sets"], extra["data"]["test_in_train"]
    say(side, f"best h at the {side} edge", f"The best step h is at the {side} edge of those tried.")
    tag = "one test set for all seeds" if sets == 1 else f"only {sets} different test sets for {n} seeds"
    text = f"{tag}: p then speaks of initialisation and batch order, not of new data."
    say(sets < n, tag, f"There {'is' if sets == 1 else 'are'} {text}")
    text = f"Train and test overlap: {100 * overlap:.3g} % of the test sequences are trained on."
    say(overlap, "train and test overlap", text)
    exact, sampled = extra["statistics"]["p_exact"], block["p_value"]
    split = None not in (exact, sampled) and (exact < config.significance) != (sampled < config.significance)
    text = f"Exact and sampled p disagree about {config.significance}: {brief(exact)} and {brief(sampled)}."
    say(split, "exact and sampled p disagree", text)
    verdict_sign = {"idea better (significant)": -1, "idea worse (significant)": 1}.get(block["verdict"], 0)
    for row in (extra["rollout"] or ()) if "not judged" not in block["verdict"] else ():
        sign = 0 if row["p_holm"] is None or row["p_holm"] >= config.significance else row["idea"] - row["baseline"]
        rmse = f"RMSE {brief(row['idea'])} against {brief(row['baseline'])}, Holm p = {brief(row['p_holm'])}"
        text = f"at horizon {row['horizon']} the idea is {'worse' if sign > 0 else 'better'} ({rmse})."
        tag = f"closed loop says otherwise at {row['horizon']}"
        say(sign and sign * verdict_sign <= 0, tag, f"The closed loop says otherwise: {text}")
    ours, theirs = chosen["idea"]["configurations"], chosen["baseline"]["configurations"]
    text = f"The idea's best is chosen from {ours} configurations, the baseline's from {theirs}."
    say(ours != theirs, "unequal numbers of configurations", text)
    first, second = (report["parameter_parity"][name] for name in ARMS[:2])
    more = f"{100 * abs(second / first - 1):.3g} % {'more' if second > first else 'fewer'} parameters"
    text = f"The idea has {more} than the baseline ({second} and {first})."
    say(abs(second - first) > config.parity * first, more, text)
    return found


def placebo_sentence(report: Mapping[str, Any], config: Config) -> str:
    """Say what the placebo shows: whether the operator, or gate and mixing alone, made the difference."""
    block, parts = report["extensions"]["placebo"], []
    if "reason" in block or report["comparison"]["verdict"].startswith("not judged: both"):
        return ""
    if None in (block["full"]["mean"], report["idea"]["mean"], report["baseline"]["full"]["mean"]):
        return "The placebo cannot be judged, as a run diverged."
    for name in ("baseline", "idea"):
        versus, p = block[f"versus_{name}"], p_of(block[f"versus_{name}"], config)
        word = "better than" if versus["delta_mean"] < 0 else "worse than"
        parts.append(f"{word if p < config.significance else 'no different from'} the {name} (p = {brief(p)})")
    what = "the kinetic operator" if isinstance(report["extensions"]["options"]["idea"], str) else "the step h"
    cause = f"{what} itself makes a difference"
    if parts[1].startswith("no different"):
        cause = f"no sign that {what}, rather than the parameters around it, matters"
    return f"The placebo (h = 0, mean {brief(block['full']['mean'])}) is {' and '.join(parts)}: {cause}."


def verdict_sentence(report: Mapping[str, Any], config: Config) -> str:
    """Return the verdict in words, from the report's numbers alone, and what it hangs on."""
    block, first, second = report["comparison"], report["baseline"]["full"]["mean"], report["idea"]["mean"]
    means = f"the idea's mean test MSE is {brief(second)}, the baseline's {brief(first)}"
    if block["verdict"].startswith("not judged"):
        floor = brief((report["extensions"]["floors"]["predict_mean"] or {}).get("mean"))
        head = f"{block['verdict']} ({means}; predicting the mean has {floor})."
    else:
        times, won = f" ({brief(second / first)} times)" if first else "", f"{block['idea_wins']} of {block['n_pairs']}"
        p = brief(p_of(block | report["extensions"]["statistics"], config))
        head = f"{block['verdict']}: {means}{times}, {won} pairs won, p = {p}."
    sentences = [head, placebo_sentence(report, config), *(sentence for _, sentence in caveats(report, config))]
    return f"On track {show(report['track'])}: {' '.join(filter(None, sentences))}"


def limitations(report: Mapping[str, Any], config: Config) -> list[str]:
    extra, n, block = report["extensions"], report["n_seeds"], report["mechanism_signature"]
    floor, least = extra["statistics"]["p_floor"], extra["statistics"]["detectable_difference"]
    gru = f"one architecture (a GRU of {extra['options']['hidden']} units)"
    track = f"One track ({show(report['track'])}), {gru}, {extra['options']['epochs']} epochs."
    limit = f"{n} pairs: no exact p below {brief(floor)} is possible."
    if n > config.exact_pairs:
        limit = f"{n} pairs: p is sampled, none below {brief(1 / (config.flips + 1))} can be told."
    if floor >= config.significance:
        limit = f"{n} pairs cannot reach p < {config.significance}: the smallest possible p is {brief(floor)}."
    sentences = [track, *(sentence for _, sentence in caveats(report, config)), limit]
    if least is not None:
        share = f"less than {100 * config.power:.0f} % of repetitions"
        sentences.append(f"A mean difference smaller than {brief(least)} would be found in {share}.")
    for name in [name for name in ARMS[:2] if extra["selection"][name]["agrees"] is False]:
        sentences.append(f"The validation split would have chosen another configuration for the {name}.")
    sentences.append("The best configuration is chosen by the test MSE of the sweep's seeds, as in the reference.")
    if block is None:
        sentences.append("The idea offers no mechanism signature.")
    elif isinstance(block.get("prediction"), str):
        after, before = (part["observed_fourier_attenuation"] for part in (block, extra["mechanism_untrained"]))
        text = f"The attenuation is {brief(after)} after and {brief(before)} before training: it says that the operator"
        text += " is built as predicted, not that training uses it (the knockout does)."
        sentences += [] if after is None else [text]
        sentences.append("The transport displacement of the whole layer is confounded by gate and mixing.")
    return sentences


def sweep_lines(report: Mapping[str, Any], config: Config) -> list[str]:
    flags = {json.dumps([f["model"], f["cfg"]]): f["reason"] for f in report["extensions"]["flagged"]}
    rows, lines = [("model", "lr", "h", "mean test MSE", "")], []
    for name, (sweep, _) in arms_of(report).items():
        side, best = report["extensions"]["selection"][name]["edge"], best_config(sweep)
        for cfg, mean in ((row["cfg"], row["mean"]) for row in sweep):
            notes = [flags.get(json.dumps([name, cfg]))]
            if cfg == best:
                notes += ["best", f"at the {side} edge of the grid" if side in ("lower", "upper") else None]
            rows.append((name, show(cfg["lr"]), show(cfg["h"]), mean, ", ".join(filter(None, notes))))
    if report["extensions"]["options"]["lr_search"] == "auto":
        added = ", ".join(repr(lr) for lr in report["baseline"]["union_lr_grid"] if lr not in config.lrs)
        grown = f"the grid {f'grew by {added}' if added else 'needed no more'}"
        lines = [f"--lrs auto: from {', '.join(map(repr, config.lrs))} {grown}"]
    return [*table(*rows), *lines]


def pair_lines(report: Mapping[str, Any], config: Config) -> list[str]:
    """Return a line a seed, with a bar from the middle ('<' to the left is better, '>' worse); then the statistics."""
    scores = list(zip(report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"], strict=True))
    largest = max((abs(b - a) for a, b in scores if None not in (a, b)), default=0.0) or 1.0
    rows = [("seed", "baseline", "idea", "idea - baseline", "  better | worse")]
    for seed, (a, b) in zip(config.seeds, scores, strict=True):
        difference, bar = None, "diverged".center(2 * BAR + 1)
        if None not in (a, b):
            size, difference = math.ceil(abs(b - a) / largest * BAR), f"{b - a:+.4g}"
            bar = f"{'<' * size:>{BAR}}|" if b < a else f"{'|':>{BAR + 1}}{'>' * size}"
        rows.append((seed, a, b, difference, bar))
    block, stats = report["comparison"], report["extensions"]["statistics"]
    span = "n/a" if stats["interval_95"] is None else f"[{', '.join(map(brief, stats['interval_95']))}]"
    sampled = f"< {1 / config.flips:g}" if block["p_value"] == 0 else brief(block["p_value"])
    mean, p, d_z = map(brief, (block["delta_mean"], stats["p_exact"], stats["effect_size_dz"]))
    text = f"mean difference {mean}, 95 % interval {span}, sampled p {sampled}, exact p {p}, effect d_z {d_z}"
    return [*table(*rows), text]


def mechanism_lines(report: Mapping[str, Any]) -> list[str]:
    block, extra = report["mechanism_signature"], report["extensions"]
    alone, untrained, without = extra["isolated_mechanism"], extra["mechanism_untrained"] or {}, extra["knockout"]
    rows = [("", "predicted", "observed", "before training", "relative error", "")]
    for key in [key for key in block or () if key.startswith("observed_")]:
        predicted = block.get(key.replace("observed", "predicted", 1))
        values = predicted, block[key], untrained.get(key), relative_error(block[key], predicted)
        rows.append((show(key.removeprefix("observed_").replace("_", " ")), *values, ""))
    confirmed = "confirmed" if block and block["confirmed"] else "not confirmed"
    lines = [*table(*rows), confirmed] if block else ["the idea offers no signature"]
    if alone:
        moves = {True: "confirmed", False: "not confirmed", None: "not measurable"}[extra["transport_confirmed"]]
        error, slope = brief(alone["attenuation_max_relative_error"]), brief(alone["displacement_slope"])
        text = f"operator alone: attenuation error at most {error} (k <= 8), slope of the displacement {slope}"
        lines.append(f"{text} for h = {show(alone['h'])}, transport {moves}")
    if without:
        times = "" if without["ratio"] is None else f", {brief(without['ratio'])} times the idea's"
        lines.append(f"knockout: the trained idea with h = 0 has {brief(without['mean'])}{times}")
    return lines


def build_log(config: Config, report: Mapping[str, Any]) -> str:
    """Return the log that a person reads, in ASCII: the verdict first, then the tables, last the limitations."""
    extra, parity, best = report["extensions"], report["parameter_parity"], report["extensions"]["floors"]["best"]
    floors = {text: extra["floors"][name] for name, text in FLOOR_NAMES.items() if extra["floors"][name]}
    rows = [(text, own["mean"], "best floor" if text == FLOOR_NAMES[best] else "") for text, own in floors.items()]
    keys = ("epoch", *ARMS, "p_exact")
    curve = [("epoch", *ARMS, "exact p", ""), *([*map(row.get, keys), ""] for row in extra["learning_curve"])]
    keys = ("horizon", "predict_mean", "floor", "baseline", "idea", "p_exact", "p_holm")
    loop = [("horizon", "predict mean", "repeat last", "baseline", "idea", "exact p", "Holm p", "")]
    loop += [[*map(row.get, keys), ""] for row in extra["rollout"] or ()]
    learning = [name for name in ARMS if extra["still_learning"][name]]
    learned = and_list(learning) or ("none" if len(curve) > 2 else "one checkpoint cannot tell")
    curve_lines = [*table(*curve), f"still learning: {learned}"]
    seeds = f"seeds {config.seeds[0]}..{config.seeds[-1]}, sweep on the first {config.sweep_seeds}"
    beaten_by = f"better than the best floor: {and_list(extra['floors']['beaten_by'] or ['none of the models'])}"
    titled = {
        "Options": [f"{option_words(config) or 'defaults'} ({seeds}, {config.epochs} epochs, {config.dtype})"],
        f"Sweep (mean over {config.sweep_seeds} seeds, target variance = 1)": sweep_lines(report, config),
        f"Pairs (test MSE of {parity['baseline']} and {parity['idea']} parameters)": pair_lines(report, config),
        "Floors (test MSE of what needs no network)": [*table(*rows or [("none can be told", "")]), beaten_by],
        f"Learning curve (MSE on the first {config.probe_sequences} test sequences)": curve_lines,
        "Mechanism": mechanism_lines(report),
        "Closed loop (RMSE in target std)": table(*loop) if len(loop) > 1 else ["not on a custom track"],
        "Limitations": [f"- {sentence}" for sentence in limitations(report, config)],
    }
    tables = "".join("\n".join(["", "", title, *own]) for title, own in titled.items())
    return f"Verdict: {verdict_sentence(report, config)}{tables}\n"


def build_answer(config: Config, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stage-2 answer, its keys in the order that was asked for."""
    block, confirmed = report["comparison"], bool((report["mechanism_signature"] or {}).get("confirmed"))
    worked, p = block["system_worked"], block["p_value"]
    practical = {"idea better (significant)": "helps", "idea worse (significant)": "harms"}
    return {
        "worked": worked,
        "confidence": 0 if p is None else math.floor(rounded(10 * (1 - p))),
        "verdict": verdict_sentence(report, config),
        "metrics": {
            "baseline": report["baseline"]["full"]["mean"],
            "idea": report["idea"]["mean"],
            "paired_delta": block["delta_mean"],
            "permutation_p_value": p,
            "idea_wins": block["idea_wins"],
            "n_pairs": block["n_pairs"],
            "parameter_counts": report["parameter_parity"],
        },
        "how_to_run": f"python stage2_bench.py {option_words(config)}".strip(),
        "files": ["stage2_bench.py", REPORT, OUTPUT],
        "limitations": limitations(report, config),
        "bench_report": report,
        "system_verdict": "works" if worked else "partial" if confirmed else "fails",
        "practical_verdict": practical.get(block["verdict"], "neutral"),
        "mechanism_ok": int(confirmed),
        "system_judged": not block["verdict"].startswith("not judged"),
    }


def versions() -> str:
    libraries = ", ".join(f"{module.__name__} {module.__version__}" for module in (torch, np, scipy))
    return f"Python {platform.python_version()}, {libraries}"


def draw_panel(axis: Any, title: str, xlabel: str, ylabel: str, lines: Any, ticks: Sequence[float] = ()) -> None:
    """Draw lines (label, points, format, opacity); one without points is left out, a panel without lines is a sentence
    alone.  Ticks are given for logarithmic axes."""
    axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
    for label, points, style, *opacity in lines:
        if points := [(x, y) for x, y in points if y is not None]:
            size = 12 if "*" in style else 5
            axis.plot(
                *zip(*points, strict=True), style, label=label, markersize=size, alpha=opacity[0] if opacity else 1
            )
    if not axis.lines:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not available for this run", ha="center", transform=axis.transAxes)
        return
    axis.xaxis.get_major_locator().set_params(integer=True)
    if ticks:
        apart = math.ceil(len(ticks) / 5)  # where there are many, every other label or so is left out
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(sorted(ticks), ["" if i % apart else f"{x:g}" for i, x in enumerate(sorted(ticks))])
        axis.xaxis.minorticks_off()
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "frameon": False, "fontsize": 8}
    axis.legend(ncols=2 if len(axis.lines) < 7 else 3, **below)


def draw_panels(axes: Sequence[Any], report: Mapping[str, Any]) -> None:
    extra, mse, lines = report["extensions"], "test MSE (target variance = 1)", []
    for name, (sweep, _) in arms_of(report).items():
        points = collections.defaultdict(list)
        for row in sweep:
            points[json.dumps(row["cfg"]["h"])].append((row["cfg"]["lr"], row["mean"] or None))
        for i, h in enumerate(points):
            label = name if h == "null" else f"{name}, h = {h}"
            style = STYLES[name] if i == 0 else STYLES[name][:-1] + "Dv<>pPX*"[(i - 1) % 8]
            lines.append((label, sorted(points[h]), style, max(0.3, 1 - 0.2 * i)))
    draw_panel(axes[0], "Sweep", "learning rate", f"mean {mse}", lines, report["baseline"]["union_lr_grid"])
    for name, text in FLOOR_NAMES.items() if axes[0].axison else ():
        if level := (extra["floors"][name] or {}).get("mean"):
            axes[0].axhline(level, color="C3", linewidth=0.8)
            axes[0].annotate(text, (0.99, level), xycoords=("axes fraction", "data"), size=7, ha="right", va="bottom")
    rows = extra["learning_curve"]
    lines = [(name, [(row["epoch"], row[name]) for row in rows], STYLES[name]) for name in ARMS]
    draw_panel(axes[1], "Learning curve", "epoch", mse, lines, [row["epoch"] for row in rows])
    scores = zip(report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"], strict=True)
    points = [(seed, b - a) for seed, (a, b) in enumerate(scores, extra["options"]["seeds"][0]) if None not in (a, b)]
    if points and report["comparison"]["delta_mean"] is not None:
        axes[2].axhline(report["comparison"]["delta_mean"], linestyle="--", label="mean")
    if points and extra["statistics"]["interval_95"]:
        axes[2].axhspan(*extra["statistics"]["interval_95"], alpha=0.15, label="95 % interval")
    title, span = "Paired differences (below 0: idea better)", [(seed, 0.0) for seed, _ in points]
    lines = [("one seed", points, "C7o"), ("no difference", span, "k-")]
    draw_panel(axes[2], title, "seed", "idea - baseline (target variance = 1)", lines)
    rows = extra["rollout"] or ()
    names = {"baseline": "baseline", "idea": "idea", "floor": "repeat last", "predict_mean": "predict mean"}
    lines = [(text, [(row["horizon"], row[name]) for row in rows], STYLES[name]) for name, text in names.items()]
    draw_panel(axes[3], "Closed loop", "horizon (steps)", "RMSE (target std)", lines, [row["horizon"] for row in rows])
    alone, block = extra["isolated_mechanism"] or {"h": 0.0}, report["mechanism_signature"] or {}
    h, waves, moves = alone["h"], (alone.get("attenuation") or [])[:13], alone.get("displacement") or []
    star, moved = block.get("observed_fourier_attenuation"), block.get("observed_transport_displacement")
    lines = [
        ("predicted exp(-h k^2)", [(k, math.exp(-h * k * k)) for k in range(len(waves))], "k-"),
        ("operator alone", list(enumerate(waves)), "C0."),
        ("trained layers, relative to k = 0", [(KineticLayer.mode, star)] if waves else [], "k*"),
    ]
    draw_panel(axes[4], "Diffusion", "Fourier mode k along the tokens", "attenuation", lines)
    lines = [
        ("predicted h x", [(x, h * x) for x in range(len(moves))], "k-"),
        ("operator alone", list(enumerate(moves)), "C0."),
        ("trained layers, confounded", [(len(moves) // 2, moved)] if moves else [], "k*"),
    ]
    draw_panel(axes[5], "Transport", "token x", "displacement (channels)", lines)


def draw(config: Config, report: Mapping[str, Any], path: Path) -> None:
    """Draw the report in one figure of six panels.  Raises RunError where that fails: the report is complete then."""
    style = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "stage2", "svg.fonttype": "none"}
    try:
        from matplotlib import pyplot

        with pyplot.rc_context(style), new_file(path) as file:
            figure, axes = pyplot.subplots(2, 3, figsize=(13, 8), layout="constrained")
            draw_panels(axes.flat, report)
            tags = "; ".join(tag for tag, _ in caveats(report, config))
            title = f"{report['model']} on {report['track']}: {report['comparison']['verdict']}"
            lines = "\n".join(textwrap.wrap(title, 120) + textwrap.wrap(tags, 120))
            figure.suptitle(lines.replace("$", r"\$"), fontsize=11)
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=130)
            pyplot.close(figure)
    except Exception as error:  # matplotlib, a backend or a disk may fail in any way
        raise RunError(f"--plot {show(str(path))}: {one_line(error)[:200]}; the report is complete") from None


# 13. Users' files and command line ------------------------------------------------------------------------------------

LARGEST_VALUE = 1e100  # of custom data; the square of a larger one may overflow
KEPT = "what was trained is kept, --resume goes on"
FEW_VALUES = 20  # whole-numbered targets with fewer distinct values look like classes


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@functools.cache
def load_file(path: str) -> tuple[ModuleType, list[str]]:
    """Import a user's Python file by its path; returns the module, and the files beside it that it imports.  While it
    loads, its folder is on sys.path; what an earlier file imported from its own folder is forgotten first, so that two
    files may each have a neighbour of the same name.  Raises UsageError with the reason in one line."""
    folder, mark, bytecode = Path(path).parent, "__neighbour_of_custom_file__", sys.dont_write_bytecode
    for name in [name for name, module in sys.modules.items() if mark in getattr(module, "__dict__", {})]:
        del sys.modules[name]
    before, spec = set(sys.modules), importlib.util.spec_from_file_location(f"custom file {path}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # nothing is left in the user's folder, and no stale copy is read from there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path}: {one_line(error)}") from error
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = bytecode
    neighbours = []
    for name in set(sys.modules) - before - {spec.name}:
        file = getattr(sys.modules[name], "__dict__", {}).get("__file__")
        if file and Path(file).is_relative_to(folder):
            setattr(sys.modules[name], mark, True)
            neighbours.append(file)
    return module, sorted(neighbours)


def finite_array(values: Any, name: str, axes: Sequence[str]) -> np.ndarray:
    """Turn what `make` returns into a float64 array.  Raises ValueError, with the place of the first wrong number."""
    if masked := np.ma.count_masked(np.ma.array(values)):  # a list may hold masked arrays
        raise ValueError(f"{name} hold {masked} masked values")
    if np.iscomplexobj(np.asarray(values)):
        raise ValueError(f"{name} are complex")
    array = np.array(values, dtype=np.float64)
    for what, wrong in (("NaN", np.isnan(array)), ("infinity", np.isinf(array))):
        if wrong.any():
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, np.argwhere(wrong)[0], strict=False))
            raise ValueError(f"{name} hold {wrong.sum()} {what}, the first at {place}")
    if np.abs(array).max(initial=0) > LARGEST_VALUE:
        raise ValueError(f"{name} reach {np.abs(array).max():.3g}, too large to standardise")
    return array


@functools.cache  # a user's make is called once for a seed and split, `__wrapped__` calls it again
def custom_split(path: str, seed: int, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (N, T, C) and targets (N, K) of a user's make(seed, split), checked.  Raises UsageError where there
    is no make, it fails, or what it returns has a wrong shape or is not finite."""
    make, where = getattr(load_file(path)[0], "make", None), f"{path}: make({seed}, {split!r})"
    if not callable(make):
        raise UsageError(f"{path}: defines no function make(seed, split)")
    try:
        tokens, targets = make(seed, split)
        tokens = finite_array(tokens, "tokens", ("sequence", "token", "channel"))
        targets = finite_array(targets, "targets", ("sequence", "column"))
    except (Exception, SystemExit) as error:
        message = str(error) if type(error) is ValueError else one_line(error)
        raise UsageError(f"{where} -> tokens (N, T, C), targets (N,) or (N, K): {message}") from error
    if tokens.ndim != 3 or tokens.shape[0] < 1 or tokens.shape[1] < 2 or tokens.shape[2] < 1:
        raise UsageError(f"{where}: tokens have shape {tokens.shape}, not (N, T, C) with N >= 1, T >= 2, C >= 1")
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or targets.size == 0:
        raise UsageError(f"{where}: targets have shape {targets.shape}, not ({len(tokens)},) or ({len(tokens)}, K)")
    return tokens, targets.reshape(len(targets), -1)


def layer_class(idea: str) -> type[nn.Module]:
    """Return a built-in layer's class, or the one that "path.py:Class" names.  Raises UsageError if there is none."""
    path, name = idea.rpartition(":")[::2]
    found = LAYERS[idea] if idea in LAYERS else getattr(load_file(path)[0], name, None)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise UsageError(f"{path}: defines no torch.nn.Module named {name!r}")
    return found


def check_track(config: Config) -> dict[int, str]:
    """Check every seed's splits of a custom track; returns {seed: digest of its data}, empty for a built-in one.
    Raises UsageError where `make` answers twice, shapes differ, or targets are constant."""
    track, shapes = config.track, {}
    if track in TRACKS:
        return {}
    for seed, split in itertools.product(config.seeds, SPLITS):
        where, (tokens, targets) = f"{track}: make({seed}, {split!r})", custom_split(track, seed, split)
        first, again = seed == config.seeds[0], custom_split.__wrapped__
        if first and not all(map(np.array_equal, (tokens, targets), again(track, seed, split))):
            raise UsageError(f"{where} gives two answers: seed its randomness")
        shape = (*tokens.shape, targets.shape[1])
        wanted = shapes.setdefault(split, (shape[0], *shapes.get("train", shape)[1:]))
        if shape != wanted:
            text = "all seeds need equal shapes, and all splits equal T, C and K"
            raise UsageError(f"{where}: (N, T, C, K) is {shape} after {wanted}; {text}")
        if split == "train" and np.ptp(targets, axis=0).max() == 0:
            raise UsageError(f"{where}: the targets are all equal; nothing to learn")
    values = np.unique(custom_split(track, config.seeds[0], "train")[1])
    if len(values) < FEW_VALUES and (values == values.round()).all():
        complain(f"note: {track}: the targets have {len(values)} whole values; this is regression")
    shared, digests = 0.0, {}
    for seed in config.seeds:
        data = build_dataset(config, seed)
        shared, digests[seed] = max(shared, share_in_train(data, "val")), digest(data, *SPLITS)
    if shared:
        complain(f"warning: {track}: {100 * shared:.3g} % of the validation sequences stand in the training split")
    return digests


def check_idea(config: Config) -> str | None:
    """Take the user's layer through the real road, for every step size and the placebo's 0; returns why there can be no
    placebo, or None.  Raises UsageError where the layer can't be built, or would not train as it does alone."""
    hs, answers = [h for h in dict.fromkeys(itertools.chain(*config.hs)) if h], []
    if config.idea in LAYERS or not hs:
        return None if hs else "the idea's only step is h = 0"
    layer, small = layer_class(config.idea), dataclasses.replace(config, sizes=(8, 1, 1))
    with computing(config):
        tokens = build_dataset(small, config.seeds[0]).tokens["train"][:8]
        length, channels = tokens.shape[1:]
        try:
            inspect.signature(layer).bind(channels, length, hs[0])
        except TypeError:
            text = f"{layer.__name__}(channels, length, h), but takes {inspect.signature(layer)}"
            raise UsageError(f"{config.idea}: is built as {text}") from None
        for h in (*hs, 0.0):
            try:
                answers.append(layer_answer(small, h, tokens))
            except (Exception, SystemExit) as error:
                problem = str(error) if isinstance(error, UsageError) else one_line(error)
                where = f"(channels={channels}, length={length}, h={h})"
                raise UsageError(f"{config.idea} with {where}: {problem}") from None
    alike = all(torch.equal(answer, answers[-1]) for answer in answers)
    return "the idea's output does not depend on h" if alike else None


def kept_state(module: nn.Module) -> dict[str, tuple[Any, str]]:
    """Return what a module keeps beside its parameters, buffers and plain attributes: {name: (dtype, contents)}."""
    found, kinds = dict(module.named_buffers()), Tensor | bool | int | float | str | list | tuple | dict | set
    found |= {name: value for name, value in module.named_parameters() if not value.requires_grad}
    for name, part in module.named_modules():
        for key in vars(part).keys() - vars(nn.Module()).keys():
            if isinstance(vars(part)[key], kinds) and not isinstance(vars(part)[key], nn.Parameter):
                found[f"{name}.{key}".lstrip(".")] = vars(part)[key]
    return {n: (getattr(v, "dtype", None), repr(v.tolist() if isinstance(v, Tensor) else v)) for n, v in found.items()}


def layer_answer(config: Config, h: float, tokens: Tensor) -> Tensor:
    """Return what a user's layer makes of tokens (batch, time, channel) with its parameters a little away from where
    they start.  Raises UsageError with what is wrong with it."""
    runs = [Run(config.seeds[0], 0.001, (h,)), Run(config.seeds[-1], 0.002, (h,))]
    (module,), (twin,) = (build_layers(config, runs[0], tokens.shape[2], tokens.shape[1]) for _ in range(2))
    with torch.no_grad():
        for value in [p for layer in (module, twin) for p in layer.parameters() if p.requires_grad]:
            value.add_(0.1)  # many begin at 0, where nothing of what they multiply would show
    try:
        out = module(tokens.clone())
    except RuntimeError as error:
        for name, (dtype, _) in kept_state(module).items():
            if dtype is not None and dtype.is_floating_point | dtype.is_complex and dtype.to_real() != tokens.dtype:
                raise UsageError(f"{one_line(error)} (its tensor {name} is {dtype}, the run {tokens.dtype})") from None
        raise
    if not isinstance(out, Tensor) or out.shape != tokens.shape or out.dtype != tokens.dtype:
        what = f"{tuple(out.shape)} {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
        raise UsageError(f"turns tokens {tuple(tokens.shape)} {tokens.dtype} into {what}")
    before, again = kept_state(module), module(tokens.clone())
    if again.requires_grad:
        again.sum().backward()
    changed = [name for name, value in kept_state(module).items() if before.get(name) != value]
    unused = [name for name, value in module.named_parameters() if value.requires_grad and value.grad is None]
    another = not torch.equal(out, twin(tokens.clone()))
    problems = {
        "gives NaN or infinity": not torch.isfinite(out).all(),
        "gives two answers for the same tokens (dropout, or a state it keeps?)": not torch.equal(out, again),
        "is another layer when built again (randomness that torch does not seed?)": another,
        "mixes the sequences of a batch (batch norm?)": not torch.allclose(out[:1], module(tokens[:1].clone())),
        f"never uses its parameter {unused[:1]}": unused,
        f"changes {changed[:1]} in use (running statistics, a counter?); --resume could not go on from that": changed,
    }
    if found := [problem for problem, holds in problems.items() if holds] or road_problems(config, runs, twin, tokens):
        raise UsageError(found[0])
    return out.detach()


def road_problems(config: Config, runs: Sequence[Run], plain: nn.Module, tokens: Tensor) -> list[str]:
    """Train two steps through the real road, the runs side by side and each alone; say whether that changes anything.
    plain: the first run's layer as its author built it.  Given other values of its parameters, it must do what the one
    does whose parameters live in the model's rows; one that keeps views of its parameters does not."""
    flats = []
    for own in (runs, runs[:1], runs[1:]):
        training = Training(Model(config, own))
        for _ in range(2):
            training.learn([slice(0, 8)] * len(own))
        flats.append(training.model.flat)
    if not torch.equal(flats[0], torch.cat(flats[1:])):
        return ["trains otherwise beside another run than alone (state shared between its objects?)"]
    road = Model(config, runs[:1])
    ((layer,),) = road.layers
    try:
        first, second = (repr(layer_signatures(road)) for _ in range(2))
    except Exception as error:
        return [f"its signature(tokens) gives no numbers by name ({one_line(error)})"]
    if first != second:
        return ["its signature(tokens) gives two answers for the same tokens"]
    with torch.no_grad():
        road.flat.add_(0.1)
        for value, moved in zip(plain.parameters(), layer.parameters(), strict=True):
            value.copy_(moved)
        alike = torch.equal(layer(tokens.clone()), plain(tokens.clone()))
        return [] if alike else ["keeps views of its parameters' memory"]


def number(kind: type, low: float, wanted: str, high: float = sys.float_info.max, separator: str = "") -> Any:
    """Return a parser of a number from low to high, or with a separator of several; wanted: what to say else."""
    form = r"[0-9]{1,12}" if kind is int else r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"

    def parse(text: str) -> Any:
        parts = re.split(separator, text) if separator else [text]
        if not all(re.fullmatch(form, part) and low <= kind(part) <= high for part in parts):
            raise argparse.ArgumentTypeError(f"{text!a} is not {wanted}")
        return tuple(map(kind, parts)) if separator else kind(text)

    return parse


count = number(int, 1, "a whole number from 1 to 1000000000", high=10**9)
real, positive = number(float, 0.0, "a finite number >= 0"), number(float, math.ulp(0.0), "a finite number > 0")
steps = number(float, 0.0, "a finite number >= 0, or several joined by +", separator=r"(?<![eE])\+")


def rate(text: str) -> float | str:
    return text if text == "auto" else positive(text)


def seed_range(text: str) -> tuple[int, ...]:
    """Parse N, seeds 0..N-1, or A:B, seeds A..B-1."""
    found = re.fullmatch(r"(?:([0-9]{1,10}):)?([0-9]{1,10})", text)
    start, stop = (int(found[1] or 0), int(found[2])) if found else (0, 0)
    if not start < stop <= 2**32 or stop - start > 10**6:
        raise argparse.ArgumentTypeError(f"{text!a} is not N or A:B, from 1 to 1000000 seeds below 2^32")
    return tuple(range(start, stop))


def file_or_name(flag: str, known: Iterable[str], form: str, wanted: str) -> Callable[[str], str]:
    """Return a parser of a known name, or of a user's file, whose path becomes absolute, and what follows it."""

    def parse(text: str) -> str:
        if text in known:
            return text
        if not (found := re.fullmatch(form, text, re.DOTALL)):
            raise argparse.ArgumentTypeError(f"{show(text)} is {wanted}")
        read_file(flag, Path(found[1]))
        return f"{Path(found[1]).absolute()}{found[2]}"

    return parse


track_name = file_or_name("--track", TRACKS, r"(.*\.py)()", f"neither of {', '.join(TRACKS)} nor FILE.py")
idea_name = file_or_name("--idea", LAYERS, r"(.*\.py)(:[^\W\d]\w*)", "not FILE.py:Class")


def spell(value: Any) -> str:
    """Spell an option's value as it is typed, a file without its folder."""
    if not isinstance(value, tuple):
        return shlex.quote(file_name(value)) if isinstance(value, str) else str(value)
    if isinstance(value[0], int):
        return f"{value[0]}:{value[-1] + 1}" if value[0] else str(len(value))
    return " ".join("+".join(map(repr, item)) if isinstance(item, tuple) else str(item) for item in value)


def build_parser() -> argparse.ArgumentParser:
    text = "Does a kinetic-mixing layer help a small GRU to predict dynamics? Writes an honest verdict."
    parser = argparse.ArgumentParser(prog="stage2_bench.py", description=text, allow_abbrev=False)

    def error(message: str) -> None:
        raise UsageError(f"{message} (--help lists the options)")

    parser.error, parser.print_help = error, lambda: emit(parser.format_help())  # which survives `| head`
    parser._negative_number_matcher = re.compile(r"-[0-9.]|-inf|-nan")  # values to refuse, not unknown options
    add = parser.add_argument_group("experiment").add_argument
    for each in dataclasses.fields(Config):
        if each.metadata:
            how = {**each.metadata, "help": f"{each.metadata['help']} (default: {spell(each.default)})"}
            add(how.pop("flag"), dest=each.name, type=globals().get(how.pop("parser"), str), **how)
    add("--smoke", action="store_true", help="2 seeds and 2 epochs, into stage2_smoke/: for continuous integration")
    add = parser.add_argument_group("execution").add_argument
    text = "worker processes; not under torchrun, whose ranks do the work (default: the CPUs this process may use)"
    add("--jobs", type=number(int, 1, "a whole number from 1 to 1024", high=1024), metavar="N", help=text)
    add("--resume", action="store_true", help="use the trainings in .stage2_runs (default: train all afresh)")
    add = parser.add_argument_group("output").add_argument
    add("--out-dir", type=Path, metavar="DIR", help="where the files go (default: . or stage2_smoke)")
    text = "draw the result: png, svg or pdf, a bare name into --out-dir; needs matplotlib (default: no)"
    add("--plot", metavar="FILE", help=text)
    add("--quiet", action="store_true", help="no progress on stderr (default: show it)")
    add("--version", action="store_true", help="print the versions of script and libraries, and exit")
    add = parser.add_argument_group("comparison of two reports (trains nothing)").add_argument
    text = "compare bench_report.json in --out-dir with REPORT; status 0 same, 1 differs, 2 trouble"
    add("--diff", type=Path, metavar="REPORT", help=text)
    add("--rtol", type=real, metavar="X", help="relative tolerance of measured fields (default: 0)")
    add("--all", action="store_true", help="list all fields, not only those that differ")
    add("--conclusions", action="store_true", help="let the status say whether the conclusions are the same")
    return parser


def config_from(options: argparse.Namespace) -> Config:
    """Turn options into the experiment's configuration.  Raises UsageError where they contradict each other."""
    given = {each.name: getattr(options, each.name, None) for each in dataclasses.fields(Config)}
    changes = {"seeds": (0, 1), "epochs": 2} if options.smoke else {}
    changes |= {name: value for name, value in given.items() if value is not None}
    for flag, name in (("--lrs", "lrs"), ("--h", "hs")):
        values = changes[name] = tuple(changes.get(name, getattr(Config, name)))
        if twice := [value for i, value in enumerate(values) if value in values[:i]]:
            raise UsageError(f"argument {flag}: {spell((twice[0],))} is given twice")
    if "auto" in changes["lrs"]:
        if len(changes["lrs"]) > 1:
            raise UsageError("argument --lrs: auto stands alone")
        changes |= {"lrs": Config.lrs, "lr_search": "auto"}
    count = len(changes.get("seeds", Config.seeds))
    if changes.setdefault("sweep_seeds", min(Config.sweep_seeds, count)) > count:
        raise UsageError(f"argument --sweep-seeds: {changes['sweep_seeds']} is more than the {count} seeds")
    return Config(**changes)


def option_words(config: Config) -> str:
    """Return the options that give this configuration, without a path of this machine."""
    usual, words = dataclasses.replace(Config(), sweep_seeds=min(Config.sweep_seeds, len(config.seeds))), []
    for each in [each for each in dataclasses.fields(Config) if each.metadata]:
        value, default = (spell(getattr(own, each.name)) for own in (config, usual))
        value = "auto" if each.name == "lrs" and config.lr_search == "auto" else value
        words += [f"{each.metadata['flag']} {value}"] if value != default else []
    return show(" ".join(words))


def read_file(flag: str, path: Path) -> bytes:
    """Return a user's file.  Raises UsageError where it can't be read, or is a pipe, which nobody may ever fill."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "is not a regular file")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"argument {flag}: {show(str(path))}: {getattr(error, 'strerror', error)}") from None


def check_folder(folder: Path) -> None:
    """Make the output folder and try it.  Raises UsageError where the files could not be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(InterruptedError), new_file(folder / "trial"):
            raise InterruptedError  # it could be written: leave nothing
    except OSError as error:
        raise UsageError(f"argument --out-dir: {show(str(folder))}: {error.strerror}") from None
    files = (REPORT, Path.is_file, os.path.exists), (OUTPUT, Path.is_file, os.path.exists)
    for name, wanted, present in (*files, (STORE, Path.is_dir, os.path.lexists)):  # a link to nowhere can be replaced
        if present(folder / name) and not wanted(folder / name):
            raise UsageError(f"argument --out-dir: {show(str(folder / name))} is in the way")


def check_plot(path: Path, folder: Path) -> None:
    """Raise UsageError where --plot could not be drawn or written at the end; the output folder is made later."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"argument --plot: {show(str(path))} does not end in .png, .svg or .pdf")
    try:
        from matplotlib import pyplot

        pyplot.switch_backend("agg")
    except ModuleNotFoundError:
        raise UsageError("argument --plot: needs matplotlib, which is not installed: pip install matplotlib") from None
    except Exception as error:  # a backend or style that it can't use
        raise UsageError(f"argument --plot: matplotlib fails: {one_line(error)[:200]}") from None
    in_place = os.access(path.parent, os.W_OK) or path.parent.absolute() == folder.absolute()
    if os.path.isdir(path) or len(os.fsencode(path.name)) > 255 or not in_place:
        raise UsageError(f"argument --plot: {show(str(path))} cannot be written")


def emit(text: str) -> bool:
    """Print to stdout; says whether that went well.  A reader that left is no error: the files are complete."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # what is still buffered must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            complain(f"stdout: {error.strerror}")
            return False
    return True


def complain(message: str) -> None:
    """Print one line on stderr, whatever line breaks the message has; nothing where stderr is closed."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"stage2_bench.py: {' '.join(message.split())}\n")


def leave() -> None:
    """End the program at a signal, whatever the main thread does: no worker is left, no half-written file, one line."""
    number, err = signal.sigwait(STOP_SIGNALS), sys.stderr
    ENDING.acquire()
    try:
        sys.stdout = sys.stderr = None  # the main thread is not to say what comes of it
        for process in multiprocessing.active_children():
            process.kill()
            process.join(1)  # it may be in the middle of writing
        remove_parts()
        print(f"stage2_bench.py: stopped by {signal.Signals(number).name}; {KEPT}", file=err, flush=True)
    finally:
        os._exit(128 + number)


def benchmark_command(options: argparse.Namespace) -> int:
    start = time.monotonic()
    for flag in ("rtol", "all", "conclusions"):
        if getattr(options, flag) is not None and getattr(options, flag) is not False:
            raise UsageError(f"argument --{flag}: goes with --diff")
    config, folder, plot = config_from(options), options.out_dir, options.plot
    if plot is not None:  # a bare name goes beside the report
        plot = Path(plot) if os.path.dirname(plot) else folder / plot
        check_plot(plot, folder)
    data, reason = check_track(config), check_idea(config)
    execution = Execution(config, options, data)
    arms = execution.benchmark(placebo=reason is None)
    if not execution.writes:
        return 0
    report = build_report(config, arms, reason)
    log, parts = build_log(config, report), (report, build_answer(config, report))
    printed, answer = (json.dumps(part, indent=2, allow_nan=False) + "\n" for part in parts)
    machine = f"{platform.system()} {platform.machine()}, {available_cpus()} CPUs, {execution.jobs} processes"
    machine += f"; {versions()}\nwall time {time.monotonic() - start:.1f} s"
    output = f"{log}\nMachine\n{machine}\n\nStage-2 answer\n{answer}"
    try:
        with new_file(folder / REPORT) as first, new_file(folder / OUTPUT) as second:
            for file, text in ((first, printed), (second, output)):  # both whole before either takes its place
                file.write(text.encode())
                file.flush()
    except OSError as error:
        what = f"cannot write {REPORT}, {OUTPUT} in {folder}"
        raise RunError(f"{what}: {error.strerror}; older files are whole") from None
    well = emit(log)
    if plot:
        draw(config, report, plot)
    return int(not well or all(score is None for name in ARMS[:2] for score in arms[name].scores))


def diff_command(options: argparse.Namespace) -> int:
    """Compare the report in --out-dir with another; returns the exit status of diff(1)."""
    with np.errstate(all="ignore"):  # a foreign report may hold any number
        sides = [Side(path, Config()) for path in (options.diff, options.out_dir / REPORT)]
        try:
            lines, concluded, fields = compare(*sides, options.rtol or 0.0, options.all)
        except Exception as error:  # any JSON may come here
            raise UsageError(f"argument --diff: these can't be compared ({show(one_line(error))[:120]})") from None
    differs = any(status.startswith("DIFFERS") for status in (concluded if options.conclusions else fields))
    return int(differs) if emit("\n".join(lines) + "\n") else 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; every foreseen failure is one line on stderr."""
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="backslashreplace")
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(action="ignore"):
            options = build_parser().parse_args(argv)
            if options.version:
                return int(not emit(f"stage2_bench {VERSION}; {versions()}\n"))
            options.out_dir = options.out_dir or Path("stage2_smoke" if options.smoke else ".")
            return diff_command(options) if options.diff else benchmark_command(options)
    except (UsageError, RunError) as error:
        complain(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # not as a script, or where signals can't be awaited
        complain(f"stopped by SIGINT; {KEPT}")
        return 130


if __name__ == "__main__":
    if hasattr(signal, "sigwait"):
        threading.Thread(target=leave, daemon=True).start()
    status = main()
    ENDING.acquire()  # where `leave` has it, the end is its own
    sys.exit(status)
