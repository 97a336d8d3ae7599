"""The built-in form with a gate that starts a little more closed."""

from kinetic import Kinetic


class GateBias3(Kinetic):
    """W_m ((1 - g) u + g K(u)) + b_m, the gate's bias from -3: g is about 0.05."""

    gate_bias = -3.0
