"""The built-in form with a gate that starts a little further open."""

from kinetic import Kinetic


class GateBias2(Kinetic):
    """W_m ((1 - g) u + g K(u)) + b_m, the gate's bias from -2: g is about 0.12."""

    gate_bias = -2.0
