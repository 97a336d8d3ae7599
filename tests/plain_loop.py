"""The slow, obvious benchmark: one run at a time on torch.nn.GRU, torch.optim.Adam and torch's own clipping.

Written from the specification alone and sharing no code with stage2_bench.py, it is the oracle of the trained numbers
and the peer of the speed figures.  `python tests/plain_loop.py` trains the default 32 runs and prints their scores.
"""

import math

import numpy as np
import torch
from scipy.integrate import solve_ivp

RATES = (0.0015, 0.003, 0.006)
STEP = 0.15


def make_split(seed, number, count, step=STEP):
    """Return tokens (count, 32, 3), targets (count,), noisy positions, drive and true positions (count, 97)."""
    generator = np.random.default_rng([seed, number])
    low = (0.5, 0.5, 0.1, 0.2, 0.8, 0.0, -1.5, -1.0)
    high = (1.5, 1.5, 0.4, 0.5, 1.6, 2 * math.pi, 1.5, 1.0)
    alpha, beta, delta, gamma, omega, phi, q0, v0 = [
        generator.uniform(a, b, count) for a, b in zip(low, high, strict=True)
    ]
    noise = 0.005 * generator.standard_normal((count, 33))

    def right_hand_side(t, y):
        q, v = np.split(y, 2)
        return np.hstack((v, -delta * v + alpha * q - beta * q**3 + gamma * np.cos(omega * t + phi)))

    t = step * np.arange(97)
    y = solve_ivp(right_hand_side, (0, t[-1]), np.hstack((q0, v0)), "DOP853", t_eval=t, rtol=1e-10, atol=1e-12).y
    q = y[:count]
    seen = q[:, :33] + noise
    force = gamma[:, None] * np.cos(omega[:, None] * t + phi[:, None])
    tokens = np.stack((seen[:, 1:], (seen[:, 1:] - seen[:, :-1]) / step, force[:, 1:33]), axis=2)
    return tokens, q[:, 33], seen, force, q


def make_data(seed, dtype=torch.float64):
    """Return {split: (tokens, targets)}, standardised by the training split, and the raw test split with its scales."""
    raw = {name: make_split(seed, i, n) for i, (name, n) in enumerate((("train", 512), ("test", 1024), ("val", 256)))}
    tokens, targets = raw["train"][:2]
    scales = tokens.mean((0, 1)), tokens.std((0, 1)), targets.mean(), targets.std()
    ready = {}
    for name, (x, y, *_) in raw.items():
        x, y = (x - scales[0]) / scales[1], (y - scales[2]) / scales[3]
        ready[name] = torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)
    return ready, raw["test"], scales


def kolmogorov(u, h):
    """One diffusion and one transport step on tokens (batch, token, channel)."""
    (length, channels), dtype = u.shape[1:], u.dtype
    k = torch.arange(length // 2 + 1, dtype=torch.float64)
    u = torch.fft.irfft(torch.fft.rfft(u, dim=1) * torch.exp(-h * k * k)[:, None], n=length, dim=1)
    mode = torch.from_numpy(np.fft.fftfreq(channels) * channels)
    x = torch.arange(length, dtype=torch.float64)
    turn = torch.exp(-2j * math.pi * mode[None, :] * h * x[:, None] / channels)
    return torch.fft.ifft(torch.fft.fft(u, dim=2) * turn, dim=2).real.to(dtype)


class Model(torch.nn.Module):
    """The raw model, or with h the one behind the kinetic layer; weights from the seed's stream 3."""

    def __init__(self, seed, h=None, channels=3):
        super().__init__()
        self.h = h
        self.gru = torch.nn.GRU(channels, 32, batch_first=True)
        self.readout = torch.nn.Linear(32, 1)
        drawn = [self.gru.weight_ih_l0, self.gru.weight_hh_l0, self.gru.bias_ih_l0, self.gru.bias_hh_l0]
        bounds = [(p, 32) for p in [*drawn, self.readout.weight, self.readout.bias]]
        if h is not None:
            self.gate = torch.nn.Linear(channels, channels)
            self.mix = torch.nn.Linear(channels, channels)
            layer = (self.gate.weight, self.gate.bias, self.mix.weight, self.mix.bias)
            bounds += [(p, channels) for p in layer]
        generator = np.random.default_rng([seed, 3])
        with torch.no_grad():
            for parameter, fan in bounds:
                bound = 1 / math.sqrt(fan)
                parameter.copy_(torch.from_numpy(generator.uniform(-bound, bound, tuple(parameter.shape))))

    def forward(self, u):
        if self.h is not None:
            u = u + torch.sigmoid(self.gate(u)) * self.mix(kolmogorov(u, self.h))
        states, _ = self.gru(u)
        return self.readout(states[:, -1])[:, 0]


def train(seed, lr, h=None, epochs=16, data=None, dtype=torch.float64):
    """Train one run and return (model, test MSE)."""
    ready = data or make_data(seed, dtype)[0]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    model = Model(seed, h)
    torch.set_default_dtype(default)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    order = np.random.default_rng([seed, 4])
    tokens, targets = ready["train"]
    for _ in range(epochs):
        for chosen in torch.from_numpy(order.permutation(len(targets))).split(64):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(tokens[chosen]), targets[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model, mse(model, ready, "test")


@torch.no_grad()
def mse(model, ready, split):
    """Return the MSE of a split."""
    tokens, targets = ready[split]
    return torch.nn.functional.mse_loss(model(tokens), targets).item()


@torch.no_grad()
def closed_loop(model, ready, raw, scales, steps=64, count=256):
    """Return the RMSE (steps,) of the closed loop on the first trajectories, in target stds."""
    _, _, seen, force, q = [part[:count] for part in raw]
    mean, std, target_mean, target_std = scales
    window, last, errors = ready["test"][0][:count], seen[:, -1], []
    for i in range(33, 33 + steps):
        position = model(window).double().numpy() * target_std + target_mean
        errors.append(np.sqrt(np.mean((position - q[:, i]) ** 2)) / target_std)
        token = (np.stack((position, (position - last) / STEP, force[:, i]), axis=1) - mean) / std
        window = torch.cat((window[:, 1:], torch.from_numpy(token)[:, None].to(window.dtype)), dim=1)
        last = position
    return np.array(errors)


@torch.no_grad()
def signature(model, tokens):
    """Return (attenuation, displacement) of a trained kinetic layer, by brute force over every sequence's gate."""
    gates = torch.sigmoid(model.gate(tokens))
    length, channels = tokens.shape[1:]
    x = np.arange(length)

    def power(k):
        total, wave = 0.0, torch.from_numpy(np.cos(2 * math.pi * k * x / length))
        for c in range(channels):
            e = torch.zeros(1, length, channels, dtype=torch.float64)
            e[0, :, c] = wave
            out = gates * (kolmogorov(e, model.h) @ model.mix.weight.T)
            ratio = np.fft.fft(out.numpy(), axis=1)[:, k] / np.fft.fft(wave.numpy())[k]
            total += (np.abs(ratio) ** 2).mean(axis=0).sum()
        return total

    e = torch.zeros(1, length, channels, dtype=torch.float64)
    e[0, length // 2, 0] = 1
    moved = gates.mean(0)[length // 2] * (kolmogorov(e, model.h) @ model.mix.weight.T)[0, length // 2]
    spectrum = np.fft.fft((e[0, length // 2] + moved).numpy())
    return math.sqrt(power(3) / power(0)), -channels / (2 * math.pi) * float(np.angle(spectrum[1]))


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
