"""The layer's other forms (tests/ideas) are what their names say, and go through the harness as a user's layer does."""

import dataclasses
import json
import math

import idea_table
import pytest
import torch

import stage2_bench as bench

CHANNELS, LENGTH, H = 3, 32, 0.08
IDEAS = idea_table.find_ideas()


def build(form, channels=CHANNELS, length=LENGTH, h=H):
    """Return a form's layer for one run, with PyTorch's seed fixed, in float64."""
    torch.manual_seed(1)
    return bench.idea_class(IDEAS[form])(channels, length, h).double()


def tokens(channels=CHANNELS, length=LENGTH, batch=5):
    """Return random tokens (batch, T, C)."""
    return torch.randn(batch, length, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def kinetic(layer, u, h=H):
    """Apply the built-in layer of one run, with the weights of a form's layer, to tokens (batch, T, C)."""
    run = bench.Run(0, 0.003, (h,))
    built_in = bench.KineticLayer(bench.Config(), [run], 0, (u.shape[2], u.shape[1]), 0)
    weights = [p.detach()[None] for p in (layer.gate.weight, layer.gate.bias, layer.mix.weight, layer.mix.bias)]
    return built_in(weights, u.permute(2, 1, 0)[None], None)[0].permute(2, 1, 0)


def test_every_form_that_the_issue_lists_is_there():
    """The form itself, and the six others, are found by the table."""
    names = {"convex", "convex_identity", "nearly_closed", "no_diffusion", "no_transport", "reflecting", "residual"}
    assert set(IDEAS) == names


@pytest.mark.parametrize("form", IDEAS)
@pytest.mark.parametrize("channels, length", [(3, 32), (1, 2), (2, 5)])
def test_harness_accepts_every_form(form, channels, length, tmp_path):
    """The checks before a training pass, for the default h and others, for odd sizes too."""
    track = tmp_path / "track.py"
    make = f"r.standard_normal((9, {length}, {channels})), r.standard_normal(9)"
    track.write_text(f"import numpy\nr = numpy.random.default_rng(0)\ndef make(seed, split):\n    return {make}\n")
    config = bench.Config(idea=IDEAS[form], hs=((0.02, 0.32), (H,)))
    config = config if channels == 3 else dataclasses.replace(config, track=str(track))
    bench.check_idea(config, (channels, length))


@pytest.mark.parametrize("form", IDEAS)
@pytest.mark.parametrize("channels, count", [(1, 4), (2, 12), (3, 24), (5, 60)])
def test_every_form_has_the_kinetic_layers_parameters(form, channels, count):
    """A gate and a mix of C^2 + C parameters each, nothing else: 24 for the three channels, as in the reference."""
    assert sum(p.numel() for p in build(form, channels).parameters()) == count


@pytest.mark.parametrize("channels, length", [(3, 32), (2, 7), (1, 2), (5, 16)])
@pytest.mark.parametrize("form", ["residual", "nearly_closed"])
def test_residual_forms_equal_the_built_in_layer(form, channels, length):
    """With the same weights the file and the built-in layer give the same tokens."""
    layer, u = build(form, channels, length), tokens(channels, length)
    torch.testing.assert_close(layer(u), kinetic(layer, u), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", IDEAS)
def test_one_run_and_a_stack_agree(form):
    """What torch.func makes of a form for three runs is what the form gives run by run."""
    config = bench.Config(idea=IDEAS[form])
    runs = [bench.Run(seed, 0.003, (H,)) for seed in range(3)]
    layer = bench.ModuleLayer(config, runs, 0, (CHANNELS, LENGTH), 0)
    assert layer.stacked
    u = torch.stack([tokens(batch=3) * (1 + i) for i in range(3)])  # (runs, batch, T, C)
    stacked = layer(layer.state, u.permute(0, 3, 2, 1), None).permute(0, 3, 2, 1)
    for i, run in enumerate(runs):
        (alone,) = bench.build_modules(config, run.seed, run.h, (CHANNELS, LENGTH))
        torch.testing.assert_close(stacked[i], alone(u[i]), rtol=0, atol=1e-12)


def test_nearly_closed_gate_starts_nearly_closed():
    """At zero tokens the gate is 1 / (1 + e^4), and the layer starts near the identity."""
    layer, u = build("nearly_closed"), tokens()
    at_zero = layer.gate(torch.zeros(3, dtype=torch.float64)).sigmoid()
    assert at_zero.tolist() == pytest.approx([1 / (1 + math.exp(4))] * 3)
    assert (layer(u) - u).std() < 0.1 * (build("residual")(u) - u).std()


@pytest.mark.parametrize("half_waves", range(LENGTH))
def test_reflecting_diffusion_of_each_cosine(half_waves):
    """Each even mode decays by exp(-h (j/2)^2): the eigenvalues of diffusion between reflecting ends."""
    x = torch.arange(LENGTH, dtype=torch.float64)
    wave = torch.cos(math.pi * half_waves * (x + 0.5) / LENGTH)[None, :, None].expand(2, -1, CHANNELS)
    diffused = build("reflecting").diffuse(wave)
    torch.testing.assert_close(diffused, wave * math.exp(-H * (half_waves / 2) ** 2), rtol=0, atol=1e-12)


def test_reflecting_ends_do_not_meet():
    """An impulse at the first token leaks to the last one in the periodic form, and not in the reflecting one."""
    impulse = torch.zeros(1, LENGTH, CHANNELS, dtype=torch.float64)
    impulse[:, 0] = 1.0
    assert build("residual").diffuse(impulse)[0, -1, 0] > 0.1
    assert abs(build("reflecting").diffuse(impulse)[0, -1, 0]) < 1e-6


@pytest.mark.parametrize("form", ["convex", "convex_identity"])
@pytest.mark.parametrize("bias, opened", [(-1e3, False), (1e3, True)])
def test_convex_gate_chooses(form, bias, opened):
    """A closed gate gives the token itself, an open one the mixture without the token."""
    layer, u = build(form), tokens()
    torch.nn.init.constant_(layer.gate.bias, bias)
    mixture = kinetic(layer, u) - u  # the built-in gate is open too, and adds the same mixture to the token
    torch.testing.assert_close(layer(u), mixture if opened else u, rtol=0, atol=1e-12)


def test_convex_identity_starts_as_the_identity_without_physics():
    """At h = 0, where K is the identity, it starts as the raw model; at h > 0 it does not."""
    u = tokens()
    torch.testing.assert_close(build("convex_identity", h=0.0)(u), u, rtol=0, atol=1e-12)
    assert not torch.allclose(build("convex_identity")(u), u, atol=1e-2)


def test_no_transport_keeps_channels_apart():
    """K touches no other channel, and still diffuses a wave by exp(-h k^2)."""
    x = torch.arange(LENGTH, dtype=torch.float64)
    u = torch.zeros(1, LENGTH, CHANNELS, dtype=torch.float64)
    u[0, :, 1] = torch.cos(2 * math.pi * 3 * x / LENGTH)
    mixed = build("no_transport").operator(u)
    torch.testing.assert_close(mixed, u * math.exp(-9 * H), rtol=0, atol=1e-12)


def test_no_diffusion_keeps_tokens_apart():
    """K touches no other token, keeps the channels' sum, and moves token 25 by exactly two channels at h = 0.08."""
    u = torch.zeros(1, LENGTH, CHANNELS, dtype=torch.float64)
    u[0, 25] = torch.tensor([1.0, 2.0, 3.0])
    mixed = build("no_diffusion").operator(u)
    expected = torch.zeros_like(u)
    expected[0, 25] = torch.tensor([2.0, 3.0, 1.0])
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-12)


def test_smoke_of_a_form_end_to_end(tmp_path):
    """The whole command with a form: its name, its parameters, a placebo of its own and no kinetic signature."""
    options = ["--smoke", "--seeds", "2", "--epochs", "1", "--lrs", "0.003", "--jobs", "1", "--quiet"]
    report = idea_table.benchmark([*options, "--idea", IDEAS["reflecting"]], tmp_path)
    assert report["model"] == "rnn_small_Reflecting_vs_raw"
    assert report["parameter_parity"] == {"baseline": 3585, "idea": 3609}
    assert report["mechanism_signature"] is None
    assert report["extensions"]["isolated_mechanism"] is None
    placebo = report["extensions"]["placebo"]
    assert placebo["parameters"] == 3609
    assert placebo["best_cfg"] == {"lr": 0.003, "h": 0.0}
    assert placebo["full"]["per_seed"] != report["idea"]["per_seed"]
    cells = idea_table.row("reflecting", report)
    assert len(cells) == len(idea_table.HEADER)
    assert cells[:2] == ["reflecting", "3609"]


def test_table_of_the_committed_report():
    """The table's first rows say what the committed report says: ratio 1.89, no pair won, exact p 2/256."""
    report = json.loads((idea_table.HERE.parent / bench.REPORT).read_text(encoding="utf-8"))
    ratio = report["idea"]["mean"] / report["baseline"]["full"]["mean"]
    cells = idea_table.row("kinetic", report)
    assert cells[3] == f"{ratio:.2f}"
    assert cells[4] == f"{report['comparison']['idea_wins']} of 8"
    assert idea_table.baseline_row(report)[1:4] == ["3585", f"{report['baseline']['full']['mean']:.5f}", "1.00"]


def test_table_shows_a_dash_where_a_run_diverged():
    """A null of the report is a dash, not a number and no traceback."""
    report = json.loads((idea_table.HERE.parent / bench.REPORT).read_text(encoding="utf-8"))
    report["idea"]["mean"] = report["extensions"]["statistics"]["p_exact"] = None
    cells = idea_table.row("kinetic", report)
    assert (cells[2], cells[3], cells[5]) == ("-", "-", "-")
