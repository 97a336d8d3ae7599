"""One run at a time behind any layer, for any number of targets: torch.nn.GRU, torch.optim.Adam, torch's own clipping.

What `plain_loop.py` is for the built-in layer, this is for layers as users write them, on tracks of a few sequences.
It shares no code with stage2_bench.py.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

TRACK = """import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])  # train, test and val are words of different lengths
    tokens = rng.standard_normal(({count}, {length}, {channels}))
    targets = tokens[:, -1].sum(1, keepdims=True) * np.arange(1, {outputs} + 1)
    return tokens, targets + rng.standard_normal(({count}, {outputs}))
"""


def write_track(folder, count=22, length=9, channels=3, outputs=1):
    """Write a custom track of a few random sequences, the same number in each split; return its path as text."""
    path = folder / f"track_{count}_{length}_{channels}_{outputs}.py"
    path.write_text(TRACK.format(count=count, length=length, channels=channels, outputs=outputs), encoding="utf-8")
    return str(path)


def make_data(track, seed, dtype=torch.float64):
    """Return {split: (tokens, targets (N, K))} of such a track, standardised column by column by its training split."""
    names = {}
    with open(track, encoding="utf-8") as file:
        exec(file.read(), names)
    raw = {split: names["make"](seed, split) for split in ("train", "test", "val")}
    (x, y), ready = raw["train"], {}
    for split, (tokens, targets) in raw.items():
        tokens = (tokens - x.mean((0, 1))) / x.std((0, 1))
        targets = (targets - y.mean(0)) / y.std(0)
        ready[split] = torch.from_numpy(tokens).to(dtype), torch.from_numpy(targets).to(dtype)
    return ready


@dataclass
class Alone:
    """A run trained alone: its layers, GRU and readout, test and validation MSE, and {epoch: test MSE}."""

    layers: list
    gru: torch.nn.GRU
    readout: torch.nn.Linear
    test: float = math.nan
    validation: float = math.nan
    curve: dict = field(default_factory=dict)

    def parameters(self):
        """Return all parameters that train, the GRU's first."""
        modules = torch.nn.ModuleList([self.gru, self.readout, *self.layers])
        return [parameter for parameter in modules.parameters() if parameter.requires_grad]

    def predict(self, tokens):
        """Return (batch, K)."""
        for layer in self.layers:
            tokens = layer(tokens)
        return self.readout(self.gru(tokens)[0][:, -1])

    @torch.no_grad()
    def mse(self, tokens, targets):
        """Return the MSE of a split."""
        return torch.nn.functional.mse_loss(self.predict(tokens.clone()), targets).item()


def build(layer_class, seed, h, length, channels, outputs, hidden=32):
    """Build the model of one run: layers under torch's seed, GRU and readout from the run's stream of weights."""
    torch.manual_seed(seed)
    layers = []
    for step in h:
        layers.append(layer_class(channels, length, step))
        layers[-1](torch.zeros(2, length, channels))  # lazy parameters get their shapes
    model = Alone(layers, torch.nn.GRU(channels, hidden, batch_first=True), torch.nn.Linear(hidden, outputs))
    rng, bound = np.random.default_rng([seed, 3]), 1 / math.sqrt(hidden)
    with torch.no_grad():
        for parameter in (*model.gru.parameters(), *model.readout.parameters()):
            parameter.copy_(torch.from_numpy(rng.uniform(-bound, bound, tuple(parameter.shape))))
    return model


def train(layer_class, seed, lr, h, data, epochs, batch, hidden=32, clip=1.0, **adam):
    """Train one run, h a tuple of steps and () for no layer, as anybody would; Adam's other arguments by name."""
    (tokens, targets), before = data["train"], torch.get_default_dtype()
    torch.set_default_dtype(tokens.dtype)
    try:
        model = build(layer_class, seed, h, *tokens.shape[1:], targets.shape[1], hidden)
        parameters = model.parameters()
        optimizer, order = torch.optim.Adam(parameters, lr=lr, **adam), np.random.default_rng([seed, 4])
        for epoch in range(1, epochs + 1):
            for chosen in torch.from_numpy(order.permutation(len(targets))).split(batch):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model.predict(tokens[chosen]), targets[chosen]).backward()
                torch.nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
            model.curve[epoch] = model.mse(*data["test"])
        model.test, model.validation = model.mse(*data["test"]), model.mse(*data["val"])
    finally:
        torch.set_default_dtype(before)
    return model
