"""Section 5, models: many GRUs at once against torch.nn.GRU, whole models against one run at a time, parameters."""

import dataclasses
import itertools
import math

import layer_loop
import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

SMALL = bench.Config(sizes=(10, 5, 3))
STEPS = {"raw": None, "kinetic": (0.08,), "placebo": (0.0,), "multiscale": (0.02, 0.08, 0.32)}


@pytest.fixture(autouse=True)
def computing():
    """Compute as the product does."""
    with bench.computing(SMALL):
        yield


def build(config, *runs):
    with bench.computing(config):
        return bench.Model(config, [bench.Run(*run) for run in runs])


SEEDS = (0, 1, 2)


def same_h(h, config=SMALL, seeds=SEEDS):
    """Build a model of one run a seed, all with the same steps."""
    return build(config, *((seed, 0.003, h) for seed in seeds))


def noise(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """Return a function that gives the configuration of a track of that many tokens, channels and target columns."""
    folder = tmp_path_factory.mktemp("tracks")

    def config(length, channels, outputs, **options):
        return bench.Config(track=layer_loop.write_track(folder, 4, length, channels, outputs), **options)

    return config


def torch_model(core, run):
    """Return torch.nn.GRU and torch.nn.Linear with the weights of one run of a model."""
    gru = torch.nn.GRU(core[0].shape[2], core[1].shape[2], batch_first=True, dtype=torch.float64)
    readout = torch.nn.Linear(core[4].shape[2], core[4].shape[1], dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip((*gru.parameters(), *readout.parameters()), core, strict=True):
            parameter.copy_(value[run])
    return gru, readout


# Many GRUs at once ----------------------------------------------------------------------------------------------------


def assert_equals_torch_gru(config, runs, batch, length, scale):
    """Compare outputs, and the gradients of a random functional of them by every weight and token, with PyTorch's."""
    model = same_h(None, config, range(runs))
    with torch.no_grad():
        for i, weight in enumerate(model.core):
            weight.copy_(scale * noise(*weight.shape, seed=i))
    channels, outputs = model.core[0].shape[2], model.core[4].shape[1]
    tokens = [noise(batch, length, channels, seed=20 + i).requires_grad_() for i in range(runs)]
    pull, found = noise(runs, batch, outputs, seed=9), model(tokens)
    assert found.shape == (runs, batch, outputs)
    gradients = torch.autograd.grad((found * pull).sum(), [*model.core, *tokens])
    for run in range(runs):
        gru, readout = torch_model(model.core, run)
        own = tokens[run].detach().clone().requires_grad_()
        expected = readout(gru(own)[0][:, -1])
        leaves = (*gru.parameters(), *readout.parameters(), own)
        wanted = torch.autograd.grad((expected * pull[run]).sum(), leaves)
        assert (found[run] - expected).abs().max() < 1e-12 * max(1, scale * model.core[1].shape[2])
        ours = [*(gradient[run] for gradient in gradients[:6]), gradients[6 + run]]
        for gradient, theirs in zip(ours, wanted, strict=True):
            assert (gradient - theirs).abs().max() <= 1e-12 * max(1.0, theirs.abs().max())


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("runs", [1, 3])
def test_grus_equal_torch_gru_for_odd_sizes(runs, length, shaped):
    """Predictions and every gradient, the tokens' too, agree with torch.nn.GRU to 1e-12 for any sizes, a batch of one
    and several target columns among them."""
    for batch, channels, hidden, outputs in itertools.product((1, 5), (1, 2, 5), (3, 32), (1, 2)):
        assert_equals_torch_gru(shaped(length, channels, outputs, hidden=hidden), runs, batch, length, 0.5)


@pytest.mark.parametrize("scale", [0.05, 0.2])
def test_grus_equal_torch_gru_at_the_benchmarks_size(scale, shaped):
    """6 runs, batch 64, 32 tokens, 3 channels, 32 units."""
    assert_equals_torch_gru(shaped(32, 3, 1), 6, 64, 32, scale)


def test_grus_equal_torch_gru_where_gates_are_saturated(shaped):
    """Large weights, which drive every gate to its ends."""
    assert_equals_torch_gru(shaped(3, 2, 1, hidden=3), 3, 5, 3, 8.0)


# A GRU of two units and one input by hand, rows r, z, n, from a start that is not zero: from zero, in one step, a reset
# gate on the wrong side of the recurrent product, a bias outside of it and a swapped z cannot be told apart.
W_IH = [0.5, -0.3, 0.8, 0.1, 1.0, -0.7]
W_HH = [[0.2, -0.4], [0.6, 0.1], [-0.5, 0.3], [0.4, -0.2], [0.9, -0.8], [0.3, 0.7]]
B_IH = [0.1, -0.2, 0.3, 0.05, -0.1, 0.2]
B_HH = [0.05, 0.15, -0.25, 0.35, 0.4, -0.6]
H0 = [0.5, -0.25]
X = [1.0, -2.0, 0.5]
H1 = [0.658654840753, -0.382972848705]
H3 = [-0.445238698398, -0.154568805079]


@pytest.mark.parametrize(("steps", "expected"), [(1, H1), (3, H3)])
@pytest.mark.parametrize("grad", [True, False])
def test_hand_written_gru_values(steps, expected, grad, shaped):
    """From h0 = (.5, -.25) one and three steps give the known states, which a readout of ones shows.

    The model starts at zero.  A second channel, 1 at a first extra token and 0 afterwards, shuts r and z there, so that
    this token sets h to the tanh of what n is given: h0.  The known steps follow, unchanged.
    """
    model = same_h(None, shaped(1 + steps, 2, 2, hidden=2), seeds=(0, 1))
    setter = [-1000.0] * 4 + [math.atanh(h) - b for h, b in zip(H0, B_IH[4:], strict=True)]
    values = [list(zip(W_IH, setter, strict=True)), W_HH, B_IH, B_HH, np.eye(2), [0.0, 0.0]]
    tokens = torch.tensor([[0.0, *X[:steps]], [1.0] + [0.0] * steps], dtype=torch.float64).T[None]
    with torch.no_grad():
        for weight, value in zip(model.core, values, strict=True):
            weight[1] = torch.from_numpy(np.array(value))
    with torch.set_grad_enabled(grad):
        states = model([torch.zeros_like(tokens), tokens])[1, 0]
    assert states.tolist() == pytest.approx(expected, abs=2e-12)


@pytest.mark.parametrize("name", STEPS)
def test_gradients_equal_finite_differences(name, shaped):
    """Central differences of every number in a run's row agree with its gradient, independently of torch.nn.GRU."""
    model = same_h(STEPS[name], shaped(5, 3, 2, hidden=2), seeds=(0, 1))
    tokens, pull = [noise(3, 5, 3, seed=i) for i in (1, 2)], noise(2, 3, 2, seed=3)
    (model(tokens) * pull).sum().backward()
    assert model.gradient.shape == model.flat.shape
    step = 1e-5
    with torch.no_grad():
        for run, place in itertools.product(range(2), range(model.flat.shape[1])):
            at, ends = model.flat[run, place].item(), []
            for sign in (1, -1):
                model.flat[run, place] = at + sign * step
                ends.append((model(tokens) * pull).sum().item())
            model.flat[run, place] = at
            assert model.gradient[run, place] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("name", STEPS)
def test_evaluation_gives_the_same_bits_as_training(name):
    """Without gradient, where no step is kept, a model predicts the same as with it."""
    model = same_h(STEPS[name])
    tokens, _ = model.batch("test", [slice(0, 5)] * 3)
    trained = model(tokens).detach()
    with torch.no_grad():
        assert torch.equal(model(tokens), trained)


def test_batches_of_other_sizes_leave_no_trace():
    """What was computed for other batches before does not change predictions or gradients: nothing is added up."""
    model, results = same_h((0.08,)), []
    for count in (4, 5, 1, 2, 4):
        tokens, targets = model.batch("train", [slice(0, count)] * 3)
        out = model(tokens)
        (out - targets).square().sum().backward()
        results.append((out.detach().clone(), model.gradient.clone()))
        model.gradient.zero_()
        with torch.no_grad():
            model(tokens)
    assert all(torch.equal(first, last) for first, last in zip(results[0], results[-1], strict=True))


# Parameters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "count"), [(None, 3585), ((0.08,), 3609), ((0.0,), 3609), ((0.1, 0.2), 3633), ((0.1, 0.2, 0.3), 3657)]
)
def test_parameter_counts(h, count):
    """3585 and 3609 as in the reference, and 24 for every further layer of a multiscale stack."""
    model = same_h(h)
    assert list(model.parameters) == [count] * 3
    layers = [parameter for layer in model.layers[0] for parameter in layer.parameters()]
    assert sum(p.numel() for p in layers) + sum(weight[0].numel() for weight in model.core) == count


@pytest.mark.parametrize("hidden", [32, 7])
@pytest.mark.parametrize("name", STEPS)
def test_initial_weights_equal_the_plain_loops(name, hidden):
    """All models draw GRU and readout, then their layers one after another, from the seed's stream; bit for bit."""
    model = same_h(STEPS[name], dataclasses.replace(SMALL, hidden=hidden), seeds=(1, 2))
    for i, seed in enumerate((1, 2)):
        own = [*(weight[i] for weight in model.core), *(p for layer in model.layers[i] for p in layer.parameters())]
        plain = plain_loop.Model(seed, STEPS[name], hidden=hidden)
        expected = [*plain.gru.parameters(), *plain.readout.parameters(), *plain.layers.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_a_pair_shares_gru_and_readout():
    """Baseline, idea and placebo of a seed begin with the same weights, other seeds with others."""
    raw, *others = [same_h(h) for h in STEPS.values()]
    for model in others:
        assert all(torch.equal(a, b) for a, b in zip(raw.core, model.core, strict=True))
    assert not torch.equal(raw.core[0][0], raw.core[0][1])
    first, second = others[2].layers[0][:2]
    assert torch.equal(first.gate.weight, others[0].layers[0][0].gate.weight)
    assert not torch.equal(first.gate.weight, second.gate.weight)


@pytest.mark.parametrize("name", STEPS)
def test_every_parameter_has_a_gradient(name):
    """In every run each number moves the loss, but for the gates at h = 0, which choose between equals; and the runs'
    gradients are their own."""
    model = same_h(STEPS[name])
    tokens, targets = model.batch("train", [slice(0, 10)] * 3)
    losses = (model(tokens) - targets).square().mean((1, 2))
    losses[1].backward()
    assert (model.gradient[[0, 2]] == 0).all()
    found = [weight.grad[1] for weight in model.core]
    for layer in model.layers[1]:
        found += [layer.mix.weight.grad, layer.mix.bias.grad]
        gate = (layer.gate.weight.grad, layer.gate.bias.grad)
        assert all(((gradient == 0) == (layer.h == 0)).all() for gradient in gate)
    assert all(torch.isfinite(gradient).all() and (gradient != 0).all() for gradient in found)


def test_a_runs_parameters_are_one_row(shaped):
    """What is written into a run's row its GRU and its layers see, and no other run's do."""
    model = same_h((0.08, 0.3), shaped(6, 3, 2))
    before = [weight.detach().clone() for weight in model.core]
    with torch.no_grad():
        model.flat[1] *= 2
    for weight, old in zip(model.core, before, strict=True):
        assert torch.equal(weight[1], 2 * old[1]) and torch.equal(weight[[0, 2]], old[[0, 2]])
    fresh = same_h((0.08, 0.3), shaped(6, 3, 2))
    for run, factor in enumerate((1, 2, 1)):
        for layer, old in zip(model.layers[run], fresh.layers[run], strict=True):
            assert all(torch.equal(a, factor * b) for a, b in zip(layer.parameters(), old.parameters(), strict=True))


# Whole models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [32, 5])
@pytest.mark.parametrize("name", STEPS)
def test_predictions_equal_one_run_at_a_time(name, hidden):
    """Each run predicts what its layers and torch.nn.GRU predict alone, from its own sequences."""
    config, chosen = dataclasses.replace(SMALL, hidden=hidden), [[4, 0, 3], [1, 2, 0], [0, 0, 4]]
    model = same_h(STEPS[name], config)
    tokens, targets = model.batch("test", chosen)
    assert targets.shape == (3, 3, 1)
    with torch.no_grad():
        out = model(tokens)
        for i, seed in enumerate(SEEDS):
            data, plain = bench.build_dataset(config, seed), plain_loop.Model(seed, STEPS[name], hidden=hidden)
            assert torch.equal(tokens[i], data.tokens["test"][chosen[i]])
            assert torch.equal(targets[i], data.targets["test"][chosen[i]])
            assert (out[i, :, 0] - plain(tokens[i])).abs().max() < 1e-12


def test_runs_side_by_side_may_differ_in_step_size():
    """Each run mixes by its own h."""
    model = build(SMALL, *((0, 0.003, (h,)) for h in (0.0, 0.08, 0.3)))
    tokens, _ = model.batch("val", [slice(0, 3)] * 3)
    with torch.no_grad():
        out = model(tokens)
        for i, h in enumerate((0.0, 0.08, 0.3)):
            assert (out[i, :, 0] - plain_loop.Model(0, h)(tokens[i])).abs().max() < 1e-12
    assert not torch.allclose(out[0], out[1]) and not torch.allclose(out[1], out[2])


def test_irregular_runs_mix_on_their_own_seeds_clock():
    """K of each run is a least-squares fit at the times of its own seed, then the shift by h x, in every layer."""
    model = same_h((0.08, 0.3), dataclasses.replace(SMALL, track="irregular"), seeds=(0, 5))
    tokens, _ = model.batch("test", [slice(0, 5)] * 2)
    with torch.no_grad():
        out = model(tokens)
        for i, seed in enumerate((0, 5)):
            jitter = np.random.default_rng([seed, 5]).uniform(-0.2, 0.2, 97)
            jitter[0] = 0
            angles = plain_loop.angles((0.15 * (np.arange(97) + jitter))[1:33])
            plain = plain_loop.Model(seed, (0.08, 0.3))
            assert (out[i, :, 0] - plain(tokens[i], angles)).abs().max() < 1e-11
            assert not torch.allclose(out[i, :, 0], plain(tokens[i]), atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_float32_predicts_nearly_the_same(name):
    """float32 gives the same initial model up to its precision, in float32 throughout."""
    model, double = same_h(STEPS[name], dataclasses.replace(SMALL, dtype="float32")), same_h(STEPS[name])
    with bench.computing(bench.Config(dtype="float32")), torch.no_grad():
        tokens, targets = model.batch("test", [slice(0, 5)] * 3)
        out = model(tokens)
    assert {model.flat.dtype, tokens[0].dtype, targets.dtype, out.dtype} == {torch.float32}
    with torch.no_grad():
        exact = double(double.batch("test", [slice(0, 5)] * 3)[0])
    assert (out - exact).abs().max() < 1e-5


LAYER = """
import torch

class Clocked(torch.nn.Module):
    '''Draws its weights from the run's stream, and keeps the places that it is told.'''

    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(channels))
        self.angles = torch.zeros(length)

    def draw(self, rng):
        self.scale.data.copy_(torch.from_numpy(rng.uniform(0, 1, len(self.scale))))

    def place(self, angles):
        self.angles = torch.from_numpy(angles)

    def forward(self, x):
        return self.scale * x + self.angles[:, None]
"""


def test_users_layer_may_draw_and_know_its_places(tmp_path):
    """A layer that has `draw` gets the run's stream behind GRU and readout; one that has `place`, the tokens' angles by
    its seed's clock, where that is uneven."""
    (tmp_path / "clocked.py").write_text(LAYER, encoding="utf-8")
    config = dataclasses.replace(SMALL, idea=f"{tmp_path / 'clocked.py'}:Clocked")
    for track in ("dynamics", "irregular"):
        own = dataclasses.replace(config, track=track)
        for seed, layers in zip((0, 5), same_h((0.08, 0.3), own, seeds=(0, 5)).layers, strict=True):
            rng = np.random.default_rng([seed, 3])
            rng.uniform(size=3585)
            for layer in layers:
                assert np.array_equal(layer.scale.detach(), rng.uniform(0, 1, 3))
                angles = bench.token_angles(own, seed)
                assert np.array_equal(layer.angles, np.zeros(32) if angles is None else angles)
    assert angles is not None
