"""The kinetic layer with a convex gate: it chooses between a token and its mixture rather than adding to the token."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))  # a file of --idea is loaded by its path: its neighbours need this
from residual import Residual


class Convex(Residual):
    """(1 - g) u + g (W_m K(u) + b_m), g = sigmoid(W_g u + b_g)."""

    def forward(self, u):
        return torch.lerp(u, self.mix(self.operator(u)), torch.sigmoid(self.gate(u)))
