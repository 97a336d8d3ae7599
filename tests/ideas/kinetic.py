"""The kinetic layer as it is built in, written for one run; every other file here changes one thing of it."""

import math

import torch


class Kinetic(torch.nn.Module):
    """W_m ((1 - g) u + g K(u)) + b_m with the gate g = sigmoid(W_g u + b_g), by token and channel.

    K is one Lie-Trotter step of size h of the Kolmogorov operator d_xx + x d_y, on the periodic (token, channel) grid.
    """

    gate_bias = -2.5  # where the gate's bias starts; None: as drawn

    def __init__(self, channels, length, h):
        super().__init__()
        self.h = h
        self.gate = torch.nn.Linear(channels, channels)
        self.mix = torch.nn.Linear(channels, channels)

    def draw(self, rng):
        """Draw the initial weights from the pair's own stream, uniform in +-1/sqrt(C), as the built-in layer does."""
        bound = 1 / math.sqrt(len(self.gate.bias))
        for parameter in (self.gate.weight, self.gate.bias, self.mix.weight, self.mix.bias):
            parameter.data.copy_(torch.from_numpy(rng.uniform(-bound, bound, parameter.shape)))
        if self.gate_bias is not None:
            torch.nn.init.constant_(self.gate.bias, self.gate_bias)

    def diffuse(self, u):
        """Multiply the k-th wave along the tokens by exp(-h k^2)."""
        k = torch.arange(u.shape[1] // 2 + 1, dtype=u.dtype)
        decay = torch.exp(-self.h * k**2)[:, None]
        return torch.fft.irfft(torch.fft.rfft(u, dim=1) * decay, n=u.shape[1], dim=1)

    def transport(self, u):
        """Shift token x by h x along the channels."""
        _, length, channels = u.shape
        mode = torch.fft.fftfreq(channels, 1 / channels, dtype=u.dtype)
        shift = self.h * torch.arange(length, dtype=u.dtype)[:, None]
        turn = torch.exp(-2j * math.pi * mode * shift / channels)
        return torch.fft.ifft(torch.fft.fft(u, dim=2) * turn, dim=2).real

    def operator(self, u):
        """Return K(u) of tokens u (batch, token, channel); the placebo's, at h = 0, is the identity to the bit."""
        return u if self.h == 0 else self.transport(self.diffuse(u))

    def forward(self, u):
        g = torch.sigmoid(self.gate(u))
        return self.mix((1 - g) * u + g * self.operator(u))
