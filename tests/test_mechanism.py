"""Mechanism signature: layers with gates and mixes set by hand, the slow oracle, and planted wrong operators."""

import dataclasses
import math

import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

CONFIG = bench.Config()


def layer_and_weights(gate, mix, h=0.08, channels=3, length=32):
    """Return a layer whose gate is the same everywhere, by zero weights and a bias, and whose mix is given."""
    layer = bench.KineticLayer(CONFIG, [bench.Run(0, 0.006, (h,))], 0, (channels, length), 0)
    bias = torch.full((1, channels), math.log(gate / (1 - gate)), dtype=torch.float64)
    weights = [torch.zeros(1, channels, channels, dtype=torch.float64), bias]
    return layer, [*weights, torch.as_tensor(mix, dtype=torch.float64)[None], torch.ones_like(bias)]


def measure(layer, weights, length=32, channels=3):
    """Return (attenuation, displacement) as floats, on any tokens: the gate does not look at them."""
    tokens = torch.randn(1, channels, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [float(value) for value in bench.kinetic_signature(layer, weights, tokens, CONFIG)]


@pytest.mark.parametrize("h", [0.02, 0.08, 0.32])
def test_constant_gate_and_identity_mix_attenuate_by_the_prediction(h):
    """With nothing in the way, a(3) / a(0) is exp(-9 h): exactly in one channel, where transport does nothing, and
    nearly in three, where it moves a little power to other modes; the mix bias must not enter."""
    attenuation, _ = measure(*layer_and_weights(0.3, np.eye(1), h, channels=1), channels=1)
    assert attenuation == pytest.approx(math.exp(-9 * h), rel=1e-12)
    attenuation, _ = measure(*layer_and_weights(0.3, np.eye(3), h))
    assert attenuation == pytest.approx(math.exp(-9 * h), rel=0.01)


def test_displacement_of_a_hand_set_layer():
    """Skip plus gate times the diffused, shifted impulse: the phase of a sum of two known vectors."""
    h, gate = 0.08, 0.9
    _, moved = measure(*layer_and_weights(gate, np.eye(3), h))
    peak = (1 + 2 * sum(math.exp(-h * k * k) for k in range(1, 16)) + math.exp(-h * 256)) / 32
    total = 1 + gate * peak * np.exp(-2j * math.pi * h * 16 / 3)
    assert moved == pytest.approx(-3 / (2 * math.pi) * np.angle(total), abs=1e-12)


def test_a_strong_mix_shows_the_transport():
    """As the mix outweighs the skip, the displacement tends to h x = 1.28."""
    _, moved = measure(*layer_and_weights(0.999, 1e6 * np.eye(3)))
    assert moved == pytest.approx(1.28, abs=1e-5)


def test_gate_that_varies_along_the_tokens_is_averaged_by_power():
    """Against brute force over every sequence, for a trained layer."""
    config = dataclasses.replace(CONFIG, epochs=1, sizes=(64, 300, 8))
    run = bench.Run(0, 0.006, (0.08,))
    model = bench.StackedModel(config, [run])
    flat, _ = bench.train(model)
    oracle = plain_loop.Model(0, 0.08).double()
    with torch.no_grad():
        for parameter, value in zip(oracle.parameters(), model.split_parameters(flat), strict=True):
            parameter.copy_(value[0])
    tokens = model.data[0].tokens["test"][..., :256].permute(2, 1, 0)
    found = bench.signature(model, flat)[0]
    assert (found["attenuation"], found["displacement"]) == pytest.approx(plain_loop.signature(oracle, tokens))


@pytest.mark.parametrize(("length", "known"), [(5, False), (6, True), (7, True)])
def test_attenuation_needs_mode_three(length, known):
    """T = 5 has no mode 3; odd lengths above do."""
    layer, weights = layer_and_weights(0.3, np.eye(1), channels=1, length=length)
    attenuation, _ = measure(layer, weights, length, channels=1)
    assert math.isfinite(attenuation) == known
    if known:
        assert attenuation == pytest.approx(math.exp(-9 * 0.08), rel=1e-12)


def test_one_channel_has_no_displacement():
    """A shift along one channel cannot be seen."""
    _, moved = measure(*layer_and_weights(0.3, np.eye(1), channels=1), channels=1)
    assert math.isnan(moved)


def arm(probes, h=0.08):
    """Return an idea's arm with the given signatures."""
    return bench.Arm(((0.006, (h,)),), (0.1,), (0.1,), (0.1,) * len(probes), tuple(probes), 3609)


def test_confirmed_looks_at_the_attenuation_alone():
    """The reference is confirmed at a relative error of .034 while its displacement is far off."""
    probes = [{"signature": {"attenuation": 0.470259, "displacement": -0.1354923}}]
    block = bench.mechanism_signature(CONFIG, arm(probes), 32)
    assert block["predicted_fourier_attenuation"] == 0.4867523
    assert block["predicted_transport_displacement"] == 1.28
    assert block["attenuation_relative_error"] == pytest.approx(0.0338844, abs=2e-7)
    assert block["confirmed"] is True
    probes = [{"signature": {"attenuation": 0.4, "displacement": 1.28}}]
    assert bench.mechanism_signature(CONFIG, arm(probes), 32)["confirmed"] is False


def test_a_diverged_seed_leaves_no_signature():
    """A mean over the other seeds would hide it."""
    probes = [{"signature": {"attenuation": 0.48, "displacement": 0.0}}, {}]
    block = bench.mechanism_signature(CONFIG, arm(probes), 32)
    assert block["observed_fourier_attenuation"] is block["observed_transport_displacement"] is None
    assert block["confirmed"] is False


def test_underflowing_prediction_is_no_division_by_zero():
    """exp(-9 h) prints as 0 for a large h: nothing can be confirmed."""
    probes = [{"signature": {"attenuation": 1e-9, "displacement": 0.0}}]
    block = bench.mechanism_signature(CONFIG, arm(probes, h=5.0), 32)
    assert block["predicted_fourier_attenuation"] == 0.0
    assert block["attenuation_relative_error"] is None and block["confirmed"] is False


def operator(kind=bench.KineticOperator, h=0.08, length=32, channels=3):
    return kind(torch.tensor([h], dtype=torch.float64), length, channels)


@pytest.mark.parametrize(("length", "channels"), [(32, 3), (31, 3), (8, 5), (2, 4)])
def test_operator_alone_is_confirmed(length, channels):
    """Attenuation exp(-h k^2) at every mode, displacement h x at every token."""
    block = bench.isolated_mechanism(operator(length=length, channels=channels), CONFIG)
    assert block["attenuation"] == pytest.approx([math.exp(-0.08 * k * k) for k in range(length // 2 + 1)], abs=1e-7)
    assert block["displacement"] == pytest.approx([0.08 * x for x in range(length)], abs=1e-7)
    assert block["attenuation_confirmed"] and block["transport_confirmed"]
    assert block["displacement_slope"] == 0.08


class NoTransport(bench.KineticOperator):
    def transport(self, tokens):
        return tokens


class NoDiffusion(bench.KineticOperator):
    def diffuse(self, tokens):
        return tokens


class HalfShift(bench.KineticOperator):
    def __init__(self, h, *shape):
        super().__init__(h, *shape)
        self.phase = bench.KineticOperator(h / 2, *shape).phase


class LinearDecay(bench.KineticOperator):
    def __init__(self, h, *shape):
        super().__init__(h, *shape)
        self.decay = torch.exp(-h[:, None] * self.modes)


@pytest.mark.parametrize(
    ("kind", "diffuses", "transports"),
    [(NoTransport, True, False), (HalfShift, True, False), (NoDiffusion, False, True), (LinearDecay, False, True)],
)
def test_planted_wrong_operators_fail(kind, diffuses, transports):
    """The isolated measurement tells which half of the operator is wrong."""
    block = bench.isolated_mechanism(operator(kind), CONFIG)
    assert (block["attenuation_confirmed"], block["transport_confirmed"]) == (diffuses, transports)


def test_two_channels_cannot_tell_a_displacement():
    """Below three channels the phase is 0 or pi."""
    block = bench.isolated_mechanism(operator(channels=2), CONFIG)
    assert block["displacement"] is block["transport_confirmed"] is None
    assert block["attenuation_confirmed"]


def test_irregular_clock_keeps_the_mechanism():
    """At jittered times the least-squares operator still attenuates as predicted."""
    config = dataclasses.replace(CONFIG, track="irregular")
    layer = bench.KineticLayer(config, [bench.Run(seed, 0.006, (0.08,)) for seed in range(4)], 0, (3, 32), 0)
    block = bench.isolated_mechanism(layer.operator, config)
    assert block["attenuation_confirmed"] and block["transport_confirmed"]
