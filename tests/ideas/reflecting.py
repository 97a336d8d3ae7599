"""The built-in form with reflecting ends: the first and the last token of the window are no neighbours."""

import torch
from kinetic import Kinetic


class Reflecting(Kinetic):
    """W_m ((1 - g) u + g K(u)) + b_m, diffusion on the even modes cos(pi j (x + 1/2) / T) of the window."""

    def diffuse(self, u):
        """Multiply the mode of j half-waves by exp(-h (j/2)^2).

        A periodic wave k has 2 k half-waves in the window, so equal lengths decay as in the periodic form.  The modes
        are the waves of the window followed by its mirror image, a periodic signal of twice the length.
        """
        length = u.shape[1]
        half_waves = torch.arange(length + 1, dtype=u.dtype)
        decay = torch.exp(-self.h * (half_waves / 2) ** 2)[:, None]
        mirrored = torch.cat([u, u.flip(1)], dim=1)
        return torch.fft.irfft(torch.fft.rfft(mirrored, dim=1) * decay, n=2 * length, dim=1)[:, :length]
