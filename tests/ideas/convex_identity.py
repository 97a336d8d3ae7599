"""The convex form with a mix that starts as the identity: at first a choice between u and K(u)."""

import torch
from convex import Convex


class ConvexIdentity(Convex):
    """(1 - g) u + g (W_m K(u) + b_m) from W_m = 1, b_m = 0."""

    def draw(self, rng):
        super().draw(rng)
        torch.nn.init.eye_(self.mix.weight)
        torch.nn.init.zeros_(self.mix.bias)
