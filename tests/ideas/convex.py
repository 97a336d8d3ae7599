"""The convex form: the gate chooses between a token and its mixture, rather than adding to the token."""

import torch
from kinetic import Kinetic


class Convex(Kinetic):
    """(1 - g) u + g (W_m K(u) + b_m), the gate's bias as drawn."""

    gate_bias = None

    def forward(self, u):
        g = torch.sigmoid(self.gate(u))
        return (1 - g) * u + g * self.mix(self.operator(u))
