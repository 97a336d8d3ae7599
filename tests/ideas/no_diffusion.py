"""The kinetic layer without diffusion: K only shifts the tokens along the channels."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # a file of --idea is loaded by its path: its neighbours need this
from residual import Residual


class NoDiffusion(Residual):
    """The residual form with the transport alone."""

    def operator(self, u):
        return self.transport(u)
