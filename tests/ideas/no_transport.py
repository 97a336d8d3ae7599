"""The built-in form without transport: K only diffuses along the tokens."""

from kinetic import Kinetic


class NoTransport(Kinetic):
    """W_m ((1 - g) u + g K(u)) + b_m, K the diffusion alone."""

    def transport(self, u):
        return u
