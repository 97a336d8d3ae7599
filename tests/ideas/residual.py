"""The kinetic layer as built in, written for one run: u + sigmoid(W_g u + b_g) * (W_m K(u) + b_m).

It shows what an idea's file looks like, and that this path gives about the built-in layer's result (the initial gate
and mix are drawn by torch.nn.Linear rather than from the pair's stream).  The other files change one thing each.
"""

import math

import torch


class Residual(torch.nn.Module):
    """Gate, mix and skip around one Lie-Trotter step K of the Kolmogorov operator d_xx + x d_y."""

    def __init__(self, channels, length, h):
        super().__init__()
        self.h = h
        self.gate = torch.nn.Linear(channels, channels)
        self.mix = torch.nn.Linear(channels, channels)

    def diffuse(self, u):
        """Multiply the k-th wave along the tokens by exp(-h k^2); the token axis is periodic."""
        wave = torch.arange(u.shape[1] // 2 + 1, dtype=u.dtype)
        decay = torch.exp(-self.h * wave**2)[:, None]
        return torch.fft.irfft(torch.fft.rfft(u, dim=1) * decay, n=u.shape[1], dim=1)

    def transport(self, u):
        """Shift token x by h x along the channels, which are periodic too."""
        _, length, channels = u.shape
        wave = torch.fft.fftfreq(channels, 1 / channels, dtype=u.dtype)
        shift = self.h * torch.arange(length, dtype=u.dtype)[:, None]
        turn = torch.exp(-2j * math.pi * wave * shift / channels)
        return torch.fft.ifft(torch.fft.fft(u, dim=2) * turn, dim=2).real

    def operator(self, u):
        """Return K(u) of tokens u (batch, token, channel)."""
        return self.transport(self.diffuse(u))

    def forward(self, u):
        return u + torch.sigmoid(self.gate(u)) * self.mix(self.operator(u))
