"""Mechanism and closed loop: layers set by hand against closed forms, random ones against the slow plain loop, planted
wrong operators, and what `confirmed` looks at."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

CONFIG = bench.Config()
HERE = Path(__file__).parent
SMOKE = json.loads((HERE / "smoke_report.json").read_text())
SIZES = {"train": 16, "test": 24, "val": 8}
HORIZONS = (1, 4, 16, 20)
SMALL = dataclasses.replace(
    CONFIG, sizes=tuple(SIZES.values()), probe_sequences=16, rollout_steps=HORIZONS[-1], horizons=HORIZONS
)


@pytest.fixture(autouse=True)
def double():
    """Measure as the benchmark does: float64, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with bench.computing(CONFIG):
        yield
    torch.set_num_threads(threads)


def layer_of(h, channels=3, length=32):
    """Return a kinetic layer with its initial weights, in float64."""
    return bench.build_layers(CONFIG, bench.Run(0, 0.006, (h,)), channels, length)[0]


@torch.no_grad()
def set_by_hand(layer, gate, mix):
    """Give a layer the same gates (a number by channel, or one) at every token, a mix, and a bias that may not show."""
    layer.gate.weight.zero_()
    layer.gate.bias.copy_(torch.logit(torch.as_tensor(gate, dtype=torch.float64)))
    layer.mix.weight.copy_(torch.as_tensor(mix))
    layer.mix.bias.fill_(1.0)
    return layer


def measure(layer, tokens=None, length=32):
    """Return (attenuation, displacement) on tokens, by default on any: a gate set by hand does not look at them."""
    if tokens is None:
        tokens = torch.from_numpy(np.random.default_rng(0).standard_normal((5, length, layer.mix.weight.shape[0])))
    found = layer.signature(tokens)
    return found["observed_fourier_attenuation"], found["observed_transport_displacement"]


# The signature of a layer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [0.02, 0.08, 0.32])
def test_one_channel_attenuates_by_the_prediction_exactly(h):
    """Where transport does nothing, a(3) / a(0) is exp(-9 h), whatever the gate; in three channels it moves a little
    power to other modes."""
    attenuation, displacement = measure(set_by_hand(layer_of(h, 1), 0.3, [[0.7]]))
    assert attenuation == pytest.approx(math.exp(-9 * h), rel=1e-12)
    assert math.isnan(displacement)
    attenuation, _ = measure(set_by_hand(layer_of(h), 0.3, np.eye(3)))
    assert attenuation == pytest.approx(math.exp(-9 * h), rel=0.01)


def test_attenuation_with_a_gate_for_each_channel_and_any_mix():
    """By the formula: a wave in channel c comes out of K in channel d times exp(-h k^2) (1 + 2 cos(2 pi (d - c - h x) /
    3)) / 3, is gated and mixed; its k-th Fourier coefficients give the power."""
    h, gate = 0.2, np.array([0.1, 0.5, 0.9])
    mix = np.random.default_rng(1).standard_normal((3, 3))
    x, (d, c) = np.arange(32)[:, None, None], np.indices((3, 3))
    moved = (1 + 2 * np.cos(2 * np.pi * (d - c - h * x) / 3)) / 3

    def amplitude(k):
        wave = np.cos(2 * np.pi * k * x / 32) * math.exp(-h * k * k)
        turned = np.exp(-2j * np.pi * k * x / 32)
        spectrum = mix @ (gate[:, None] * (wave * turned * moved).sum(0)) / (32 if k == 0 else 16)
        return np.linalg.norm(spectrum)

    attenuation, _ = measure(set_by_hand(layer_of(h), gate, mix))
    assert attenuation == pytest.approx(amplitude(3) / amplitude(0), rel=1e-12)


def diffused_peak(h, length=32):
    """Return what diffusion leaves of a unit impulse at its own token: the mean of exp(-h k^2) over all modes."""
    return sum(math.exp(-h * k * k) for k in range(-length // 2 + 1, length // 2 + 1)) / length


@pytest.mark.parametrize(("h", "gate"), [(0.08, 0.9), (0.08, 0.1), (0.05, 0.99)])
def test_displacement_of_a_hand_set_layer(h, gate):
    """The impulse's closed share and the open share's diffused, shifted impulse: the phase of two known vectors."""
    _, moved = measure(set_by_hand(layer_of(h), gate, np.eye(3)))
    total = 1 - gate + gate * diffused_peak(h) * np.exp(-2j * math.pi * h * 16 / 3)
    assert moved == pytest.approx(-3 / (2 * math.pi) * np.angle(total), abs=1e-12)


def test_an_open_gate_shows_the_transport_alone_and_a_mix_adds_its_own():
    """As the gate opens, the displacement tends to h x = 1.28; a mix that moves all channels on by one adds 1, modulo
    the three channels."""
    _, moved = measure(set_by_hand(layer_of(0.08), 1 - 1e-9, np.eye(3)))
    assert moved == pytest.approx(1.28, abs=1e-6)
    _, moved = measure(set_by_hand(layer_of(0.08), 1 - 1e-9, np.roll(np.eye(3), 1, axis=0)))
    assert moved == pytest.approx(1.28 + 1 - 3, abs=1e-6)


def twin_of(layers, channels=3):
    """Return the plain loop's model with the weights of these layers."""
    plain = plain_loop.Model(0, tuple(layer.h for layer in layers), channels)
    with torch.no_grad():
        for own, layer in zip(plain.layers, layers, strict=True):
            for ours, theirs in zip(own.parameters(), layer.parameters(), strict=True):
                ours.copy_(theirs)
    return plain


@pytest.mark.parametrize(("length", "channels"), [(32, 3), (31, 3), (7, 4), (6, 5)])
@pytest.mark.parametrize("uneven", [False, True])
def test_gates_that_vary_are_averaged_by_power_as_in_the_plain_loop(length, channels, uneven):
    """Strong random gates over 40 sequences, on regular tokens and on uneven ones, against brute force over every
    sequence; the displacement takes the mean gate."""
    rng, layer = np.random.default_rng(length), layer_of(0.13, channels, length)
    angles = None
    if uneven:
        t = np.arange(length) + rng.uniform(-0.2, 0.2, length)
        angles = 2 * math.pi * (t - t[0]) / length
        layer.place(angles)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.from_numpy(2 * rng.standard_normal(parameter.shape)))
    tokens = torch.from_numpy(rng.standard_normal((40, length, channels)))
    assert measure(layer, tokens) == pytest.approx(
        plain_loop.signature(twin_of([layer], channels), tokens, angles), rel=1e-9
    )


@pytest.mark.parametrize(("length", "known"), [(5, False), (6, True), (7, True)])
def test_attenuation_needs_the_third_mode(length, known):
    """T = 5 has no mode 3; 6, where it is the last, and odd lengths above have."""
    attenuation, _ = measure(set_by_hand(layer_of(0.08, 1, length), 0.3, [[1.0]]), length=length)
    assert math.isfinite(attenuation) == known
    if known:
        assert attenuation == pytest.approx(math.exp(-9 * 0.08), rel=1e-12)


@pytest.mark.parametrize(("length", "token"), [(32, 16), (31, 15), (8, 4)])
def test_predictions_follow_from_step_and_length(length, token):
    """exp(-9 h), and h times the token in the middle."""
    found = layer_of(0.11, 3, length).signature(torch.zeros(2, length, 3, dtype=torch.float64))
    assert found["predicted_fourier_attenuation"] == pytest.approx(math.exp(-9 * 0.11), rel=1e-15)
    assert found["predicted_transport_displacement"] == pytest.approx(0.11 * token, rel=1e-15)


# The operator alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "channels"), [(32, 3), (31, 3), (8, 5), (2, 4)])
@pytest.mark.parametrize("h", [0.0, 0.08, 0.7, 1.4])
def test_operator_alone_is_confirmed(length, channels, h):
    """Attenuation exp(-h k^2) at every mode, displacement h x at every token: unwrapped, beyond half the channels."""
    block = bench.isolated_mechanism(CONFIG, h, (channels, length))
    assert block["h"] == h
    assert block["attenuation"] == pytest.approx([math.exp(-h * k * k) for k in range(length // 2 + 1)], abs=1e-7)
    assert block["displacement"] == pytest.approx([h * x for x in range(length)], abs=1e-7)
    assert block["attenuation_confirmed"] is block["transport_confirmed"] is True
    assert block["displacement_slope"] == pytest.approx(h, abs=1e-7)
    assert block["attenuation_max_relative_error"] <= 1e-7 and block["displacement_max_error"] <= 1e-7


@pytest.mark.parametrize(
    ("channels", "h", "known"),
    [
        (1, 0.08, False),
        (2, 0.08, False),
        (3, 1.49, True),
        (3, 1.5, False),
        (3, 2, False),
        (4, 1.9, True),
        (4, 2, False),
    ],
)
def test_displacement_cannot_be_told_below_three_channels_or_from_half_of_them_on(channels, h, known):
    """The one wave of two channels is real; from h = C / 2 on the way from token to token is ambiguous: null."""
    block = bench.isolated_mechanism(CONFIG, h, (channels, 32))
    for name in ("displacement", "displacement_slope", "displacement_max_error", "transport_confirmed"):
        assert (block[name] is not None) == known
    assert block["attenuation_confirmed"] is True


DIFFUSION, TRANSPORT = bench.diffusion_matrix, bench.transport_matrix


def one_stray_token(length, channels, h):
    """Return the transport with one token 0.02 channels too far, which moves the slope by a tenth of a thousandth."""
    matrices = TRANSPORT(length, channels, h)
    matrices[5] = TRANSPORT(length, channels, h + 0.004)[5]
    return matrices


WRONG = {
    "no transport": ("transport_matrix", lambda length, channels, h: TRANSPORT(length, channels, 0.0), (True, False)),
    "half a shift": ("transport_matrix", lambda length, channels, h: TRANSPORT(length, channels, h / 2), (True, False)),
    "shifted back": ("transport_matrix", lambda length, channels, h: TRANSPORT(length, channels, -h), (True, False)),
    "2 % too far": (
        "transport_matrix",
        lambda length, channels, h: TRANSPORT(length, channels, 1.02 * h),
        (True, False),
    ),
    "one stray token": ("transport_matrix", one_stray_token, (True, False)),
    "no diffusion": ("diffusion_matrix", lambda length, h, angles=None: np.eye(length), (False, True)),
    "too much": ("diffusion_matrix", lambda length, h, angles=None: DIFFUSION(length, 1.01 * h, angles), (False, True)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_planted_wrong_operators_fail(monkeypatch, fault):
    """The isolated measurement tells which half of the operator is wrong."""
    name, wrong, expected = WRONG[fault]
    monkeypatch.setattr(bench, name, wrong)
    block = bench.isolated_mechanism(CONFIG, 0.08, (3, 32))
    assert (block["attenuation_confirmed"], block["transport_confirmed"]) == expected


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_operator_is_measured_on_every_seeds_clock(monkeypatch, wrong):
    """On an uneven clock each seed has a matrix of its own: one that is wrong, of whichever seed, is not confirmed."""
    config = dataclasses.replace(CONFIG, track="irregular", seeds=(0, 1, 2))
    right = bench.isolated_mechanism(config, 0.08, (3, 32))
    assert right["attenuation_confirmed"] is right["transport_confirmed"] is True
    assert right["attenuation"] == pytest.approx([math.exp(-0.08 * k * k) for k in range(17)], abs=1e-7)
    clock = bench.token_angles(config, wrong)

    def misplaced(length, h, angles=None):
        return DIFFUSION(length, 2 * h if np.array_equal(angles, clock) else h, angles)

    monkeypatch.setattr(bench, "diffusion_matrix", misplaced)
    found = bench.isolated_mechanism(config, 0.08, (3, 32))
    assert found["attenuation_confirmed"] is False
    assert found["attenuation_max_relative_error"] == pytest.approx(1 - math.exp(-0.08 * 64), abs=1e-6)  # at k = 8
    mean = [(2 * math.exp(-0.08 * k * k) + math.exp(-0.16 * k * k)) / 3 for k in range(17)]
    assert found["attenuation"] == pytest.approx(mean, abs=1e-7)


# Closed loop and knockout ---------------------------------------------------------------------------------------------


def small_data(monkeypatch, seed, track="dynamics"):
    """Return the plain loop's data of a seed, in the small sizes."""
    monkeypatch.setattr(plain_loop, "SIZES", SIZES)
    return plain_loop.make_data(seed, track=track)


def plain_of(model, i):
    """Return the plain loop's model with the weights of a model's i-th run."""
    plain = plain_loop.Model(0, model.runs[i].h, hidden=model.config.hidden)
    own = [*(stacked[i] for stacked in model.core), *(p for layer in model.layers[i] for p in layer.parameters())]
    with torch.no_grad():
        for ours, theirs in zip(plain.parameters(), own, strict=True):
            ours.copy_(theirs)
    return plain


def perturbed(config, runs):
    """Return a model whose weights are neither the initial ones nor trained, with gates that are well open."""
    model = bench.Model(config, runs)
    with torch.no_grad():
        model.flat.add_(0.1 * torch.from_numpy(np.random.default_rng(0).standard_normal(model.flat.shape)))
        for layer in (layer for layers in model.layers for layer in layers):
            layer.gate.bias.add_(2.5)
    return model


@pytest.mark.parametrize("track", ["dynamics", "lorenz", "irregular"])
@pytest.mark.parametrize("h", [None, (0.08,), (0.02, 0.3)])
def test_closed_loop_equals_the_plain_loop(monkeypatch, track, h):
    """Twenty steps of feeding predictions back, two seeds side by side, each with its own scales and its own clock,
    which moves along with the window; and the errors of repeating the last measured position and of the training mean:
    as the plain loop has them."""
    config = dataclasses.replace(SMALL, track=track)
    model = perturbed(config, [bench.Run(seed, 0.006, h) for seed in (3, 5)])
    before = bench.evaluate(model, "test")
    found, columns = bench.rollout(model), np.array(HORIZONS) - 1
    for i, seed in enumerate((3, 5)):
        ready, raw, scales = small_data(monkeypatch, seed, track)
        errors = plain_loop.closed_loop(plain_of(model, i), ready, raw, scales, 20, 16)
        repeated, mean = plain_loop.closed_loop_floors(raw, scales, 20, 16)
        assert found[i]["rollout"] == pytest.approx(errors[columns], rel=1e-9)
        assert found[i]["floor"] == pytest.approx(repeated[columns], rel=1e-9)
        assert found[i]["predict_mean"] == pytest.approx(mean[columns], rel=1e-9)
    assert np.array_equal(bench.evaluate(model, "test"), before)  # its clock is that of the window again


@pytest.mark.parametrize("track", ["dynamics", "lorenz", "irregular"])
def test_closed_loop_of_the_truth_sees_the_true_tokens(monkeypatch, track):
    """A model that knows the next position makes no error; the windows it is shown, and the angles that its layers are
    told, are those of the true path from the second token on."""
    config = dataclasses.replace(SMALL, track=track)
    (_, raw, scales), told, step = small_data(monkeypatch, 3, track), [], iter(range(20))
    _, _, path, force, truth, t = raw
    path, samples = np.column_stack((path, truth[:, path.shape[1] :]))[:16], path.shape[1]
    place = bench.KineticLayer.place
    monkeypatch.setattr(bench.KineticLayer, "place", lambda layer, angles: (told.append(angles), place(layer, angles)))
    model = bench.Model(config, [bench.Run(3, 0.006, (0.08,))])

    def knowing(self, batches):
        first = next(step)
        seen = slice(first, first + samples)
        tokens = plain_loop.make_tokens(path[:, seen], t[seen], None if force is None else force[:16, seen])
        assert batches[0].numpy() == pytest.approx((tokens - scales[0]) / scales[1], abs=1e-11)
        if track == "irregular":
            assert told[-1] == pytest.approx(2 * np.pi * (t[seen][1:] - t[first + 1]) / (32 * 0.15), abs=1e-12)
        return torch.from_numpy((path[:, first + samples] - scales[2]) / scales[3])[None, :, None]

    monkeypatch.setattr(bench.Model, "__call__", knowing)
    assert max(bench.rollout(model)[0]["rollout"]) < 1e-9  # of the solver
    assert next(step, None) is None  # all 20 were taken
    if track == "irregular":
        assert told[-1] == pytest.approx(plain_loop.angles(t[1:33]), abs=1e-12)


@pytest.mark.parametrize("track", ["dynamics", "irregular"])
@pytest.mark.parametrize("h", [(0.08,), (0.02, 0.3)])
def test_knockout_is_the_same_model_without_its_operator(monkeypatch, track, h):
    """Same weights, every K the identity, all test sequences: as in the plain loop; the model itself stays as it is."""
    model = perturbed(dataclasses.replace(SMALL, track=track), [bench.Run(seed, 0.006, h) for seed in (3, 5)])
    weights, scores = model.flat.clone(), bench.evaluate(model, "test")
    plain = [(plain_of(model, i), small_data(monkeypatch, seed, track)[0]) for i, seed in enumerate((3, 5))]
    found = bench.knockout(model)
    assert found == pytest.approx([plain_loop.knockout(*one) for one in plain], rel=1e-9)
    assert torch.equal(model.flat, weights) and np.array_equal(bench.evaluate(model, "test"), scores)
    assert scores == pytest.approx([plain_loop.mse(*one, "test") for one in plain], rel=1e-9)
    assert min(abs(found - scores) / scores) > 1e-3


# What the report says -------------------------------------------------------------------------------------------------


def follows(tmp_path, report):
    """Say whether a report's derived fields follow from its own numbers: --diff of it with itself finds nothing."""
    path = tmp_path / bench.REPORT
    path.write_text(json.dumps(report))
    return bench.main(["--diff", str(path), "--out-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize("displacement", [-0.0848644, 1.28, 99.0, None])
@pytest.mark.parametrize(
    ("error", "confirmed"),
    [(0, True), (0.0999, True), (-0.0999, True), (0.1001, False), (-0.1001, False), (-1, False)],
)
def test_confirmed_looks_at_the_attenuation_alone(tmp_path, displacement, error, confirmed):
    """Within a relative error of 0.1 it is confirmed, whatever the displacement: the reference is, with -0.135 for
    1.28.  The error is that of the printed numbers."""
    block = dict(SMOKE["mechanism_signature"], observed_transport_displacement=displacement)
    predicted = block["predicted_fourier_attenuation"]
    observed = block["observed_fourier_attenuation"] = round(predicted * (1 + error), 7)
    block["attenuation_relative_error"] = round(abs(observed - predicted) / predicted, 7)
    for said in (confirmed, not confirmed):
        report = SMOKE | {"mechanism_signature": block | {"confirmed": said}}
        assert follows(tmp_path, report) == (said == confirmed)


def test_nothing_is_confirmed_without_a_number(tmp_path):
    """Where a seed diverged, the observed attenuation and its error are null, and nothing is confirmed."""
    unknown = {"observed_fourier_attenuation": None, "attenuation_relative_error": None}
    block = SMOKE["mechanism_signature"] | unknown
    assert follows(tmp_path, SMOKE | {"mechanism_signature": block | {"confirmed": False}})
    assert not follows(tmp_path, SMOKE | {"mechanism_signature": block | {"confirmed": True}})


TRACK = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.standard_normal((24, {length}, {channels}))
    return tokens, tokens[:, -1, 0]
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Return a function: the report of a short run on tokens of a given shape, in this process."""
    base = tmp_path_factory.mktemp("mechanism")

    def report(*options, length=8, channels=3):
        track = base / f"track_{length}_{channels}.py"
        track.write_text(TRACK.format(length=length, channels=channels))
        words = ["--track", track, "--out-dir", base / "out", "--seeds", 2, "--sweep-seeds", 1, "--lrs", 0.003]
        words += ["--epochs", 2, "--hidden", 4, "--jobs", 1, "--quiet", *options]
        assert bench.main([str(word) for word in words]) == 0
        return json.loads((base / "out" / bench.REPORT).read_text())

    return report


def test_the_first_layer_of_a_stack_is_described(reported):
    """Predictions, isolated measurement and displacement's token are those of the first step."""
    report = reported("--h", "0.02+0.4")
    block, alone = report["mechanism_signature"], report["extensions"]["isolated_mechanism"]
    assert block["predicted_fourier_attenuation"] == round(math.exp(-9 * 0.02), 7)
    assert block["predicted_transport_displacement"] == round(4 * 0.02, 7)
    assert alone["h"] == 0.02 and alone["displacement"] == [round(0.02 * x, 7) for x in range(8)]
    assert block["confirmed"] is True


@pytest.mark.parametrize(("length", "channels"), [(8, 2), (8, 1), (5, 3)])
def test_what_a_shape_cannot_show_is_null(reported, length, channels):
    """Fewer than three channels show no displacement, but may confirm the attenuation; five tokens have no mode 3, and
    confirm nothing."""
    report = reported(length=length, channels=channels)
    block, extra = report["mechanism_signature"], report["extensions"]
    for measured in (block, extra["mechanism_untrained"]):
        assert (measured["observed_transport_displacement"] is None) == (channels < 3)
        assert (measured["observed_fourier_attenuation"] is None) == (length < 6)
    assert (extra["isolated_mechanism"]["displacement"] is None) == (channels < 3)
    assert (extra["transport_confirmed"] is None) == (channels < 3)
    assert block["confirmed"] is (length >= 6)
    assert (block["attenuation_relative_error"] is None) == (length < 6)


def test_a_prediction_of_zero_confirms_nothing(reported):
    """exp(-9 h) prints as 0 for a large h: no relative error, no division by zero; nor can the displacement be told."""
    report = reported("--h", "5")
    block = report["mechanism_signature"]
    assert block["predicted_fourier_attenuation"] == 0.0
    assert block["attenuation_relative_error"] is None and block["confirmed"] is False
    assert report["extensions"]["transport_confirmed"] is None


OWN = """
import torch

class Own(torch.nn.Module):
    pairs = {}
    def __init__(self, channels, length, h):
        super().__init__()
        self.h, self.scale, self.seed = h, torch.nn.Parameter(torch.ones(channels)), torch.initial_seed()
    def forward(self, tokens):
        return tokens * (1 + self.h * self.scale)
    def signature(self, tokens):
        return {name: value(self, tokens) if callable(value) else value for name, value in self.pairs.items()}

class Silent(Own):
    signature = None

del Silent.signature
"""
BOTH = {"predicted_a": 1.0, "observed_a": 1.0999, "predicted_b": -2.0, "observed_b": -2.1998}
PAIRS = {
    "both within": (BOTH, True),
    "first beyond": (BOTH | {"observed_a": 1.1001}, False),
    "last beyond": (BOTH | {"observed_b": -2.2002}, False),
    "below": (BOTH | {"observed_a": 0.8999}, False),
    "no prediction": (BOTH | {"observed_c": 1.0}, False),
    "prediction of zero": (BOTH | {"predicted_a": 0.0, "observed_a": 0.0}, False),
    "not a number": (BOTH | {"observed_a": math.nan}, False),
    "infinite": (BOTH | {"observed_b": -math.inf}, False),
    "named as the built-in's": (
        {"predicted_fourier_attenuation": 1.0, "observed_fourier_attenuation": 1.0}
        | {"predicted_transport_displacement": 1.28, "observed_transport_displacement": -0.1},
        False,
    ),
    "a prediction beside": (BOTH | {"predicted_c": 5.0}, True),
}


@pytest.fixture(scope="module")
def own(reported, tmp_path_factory):
    """Return a function: the report of an own layer whose signature is the given pairs."""
    folder = tmp_path_factory.mktemp("own")

    def report(pairs, *options):
        path = folder / f"own_{len(list(folder.iterdir()))}.py"
        text = repr({name: value for name, value in pairs.items() if isinstance(value, float)})
        text = text.replace("nan", "float('nan')").replace("-inf", "-float('inf')")
        path.write_text(f"{OWN}\nOwn.pairs = {text}\n" + "".join(
            f"Own.pairs[{name!r}] = {value}\n" for name, value in pairs.items() if isinstance(value, str)
        ))  # fmt: skip
        return reported("--idea", f"{path}:{'Own' if pairs else 'Silent'}", *options)

    return report


@pytest.mark.parametrize("case", PAIRS)
def test_own_signature_is_judged_by_all_its_pairs(own, case):
    """Every observed_X must lie within 0.1 of its predicted_X; one that does not, or has none, is enough to refute."""
    pairs, confirmed = PAIRS[case]
    block = own(pairs)["mechanism_signature"]
    finite = {name: value if math.isfinite(value) else None for name, value in pairs.items()}
    assert block == finite | {"confirmed": confirmed}
    assert list(block) == [*pairs, "confirmed"]


def test_own_signature_is_that_of_the_trained_layer_and_the_mean_over_the_seeds(own):
    """A measured gain, to seven digits; before training it is the initial one; a seed that has none leaves null."""
    gain = "lambda layer, tokens: float(layer(tokens).norm() / tokens.norm())"
    seed = "lambda layer, tokens: 1 + layer.seed / 3"
    lame = "lambda layer, tokens: 1 / (1 - layer.seed) if layer.seed != 1 else float('inf')"
    report = own(
        {"predicted_gain": 1.08, "observed_gain": gain, "observed_seed": seed, "observed_lame": lame}, "--h", "0.08"
    )
    block, untrained = report["mechanism_signature"], report["extensions"]["mechanism_untrained"]
    assert untrained == {"observed_gain": 1.08, "observed_seed": 1.1666667, "observed_lame": None}
    assert block["observed_seed"] == 1.1666667 and block["observed_lame"] is None
    assert block["observed_gain"] != 1.08 and block["observed_gain"] == pytest.approx(1.08, abs=0.05)
    assert round(block["observed_gain"], 7) == block["observed_gain"]


def test_a_layer_without_a_signature_has_no_block(own):
    """Null in its places, and the operator alone is not measured: it is not the layer's."""
    report = own({})
    assert report["mechanism_signature"] is None
    extra = report["extensions"]
    assert extra["mechanism_untrained"] is extra["isolated_mechanism"] is extra["transport_confirmed"] is None
