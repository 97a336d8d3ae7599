"""The slow, obvious benchmark: one run at a time on torch.nn.GRU, torch.optim.Adam and torch's own clipping.

Written from the specification alone and sharing no code with stage2_bench.py, it is the oracle of the trained numbers
and the peer of the speed figures.  `python tests/plain_loop.py` trains the default 32 runs and prints their scores.
"""

import copy
import math

import numpy as np
import torch
from scipy.integrate import solve_ivp

RATES = (0.0015, 0.003, 0.006)
SIZES = {"train": 512, "test": 1024, "val": 256}  # in the order of their random streams 0, 1, 2
STEP = 0.15


def make_split(seed, number, count, track="dynamics"):
    """Return tokens (count, 32, 3), targets (count,), measured positions, drive, true positions and their times."""
    generator, t = np.random.default_rng([seed, number]), STEP * np.arange(97)
    if track == "lorenz":
        q, t = lorenz(generator, count)
        seen, force = q[:, :34], None
    else:
        if track == "irregular":
            t[1:] += STEP * np.random.default_rng([seed, 5]).uniform(-0.2, 0.2, 97)[1:]
        q, noise, force = duffing(generator, count, t)
        seen = q[:, :33] + noise
    samples = seen.shape[1]
    return make_tokens(seen, t[:samples], force), q[:, samples], seen, force, q, t


def duffing(generator, count, t):
    """Return positions (count, times), sensor noise (count, 33) and drive (count, times) of driven oscillators."""
    low = (0.5, 0.5, 0.1, 0.2, 0.8, 0.0, -1.5, -1.0)
    high = (1.5, 1.5, 0.4, 0.5, 1.6, 2 * math.pi, 1.5, 1.0)
    alpha, beta, delta, gamma, omega, phi, q0, v0 = [
        generator.uniform(a, b, count) for a, b in zip(low, high, strict=True)
    ]
    noise = 0.005 * generator.standard_normal((count, 33))

    def slope(t, y):
        q, v = np.split(y, 2)
        return np.hstack((v, -delta * v + alpha * q - beta * q**3 + gamma * np.cos(omega * t + phi)))

    y = solve_ivp(slope, (0, t[-1]), np.hstack((q0, v0)), "DOP853", t_eval=t, rtol=1e-10, atol=1e-12).y
    return y[:count], noise, gamma[:, None] * np.cos(omega[:, None] * t + phi[:, None])


def lorenz(generator, count):
    """Return x (count, 98) of Lorenz-63 every 0.06 from t = 1 on, and the times."""
    start = np.hstack([generator.uniform(a, b, count) for a, b in ((-15, 15), (-15, 15), (10, 40))])

    def slope(_, y):
        x, y, z = np.split(y, 3)
        return np.hstack((10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z))

    t = 1 + 0.06 * np.arange(98)
    return solve_ivp(slope, (0, t[-1]), start, "DOP853", t_eval=t, rtol=1e-10, atol=1e-12).y[:count], t


def make_tokens(seen, t, force):
    """Return tokens (count, 32, 3): position, velocity, and the drive or (where there is none) the acceleration."""
    velocity = np.diff(seen) / np.diff(t)
    if force is None:
        return np.stack((seen[:, 2:], velocity[:, 1:], np.diff(velocity) / np.diff(t[1:])), axis=2)
    return np.stack((seen[:, 1:], velocity, force[:, 1 : len(t)]), axis=2)


def make_data(seed, dtype=torch.float64, track="dynamics"):
    """Return {split: (tokens, targets)}, standardised by the training split, and the raw test split with its scales."""
    raw = {name: make_split(seed, i, count, track) for i, (name, count) in enumerate(SIZES.items())}
    tokens, targets = raw["train"][:2]
    scales = tokens.mean((0, 1)), tokens.std((0, 1)), targets.mean(), targets.std()
    ready = {"angles": angles(raw["test"][-1][1:33]) if track == "irregular" else None}
    for name, (x, y, *_) in raw.items():
        x, y = (x - scales[0]) / scales[1], (y - scales[2]) / scales[3]
        ready[name] = torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)
    return ready, raw["test"], scales


def angles(t):
    """Return where the 32 tokens of an irregular window stand on the circle."""
    return 2 * math.pi * (t - t[0]) / (32 * STEP)


def trigonometric(angles):
    """Return the frequencies and the basis (token, wave) of as many waves as tokens, first cosines, then sines."""
    even, odd = np.arange(len(angles) // 2 + 1), np.arange(1, (len(angles) + 1) // 2)
    return np.hstack((even, odd)), np.hstack((np.cos(np.outer(angles, even)), np.sin(np.outer(angles, odd))))


def kolmogorov(u, h, angles=None):
    """One diffusion and one transport step on tokens (batch, token, channel), at h = 0 exactly the identity."""
    if h == 0:
        return u
    (length, channels), dtype = u.shape[1:], u.dtype
    if angles is None:
        k = torch.arange(length // 2 + 1, dtype=torch.float64)
        u = torch.fft.irfft(torch.fft.rfft(u, dim=1) * torch.exp(-h * k * k)[:, None], n=length, dim=1)
    else:
        k, basis = trigonometric(angles)
        u = torch.from_numpy(basis * np.exp(-h * k * k) @ np.linalg.inv(basis)).to(dtype) @ u
    mode = torch.from_numpy(np.fft.fftfreq(channels) * channels)
    x = torch.arange(length, dtype=torch.float64)
    turn = torch.exp(-2j * math.pi * mode[None, :] * h * x[:, None] / channels)
    return torch.fft.ifft(torch.fft.fft(u, dim=2) * turn, dim=2).real.to(dtype)


class Kinetic(torch.nn.Module):
    """A gate between raw and kinetic tokens, then a channel mix; or the older form, added to the tokens."""

    def __init__(self, h, channels, form):
        super().__init__()
        self.h, self.form = h, form
        self.gate = torch.nn.Linear(channels, channels)
        self.mix = torch.nn.Linear(channels, channels)

    def forward(self, u, angles=None):
        g, moved = torch.sigmoid(self.gate(u)), kolmogorov(u, self.h, angles)
        return u + g * self.mix(moved) if self.form == "residual" else self.mix((1 - g) * u + g * moved)


class Model(torch.nn.Module):
    """The raw model, or with h the one behind a kinetic layer (a tuple: one layer each); weights from stream 3."""

    def __init__(self, seed, h=None, channels=3, hidden=32, form="built-in"):
        super().__init__()
        self.gru = torch.nn.GRU(channels, hidden, batch_first=True)
        self.readout = torch.nn.Linear(hidden, 1)
        steps = () if h is None else h if isinstance(h, tuple) else (h,)
        self.layers = torch.nn.ModuleList(Kinetic(one, channels, form) for one in steps)
        self.double()
        generator = np.random.default_rng([seed, 3])
        with torch.no_grad():
            for name, parameter in self.named_parameters():  # in the order in which they were made
                bound = 1 / math.sqrt(channels if name.startswith("layers") else hidden)
                parameter.copy_(torch.from_numpy(generator.uniform(-bound, bound, tuple(parameter.shape))))
            for layer in self.layers if form == "built-in" else ():
                layer.gate.bias.fill_(-2.5)

    def forward(self, u, angles=None):
        for layer in self.layers:
            u = layer(u, angles)
        states, _ = self.gru(u)
        return self.readout(states[:, -1])[:, 0]


def train(seed, lr, h=None, epochs=16, data=None, dtype=torch.float64, batch=64, **shape):
    """Train one run and return (model, test MSE); model.curve is {epoch: MSE of the first 256 test sequences}."""
    ready = data or make_data(seed, dtype)[0]
    model = Model(seed, h, ready["train"][0].shape[2], **shape).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    order = np.random.default_rng([seed, 4])
    tokens, targets = ready["train"]
    model.curve = {}
    for epoch in range(1, epochs + 1):
        for chosen in torch.from_numpy(order.permutation(len(targets))).split(batch):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(tokens[chosen], ready.get("angles")), targets[chosen])
            if not loss.isfinite():
                return model, math.inf
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if epoch == epochs or math.log2(epoch).is_integer():
            model.curve[epoch] = mse(model, ready, "test", 256)
    return model, mse(model, ready, "test")


@torch.no_grad()
def mse(model, ready, split, count=None):
    """Return the MSE of a split, or of its first sequences."""
    tokens, targets = ready[split]
    return torch.nn.functional.mse_loss(model(tokens[:count], ready.get("angles")), targets[:count]).item()


def knockout(model, ready):
    """Return the test MSE of the trained model with its operators replaced by the identity."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.h = 0
    return mse(model, ready, "test")


def floors(ready, raw, scales):
    """Return the test MSE of three predictions that need no network: training mean, last position, linear fit."""
    (x, y), (x_test, y_test) = [[part.double().numpy() for part in ready[split]] for split in ("train", "test")]
    last = (raw[0][:, -1, 0] - scales[2]) / scales[3]
    design, design_test = [np.column_stack((a.reshape(len(a), -1), np.ones(len(a)))) for a in (x, x_test)]
    linear = design_test @ np.linalg.lstsq(design, y, rcond=1e-7)[0]
    predictions = {"predict_mean": 0, "repeat_last": last, "linear": linear}
    return {name: np.mean((predicted - y_test) ** 2) for name, predicted in predictions.items()}


@torch.no_grad()
def closed_loop(model, ready, raw, scales, steps=64, count=256):
    """Return the RMSE (steps,) of the closed loop on the first trajectories, in target stds."""
    path, force, q, t = raw[2][:count], None if raw[3] is None else raw[3][:count], raw[4][:count], raw[5]
    samples, errors = path.shape[1], []
    for first in range(steps):
        seen = slice(first, first + samples)
        tokens = make_tokens(path[:, seen], t[seen], None if force is None else force[:, seen])
        tokens = torch.from_numpy((tokens - scales[0]) / scales[1]).to(ready["test"][0].dtype)
        clock = None if ready.get("angles") is None else angles(t[seen][1:])
        position = model(tokens, clock).double().numpy() * scales[3] + scales[2]
        errors.append(np.sqrt(np.mean((position - q[:, first + samples]) ** 2)) / scales[3])
        path = np.column_stack((path, position))
    return np.array(errors)


def closed_loop_floors(raw, scales, steps=64, count=256):
    """Return the RMSEs (steps,) of repeating the last measured position, and of the training mean, at each horizon."""
    seen, q = raw[2][:count], raw[4][:count]
    future = q[:, seen.shape[1] :][:, :steps]
    return [np.sqrt(np.mean((guess - future) ** 2, axis=0)) / scales[3] for guess in (seen[:, -1:], scales[2])]


@torch.no_grad()
def signature(model, tokens, angles=None):
    """Return (attenuation, displacement) of the first kinetic layer, by brute force over every sequence's gate."""
    layer, (length, channels) = model.layers[0], tokens.shape[1:]
    gates, mix, residual = torch.sigmoid(layer.gate(tokens)), layer.mix.weight.T, layer.form == "residual"
    circle = 2 * math.pi * np.arange(length) / length if angles is None else angles
    analysis, middle = np.linalg.inv(trigonometric(circle)[1]), length // 2

    def power(k):
        total = 0.0
        for c in range(channels):
            e = torch.zeros(1, length, channels, dtype=tokens.dtype)
            e[0, :, c] = torch.from_numpy(np.cos(k * circle))
            moved = kolmogorov(e, layer.h, angles)
            branch = analysis @ (gates * (moved @ mix) if residual else (gates * moved) @ mix).numpy()
            total += (branch[:, k] ** 2).mean(0).sum()  # by cosine and sine, of a wave of amplitude 1
            total += (branch[:, middle + k] ** 2).mean(0).sum() if 0 < k < length / 2 else 0
        return total

    e = torch.zeros(1, length, channels, dtype=tokens.dtype)
    e[0, middle, 0] = 1
    gate, moved, e = gates.mean(0)[middle], kolmogorov(e, layer.h, angles)[0, middle], e[0, middle]
    response = e + gate * (moved @ mix) if residual else ((1 - gate) * e + gate * moved) @ mix
    angle = np.angle(np.fft.fft(response.numpy())[1])
    return math.sqrt(power(3) / power(0)), -channels / (2 * math.pi) * float(angle)


def benchmark(seeds=range(8), sweep=4, epochs=16, dtype=torch.float64, steps=(None, 0.08)):
    """Train sweep and pairs of each step size (None: raw) and return {(h, lr, seed): (model, test MSE)}."""
    found = {}
    for seed in seeds:
        data = make_data(seed, dtype)[0]
        for h in steps:
            for lr in RATES if seed < sweep else RATES[-1:]:
                found[h, lr, seed] = train(seed, lr, h, epochs, data, dtype)
    return found


if __name__ == "__main__":
    for (h, lr, seed), (_, score) in benchmark().items():
        print(f"h {h} lr {lr} seed {seed}: {score:.10f}")
