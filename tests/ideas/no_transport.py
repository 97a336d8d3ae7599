"""The kinetic layer without transport: K only diffuses along the tokens."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # a file of --idea is loaded by its path: its neighbours need this
from residual import Residual


class NoTransport(Residual):
    """The residual form with the diffusion alone."""

    def operator(self, u):
        return self.diffuse(u)
