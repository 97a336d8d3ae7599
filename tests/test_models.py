"""Section 5, models: the stacked GRU against torch.nn.GRU, layers against one run at a time, parameters."""

import dataclasses
import itertools
import math

import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

SMALL = dataclasses.replace(bench.Config(), sizes=(10, 5, 3), epochs=1)
MODELS = {"raw": None, "kinetic": (0.08,), "placebo": (0.0,), "multiscale": (0.02, 0.08, 0.32)}


def stack(h, seeds=(0, 1, 2), config=SMALL):
    """Build a model of one run a seed, and its initial parameters."""
    model = bench.StackedModel(config, [bench.Run(seed, 0.003, h) for seed in seeds])
    return model, model.initial()


def noise(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def torch_gru(weights, run):
    """Return torch.nn.GRU with the weights of one run of a stack (w_ih, w_hh, b_ih, b_hh)."""
    gru = torch.nn.GRU(weights[0].shape[2], weights[1].shape[2], batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip(gru.parameters(), weights, strict=True):
            parameter.copy_(value[run])
    return gru


# The stacked GRU ------------------------------------------------------------------------------------------------------


def assert_equals_torch_gru(runs, batch, length, channels, hidden):
    """Compare outputs and the gradients of a random functional of them, by weight and by token."""
    rows = 3 * hidden
    weights = [noise(runs, *s, seed=i) / 2 for i, s in enumerate([(rows, channels), (rows, hidden), (rows,), (rows,)])]
    tokens, pull = noise(runs, channels, length, batch, seed=8), noise(runs, hidden, batch, seed=9)
    leaves = [value.clone().requires_grad_() for value in (tokens, *weights)]
    out = bench.stacked_gru(leaves[0], leaves[1:], bench.Workspace())
    found = torch.autograd.grad((out * pull).sum(), leaves)
    for run in range(runs):
        gru, own = torch_gru(weights, run), tokens[run].permute(2, 1, 0).clone().requires_grad_()
        expected = gru(own)[0][:, -1].T
        (expected * pull[run]).sum().backward()
        assert (out[run] - expected).abs().max() < 1e-12
        assert (found[0][run].permute(2, 1, 0) - own.grad).abs().max() < 1e-12
        for ours, parameter in zip(found[1:], gru.parameters(), strict=True):
            assert (ours[run] - parameter.grad).abs().max() <= 1e-12 * max(1.0, parameter.grad.abs().max())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("runs", [1, 3])
def test_stacked_gru_equals_torch_gru_for_odd_sizes(runs, length):
    """Last state and every gradient, the input's too, agree with torch.nn.GRU to 1e-12."""
    for batch, channels, hidden in itertools.product((1, 5), (1, 2, 5), (3, 32)):
        assert_equals_torch_gru(runs, batch, length, channels, hidden)


def test_stacked_gru_equals_torch_gru_at_the_benchmarks_size():
    """The default stack: 6 runs, batch 64, 32 tokens, 3 channels, 32 units."""
    assert_equals_torch_gru(6, 64, 32, 3, 32)


def test_stacked_gru_without_gradient_gives_the_same():
    """The path of evaluation, which keeps no step, agrees with the path of training."""
    weights, tokens = [noise(3, *s, seed=i) for i, s in enumerate([(6, 2), (6, 2), (6,), (6,)])], noise(3, 2, 9, 5)
    trained = bench.stacked_gru(tokens, weights, bench.Workspace())
    with torch.no_grad():
        evaluated = bench.stacked_gru(tokens, weights, bench.Workspace())
    assert torch.equal(trained, evaluated)


def test_reused_workspace_leaves_no_trace():
    """Steps of other sizes before a step do not change it: buffers are overwritten, not added to."""
    weights = [noise(2, *s, seed=i).requires_grad_() for i, s in enumerate([(9, 2), (9, 3), (9,), (9,)])]
    used, results = bench.Workspace(), []
    for length, batch in ((7, 4), (3, 5), (7, 2), (7, 4)):
        out = bench.stacked_gru(noise(2, 2, length, batch), weights, used)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), weights)))
    assert all(torch.equal(first, last) for first, last in zip(results[0], results[3], strict=True))


def test_gradient_check():
    """Finite differences agree with the hand-derived backward pass, independently of torch.nn.GRU."""
    parts = [(2, 2, 6, 2), (2, 6, 2), (2, 6, 2), (2, 6), (2, 6)]
    leaves = [noise(*shape, seed=i).requires_grad_() for i, shape in enumerate(parts)]
    assert torch.autograd.gradcheck(lambda x, *w: bench.StackedGRU.apply(x, *w, bench.Workspace()), leaves)


# The published faults of hand-written GRUs (TRAPS.md): H = 2, one input, gate rows r, z, n.
W_IH = [0.5, -0.3, 0.8, 0.1, 1.0, -0.7]
W_HH = [[0.2, -0.4], [0.6, 0.1], [-0.5, 0.3], [0.4, -0.2], [0.9, -0.8], [0.3, 0.7]]
B_IH = [0.1, -0.2, 0.3, 0.05, -0.1, 0.2]
B_HH = [0.05, 0.15, -0.25, 0.35, 0.4, -0.6]
H0 = [0.5, -0.25]
X = [1.0, -2.0, 0.5]
H1 = [0.658654840753, -0.382972848705]
H3 = [-0.445238698398, -0.154568805079]


@pytest.mark.parametrize(("steps", "expected"), [(0, H0), (1, H1), (3, H3)])
@pytest.mark.parametrize("grad", [True, False])
def test_hand_written_gru_values(steps, expected, grad):
    """From h0 = (.5, -.25) three steps give the known states; from zero the classic faults look alike.

    The stacked GRU starts at zero.  A second channel, 1 at a first extra token and 0 afterwards, shuts r and z there,
    so that this token sets h to the tanh of what n is given: h0.  The known steps follow, unchanged.
    """
    setter = [-1000.0] * 4 + [math.atanh(h) - b for h, b in zip(H0, B_IH[4:], strict=True)]
    w_ih = torch.tensor([W_IH, setter], dtype=torch.float64).T[None]
    others = [torch.tensor(value, dtype=torch.float64)[None] for value in (W_HH, B_IH, B_HH)]
    tokens = torch.tensor([[0.0, *X[:steps]], [1.0] + [0.0] * steps], dtype=torch.float64)[None, :, :, None]
    with torch.set_grad_enabled(grad):
        state = bench.stacked_gru(tokens, [w_ih, *others], bench.Workspace())
    assert state[0, :, 0].numpy() == pytest.approx(expected, abs=2e-12)


# Parameters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "count"), [(None, 3585), ((0.08,), 3609), ((0.0,), 3609), ((0.1, 0.2), 3633), ((0.1, 0.2, 0.3), 3657)]
)
def test_parameter_counts(h, count):
    """3585 and 3609 as in the reference, and 24 for every further layer of a multiscale stack."""
    model, flat = stack(h)
    assert flat.shape == (3, count)
    assert sum(math.prod(shape) for shape in model.shapes) == count


def test_initial_weights_equal_the_plain_loops():
    """Both models draw the specified weights, and a pair shares GRU and readout to the bit."""
    _, raw = stack(None, seeds=(1, 2))
    _, mixing = stack((0.08,), seeds=(1, 2))
    assert torch.equal(raw, mixing[:, :3585])
    for run, seed in enumerate((1, 2)):
        expected = torch.cat([p.detach().flatten().double() for p in double_model(seed, 0.08).parameters()])
        assert torch.equal(mixing[run], expected)


def double_model(seed, h):
    """Return the plain loop's model, drawn in float64 as it trains."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return plain_loop.Model(seed, h)
    finally:
        torch.set_default_dtype(default)


def test_layers_of_a_stack_are_drawn_one_after_another():
    """The first layer of a stack has the single layer's weights, and the second has others."""
    (model, flat), (_, single) = stack((0.1, 0.2)), stack((0.1,))
    assert torch.equal(flat[:, :3609], single)
    first, second = model.split_parameters(flat)[6:10], model.split_parameters(flat)[10:]
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_gradient(name):
    """In every run each number of every weight moves the loss, and the runs' gradients are their own."""
    model, flat = stack(MODELS[name])
    flat.requires_grad_()
    tokens, mixed, targets = model.batch("train", [slice(0, 10)] * 3)
    losses = (model(flat, tokens, mixed) - targets).square().mean(1)
    (gradient,) = torch.autograd.grad(losses.sum(), flat, retain_graph=True)
    assert torch.isfinite(gradient).all()
    assert (gradient != 0).all()
    (middle,) = torch.autograd.grad(losses[1], flat)
    assert torch.equal(middle[1], gradient[1]) and (middle[[0, 2]] == 0).all()


# Whole models ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain_prediction(model, run, tokens):
    """Predict one run's tokens (batch, time, channel): layer after layer, then torch.nn.GRU."""
    weights = [value[run] for value in model.split_parameters(model.initial())]
    for depth, h in enumerate(model.runs[run].h or ()):
        w_gate, b_gate, w_mix, b_mix = weights[6 + 4 * depth : 10 + 4 * depth]
        gate = torch.sigmoid(torch.nn.functional.linear(tokens, w_gate, b_gate))
        tokens = tokens + gate * torch.nn.functional.linear(plain_loop.kolmogorov(tokens, h), w_mix, b_mix)
    states, _ = torch_gru([value[None] for value in weights[:4]], 0)(tokens)
    return torch.nn.functional.linear(states[:, -1], weights[4], weights[5])[:, 0]


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_one_run_at_a_time(name):
    """Each run of a stack predicts what its layers and torch.nn.GRU predict alone, K known ahead or not."""
    model, flat = stack(MODELS[name])
    tokens, mixed, _ = model.batch("test", [[4, 0, 3]] * 3)
    ahead, anew = model(flat, tokens, mixed), model(flat, tokens)
    assert torch.allclose(ahead, anew, rtol=0, atol=1e-13)
    for run in range(3):
        expected = plain_prediction(model, run, tokens[run].permute(2, 1, 0))
        assert torch.allclose(ahead[run], expected, rtol=0, atol=1e-12)


def test_runs_of_a_stack_may_differ_in_step_size():
    """One stack trains several h side by side: each run mixes by its own."""
    runs = [bench.Run(0, 0.003, (h,)) for h in (0.0, 0.08, 0.3)]
    model = bench.StackedModel(SMALL, runs)
    tokens, mixed, _ = model.batch("val", [slice(0, 3)] * 3)
    out = model(model.initial(), tokens, mixed)
    for run in range(3):
        expected = plain_prediction(model, run, tokens[run].permute(2, 1, 0))
        assert torch.allclose(out[run], expected, rtol=0, atol=1e-12)


def test_irregular_runs_mix_on_their_own_seeds_clock():
    """K of each run is a least-squares fit at the times of its own seed, then the shift by h x."""
    config = dataclasses.replace(SMALL, track="irregular")
    model, h = stack((0.08,), seeds=(0, 5), config=config)[0], 0.08
    for run, seed in enumerate((0, 5)):
        theta = bench.clock_angles(config, seed)[:, None]
        basis = np.hstack((np.cos(theta * np.arange(17)), np.sin(theta * np.arange(1, 16))))
        shrink = np.exp(-h * np.hstack((np.arange(17), np.arange(1, 16))) ** 2)[:, None]
        tokens = model.data[run].tokens["test"]
        diffused = np.stack([basis @ (shrink * np.linalg.lstsq(basis, c.numpy(), rcond=None)[0]) for c in tokens])
        turn = np.exp(-2j * np.pi * np.fft.fftfreq(3)[:, None] * h * np.arange(32))[..., None]
        expected = np.fft.ifft(np.fft.fft(diffused, axis=0) * turn, axis=0).real
        assert np.allclose(model.mixed(run, "test"), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_float32_predicts_nearly_the_same(name):
    """float32 gives the same initial model up to its precision, in float32 throughout."""
    model, flat = stack(MODELS[name], config=dataclasses.replace(SMALL, dtype="float32"))
    tokens, mixed, targets = model.batch("test", [slice(0, 5)] * 3)
    out = model(flat, tokens, mixed)
    assert {flat.dtype, tokens.dtype, targets.dtype, out.dtype} == {torch.float32}
    double, exact = stack(MODELS[name])
    reference = double(exact, *double.batch("test", [slice(0, 5)] * 3)[:2])
    assert (out.double() - reference).abs().max() < 1e-5


# A user's layer -------------------------------------------------------------------------------------------------------

LAYERS = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.mix, self.time, self.h = nn.Linear(channels, channels), nn.Linear(length, length), h

    def forward(self, x):
        return x + self.h * torch.tanh(self.mix(x)) + self.time(x.transpose(1, 2)).transpose(1, 2)

class Buffered(nn.Module):
    '''Its buffers are drawn, so every run has its own; one counts in whole numbers.'''
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("pattern", torch.randn(length, channels))
        self.register_buffer("order", torch.randperm(length))

    def forward(self, x):
        return x + self.scale * self.pattern * x[:, self.order]

class Branching(nn.Module):
    '''vmap refuses a decision that hangs on a number.'''
    def __init__(self, channels, length, h):
        super().__init__()
        self.up, self.down = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.up(x) + (self.down(x) if self.up.weight.sum() > 0 else -self.down(x))

class BufferedBranching(Buffered):
    def forward(self, x):
        return super().forward(x) if self.pattern.sum() > 0 else -super().forward(x)

class Recurrent(nn.Module):
    '''vmap has no rule for nn.GRU.'''
    def __init__(self, channels, length, h):
        super().__init__()
        self.gru = nn.GRU(channels, channels, batch_first=True)

    def forward(self, x):
        return x + self.gru(x)[0]

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

class HandDerived(nn.Module):
    '''vmap has no rule for an autograd.Function of one's own.'''
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x):
        return Square.apply(self.scale * x)

class Filling(nn.Module):
    '''vmap refuses to write stacked numbers into a plain tensor.'''
    def __init__(self, channels, length, h):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels))

    def forward(self, x):
        out = torch.zeros(x.shape, dtype=x.dtype)
        out[:, 1:] = x[:, :-1] * self.scale
        return out

class Attention(nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(channels, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.inner(x)

class Tied(nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.one, self.two = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.two.weight = self.one.weight

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))
"""
STACKED = {"Plain": True, "Buffered": True, "Tied": True, "Branching": False, "Recurrent": False, "HandDerived": False}
STACKED |= {"Filling": False, "BufferedBranching": False, "Attention": None}  # None: it may be either


CHEAP_TRACK = """import numpy as np
def make(seed, split):
    tokens = np.random.default_rng([seed, len(split)]).normal(size=(10, 8, 3))
    return tokens, tokens[:, -1].sum(axis=1)
"""
SHAPE = 3, 8  # channels and length of the cheap track


@pytest.fixture(scope="module")
def idea_config(tmp_path_factory):
    """Return a function that gives the configuration of one of the layers above, on a track without integration."""
    folder = tmp_path_factory.mktemp("ideas")
    (folder / "layers.py").write_text(LAYERS, encoding="utf-8")
    (folder / "track.py").write_text(CHEAP_TRACK, encoding="utf-8")
    base = dataclasses.replace(SMALL, track=str(folder / "track.py"))
    return lambda name, **changes: dataclasses.replace(base, idea=f"{folder / 'layers.py'}:{name}", **changes)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("h", [(0.5,), (0.5, 0.25)])
@pytest.mark.parametrize("name", STACKED)
def test_users_layer_equals_one_run_at_a_time(idea_config, name, h):
    """A layer written for one run gives in a stack what its own module gives each run, outputs and gradients.

    Layers that torch.func cannot stack go run by run, and must come to the same.
    """
    config = idea_config(name)
    bench.check_idea(config, SHAPE)
    model, flat = stack(h, config=config)
    assert [layer.stacked for layer in model.layers] == [STACKED[name]] * len(h) or STACKED[name] is None
    tokens, weights = noise(3, *SHAPE, 4, seed=3), model.split_parameters(flat.requires_grad_())
    used, out, pull = 6, tokens, noise(3, 4, 8, 3, seed=4)
    for layer in model.layers:
        out = layer(weights[used : used + len(layer.shapes)], out, None)
        used += len(layer.shapes)
    (gradient,) = torch.autograd.grad((out.permute(0, 3, 2, 1) * pull).sum(), flat)
    for run in range(3):
        modules = bench.build_modules(config, run, h, SHAPE)
        alone = torch.nn.Sequential(*modules)
        expected = alone(tokens[run].permute(2, 1, 0))
        assert torch.allclose(out[run].permute(2, 1, 0), expected, rtol=0, atol=1e-12)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        grads = torch.autograd.grad((expected * pull[run]).sum(), parameters, allow_unused=True)
        flat_grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]
        expected = torch.cat([g.flatten() for g in flat_grads])
        assert torch.allclose(gradient[run, 3585:], expected, rtol=1e-10, atol=1e-11)


def test_users_layer_is_initialised_by_the_runs_seed(idea_config):
    """Its parameters are its own initialisation under the seed, in the run's dtype; global randomness stays put."""
    config, names = idea_config("Plain"), {}
    torch.manual_seed(123)
    before = torch.get_rng_state()
    _, flat = stack((0.5,), seeds=(3, 8), config=config)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    exec(LAYERS, names)
    for run, seed in enumerate((3, 8)):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            expected = names["Plain"](*SHAPE, 0.5)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(flat[run, 3585:], torch.cat([p.detach().flatten() for p in expected.parameters()]))
    _, raw = stack(None, seeds=(3, 8), config=config)
    assert torch.equal(flat[:, :3585], raw)


# vmap has no quick rule for attention and says so; slow, and right
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_users_layer_trains(idea_config, name, dtype):
    """Every such layer trains to a score in both dtypes, stacked or not, and as it does alone."""
    config = idea_config(name, dtype=dtype)
    runs = tuple(bench.Run(seed, 0.003, (0.5,)) for seed in (0, 1))
    records = bench.complete(config, bench.Stack(runs, frozenset()))
    for run in runs:
        (alone,) = bench.complete(config, bench.Stack((run,), frozenset())).values()
        assert records[run].score == pytest.approx(alone.score, rel=1e-12 if dtype == "float64" else 1e-4)
        assert records[run].weights.dtype == np.dtype(dtype)
