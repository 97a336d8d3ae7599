"""Section 6, training: scores against the plain loop to the printed digit, Adam and clipping against PyTorch."""

import dataclasses
import functools

import numpy as np
import plain_loop
import pytest
import torch

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

PRINTED = 0.5e-10  # half of the last printed digit of a score
TINY = dataclasses.replace(bench.Config(), epochs=3, sizes=(100, 40, 20))
FLOAT32 = dataclasses.replace(TINY, dtype="float32")
# The benchmark's lr 1e20 overflows float32, in which the trap was found.  In float64 its squares are still finite
# numbers, for torch.optim.Adam as well; there it takes a rate whose square overflows.
DIVERGING = [(TINY, 1e160), (FLOAT32, 1e20)]


@functools.cache
def plain_data(seed, sizes, dtype=torch.float64):
    """Build the oracle's standardised data of any sizes (train, test, val)."""
    raw = [plain_loop.make_split(seed, number, count)[:2] for number, count in enumerate(sizes)]
    tokens, targets = raw[0]
    mean, std = tokens.mean((0, 1)), tokens.std((0, 1))
    ready = {}
    for split, (x, y) in zip(("train", "test", "val"), raw, strict=True):
        pair = (x - mean) / std, (y - targets.mean()) / targets.std()
        ready[split] = tuple(torch.from_numpy(part).to(dtype) for part in pair)
    return ready


def complete(config, *runs):
    return bench.complete(config, bench.Stack(runs, frozenset()))


@pytest.mark.parametrize("h", [None, 0.08, 0.0])
def test_scores_equal_the_plain_loop_to_every_printed_digit(h):
    """Test and validation scores of a stack of seeds and rates at full size equal torch.nn.GRU, one run at a time."""
    config = dataclasses.replace(bench.Config(), epochs=2)
    runs = [bench.Run(s, lr, None if h is None else (h,)) for s, lr in ((0, 0.006), (3, 0.0015))]
    records = complete(config, *runs)
    for run in runs:
        data = plain_data(run.seed, config.sizes)
        model, score = plain_loop.train(run.seed, run.lr, h, config.epochs, data)
        assert abs(records[run].score - score) < PRINTED
        assert f"{records[run].score:.10f}" == f"{score:.10f}"
        assert abs(records[run].validation - plain_loop.mse(model, data, "val")) < PRINTED


@pytest.mark.parametrize("sizes", [(100, 40, 20), (65, 257, 1)])
def test_short_last_batch_is_kept(sizes):
    """Sizes that no batch divides train and score like the oracle, which keeps the short last batch."""
    config = dataclasses.replace(bench.Config(), epochs=3, sizes=sizes)
    for h in (None, 0.08):
        run = bench.Run(1, 0.006, None if h is None else (h,))
        model, score = plain_loop.train(1, 0.006, h, 3, plain_data(1, sizes))
        (record,) = complete(config, run).values()
        assert abs(record.score - score) < PRINTED
        expected = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
        assert np.allclose(record.weights, expected, rtol=0, atol=1e-9)


def test_scores_do_not_depend_on_the_stack():
    """A run scores the same printed digits alone and beside other seeds, rates and step sizes."""
    runs = [bench.Run(seed, lr, (h,)) for seed, h, lr in ((0, 0.08, 0.006), (0, 0.0, 0.0015), (1, 0.08, 0.0015))]
    together = complete(TINY, *runs)
    for run in runs:
        assert complete(TINY, run)[run].score == pytest.approx(together[run].score, rel=1e-12)


def test_multiscale_stack_trains_like_its_layers_in_torch():
    """A two-layer stack trained by the product equals the oracle's trainer on layers put together by hand."""

    class Deep(plain_loop.Model):
        """The plain kinetic model with a second kinetic layer, drawn after the first."""

        def forward(self, u):
            for h, gate, mix in ((0.02, self.gate, self.mix), (0.3, self.gate2, self.mix2)):
                u = u + torch.sigmoid(gate(u)) * mix(plain_loop.kolmogorov(u, h))
            return self.readout(self.gru(u)[0][:, -1])[:, 0]

    run = bench.Run(1, 0.006, (0.02, 0.3))
    stacked = bench.StackedModel(TINY, [run])
    model = Deep(1, 0.02).double()
    model.gate2, model.mix2 = (torch.nn.Linear(3, 3, dtype=torch.float64) for _ in "gm")
    start = stacked.initial()[0].split([p.numel() for p in model.parameters()])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value.view_as(parameter))
    data = plain_data(1, TINY.sizes)
    train_plainly(model, 1, 0.006, TINY.epochs, data)
    expected = plain_loop.mse(model, data, "test")
    assert abs(complete(TINY, run)[run].score - expected) < PRINTED


def train_plainly(model, seed, lr, epochs, data):
    """Train any module as the specification says (section 5), with PyTorch's optimiser and clipping."""
    optimizer, order = torch.optim.Adam(model.parameters(), lr=lr), np.random.default_rng([seed, 4])
    tokens, targets = data["train"]
    for _ in range(epochs):
        for chosen in torch.from_numpy(order.permutation(len(targets))).split(64):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(tokens[chosen]), targets[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


# Optimiser ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.1, 1.0, 50.0, 1e8])
def test_optimiser_equals_torch_adam_with_clipping(size):
    """A per-run rate and a per-run clip equal torch.optim.Adam and clip_grad_norm_, run by run, for any gradient."""
    lrs, rng = (0.0015, 0.003, 0.006, 10.0), np.random.default_rng(0)
    start = torch.from_numpy(rng.standard_normal((4, 7)))
    # the runs' norms differ by factors of ten: a clip by the stack's common norm would show
    gradients = torch.from_numpy(size * rng.standard_normal((30, 4, 7)) * np.array([1, 10, 0.1, 3])[:, None])
    flat = start.clone()
    adam = bench.StackedAdam(bench.Config(), [bench.Run(0, lr, None) for lr in lrs], flat)
    for gradient in gradients:
        adam.step(flat, gradient)
    for run, lr in enumerate(lrs):
        parameter = torch.nn.Parameter(start[run].clone())
        optimizer = torch.optim.Adam([parameter], lr=lr)
        for gradient in gradients:
            parameter.grad = gradient[run].clone()
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
        assert torch.allclose(flat[run], parameter.detach(), rtol=1e-11, atol=1e-12)


def test_optimiser_does_not_change_the_gradient():
    """The gradient handed in is the caller's: clipping works on a copy."""
    flat, gradient = torch.zeros(2, 3, dtype=torch.float64), torch.full((2, 3), 9.0, dtype=torch.float64)
    bench.StackedAdam(bench.Config(), [bench.Run(0, 0.1, None)] * 2, flat).step(flat, gradient)
    assert (gradient == 9).all()


# Divergence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "rate"), DIVERGING)
@pytest.mark.parametrize("h", [None, (0.08,)])
def test_diverged_run_does_not_touch_its_neighbours(h, config, rate):
    """Beside a run that diverges the others keep every bit, and the diverged one has no score instead of NaN."""
    neighbours, lost = [bench.Run(0, 0.003, h), bench.Run(1, 0.006, h)], bench.Run(0, rate, h)
    sound = complete(config, neighbours[0], bench.Run(0, 0.0015, h), neighbours[1])
    mixed = complete(config, neighbours[0], lost, neighbours[1])
    for run in neighbours:
        assert mixed[run].score == sound[run].score and mixed[run].validation == sound[run].validation
        assert mixed[run].weights.tobytes() == sound[run].weights.tobytes()
    assert mixed[lost].score is None and mixed[lost].validation is None


@pytest.mark.parametrize("rate", [1e6, 1e20])
@pytest.mark.parametrize("h", [None, (0.08,)])
def test_a_rate_that_stays_finite_keeps_its_score(h, rate):
    """Adam's steps are as long as the rate: 1e6 trains to a useless number, which is the oracle's and no divergence."""
    (record,) = complete(TINY, bench.Run(0, rate, h)).values()
    _, expected = plain_loop.train(0, rate, None if h is None else h[0], TINY.epochs, plain_data(0, TINY.sizes))
    assert record.score == pytest.approx(expected, rel=1e-9)
    assert record.score > rate


def test_a_rate_of_a_million_stays_finite_in_float32():
    """The same in the narrower dtype, whose largest number is 3e38."""
    (record,) = complete(FLOAT32, bench.Run(0, 1e6, None)).values()
    assert record.score > 1e6


@pytest.mark.parametrize(("config", "rate"), DIVERGING)
def test_loss_that_was_not_finite_is_told_run_by_run(config, rate):
    """`train` says of each run alone whether every loss was finite."""
    runs = [bench.Run(0, lr, None) for lr in (rate, 0.003, 1e6)]
    _, finite = bench.train(bench.StackedModel(config, runs))
    assert finite.tolist() == [False, True, True]


# The rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [None, (0.08,)])
def test_float32_trains_to_nearly_the_same_score(h):
    """The faster mode learns the same: the score agrees with the float64 oracle's to about three digits."""
    (record,) = complete(FLOAT32, bench.Run(1, 0.006, h)).values()
    _, expected = plain_loop.train(1, 0.006, None if h is None else h[0], 3, plain_data(1, TINY.sizes))
    assert record.weights.dtype == np.float32
    assert record.score == pytest.approx(expected, rel=1e-3)


def test_training_learns():
    """Two epochs bring the test error far below that of the untrained model and of guessing the mean."""
    config = dataclasses.replace(bench.Config(), epochs=2)  # the data of the first test, still in the cache
    run = bench.Run(0, 0.006, None)
    model = bench.StackedModel(config, [run])
    before = bench.evaluate(model, model.initial(), "test").item()
    assert complete(config, run)[run].score < 0.25 * before


def test_training_draws_from_no_global_generator():
    """Global seeds of torch and numpy neither matter nor move."""
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  the legacy generator is what must not be used
        states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        (record,) = complete(TINY, bench.Run(1, 0.003, (0.08,))).values()
        scores.append(record.weights.tobytes())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert scores[0] == scores[1]
