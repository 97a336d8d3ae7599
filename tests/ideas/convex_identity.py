"""The convex gate with a mix that starts as the identity: at first, a choice between u and K(u)."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))  # a file of --idea is loaded by its path: its neighbours need this
from convex import Convex


class ConvexIdentity(Convex):
    """(1 - g) u + g (W_m K(u) + b_m) from W_m = 1 and b_m = 0."""

    def __init__(self, channels, length, h):
        super().__init__(channels, length, h)
        torch.nn.init.eye_(self.mix.weight)
        torch.nn.init.zeros_(self.mix.bias)
