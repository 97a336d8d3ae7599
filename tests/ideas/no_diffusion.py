"""The built-in form without diffusion: K only shifts the tokens along the channels."""

from kinetic import Kinetic


class NoDiffusion(Kinetic):
    """W_m ((1 - g) u + g K(u)) + b_m, K the transport alone."""

    def diffuse(self, u):
        return u
