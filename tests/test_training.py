"""Section 6, training: scores and learning curves against the plain loop, a run's bits beside any others, resuming."""

import dataclasses
import functools
import itertools
from pathlib import Path

import layer_loop
import numpy as np
import plain_loop
import pytest
import torch
import user_layers

import stage2_bench as bench

torch.set_num_threads(1)  # as the product does: matrices this small only lose on two threads

PRINTED = 0.5e-10  # half of the last printed digit of a score
TINY = bench.Config(epochs=3, sizes=(100, 40, 20))
FLOAT32 = dataclasses.replace(TINY, dtype="float32")
# The rate 1e20 overflows float32.  In float64 its squares are still finite numbers, for torch.optim.Adam as well; there
# it takes a rate whose square overflows.
DIVERGING = [(TINY, 1e160), (FLOAT32, 1e20)]


def train(config, *runs, states=None):
    """Train runs side by side to the last epoch, from the start or from states; returns their records."""
    with bench.computing(config):
        training = bench.Training(bench.Model(config, runs), states)
        for epoch in training.run():
            assert epoch <= config.epochs
        return bench.records(training)


def bits(record):
    """Return all that a run leaves, to be compared bit for bit."""
    state = record.state
    arrays = [array.tobytes() for array in (state.weights, state.mean, state.square)]
    return record.score, record.validation, state.epoch, bool(state.finite), state.curve, *arrays


@functools.cache
def plain_data(seed, sizes=None):
    """Return the oracle's standardised data, of these sizes (train, test, val)."""
    if sizes is None:
        return plain_loop.make_data(seed)[0]
    tokens, targets = plain_loop.make_split(seed, 0, sizes[0])[:2]
    mean, std, ready = tokens.mean((0, 1)), tokens.std((0, 1)), {}
    for number, (split, count) in enumerate(zip(("train", "test", "val"), sizes, strict=True)):
        x, y = plain_loop.make_split(seed, number, count)[:2]
        pair = (x - mean) / std, (y - targets.mean()) / targets.std()
        ready[split] = tuple(torch.from_numpy(part) for part in pair)
    return ready


@pytest.fixture(scope="module")
def custom(tmp_path_factory):
    """Return a function that gives the configuration of a track of a few random sequences."""
    folder = tmp_path_factory.mktemp("tracks")

    def config(count=22, length=9, channels=3, outputs=1, layer=None, **options):
        options = {"epochs": 3, "batch": 8} | options
        options |= {"idea": f"{Path(user_layers.__file__).resolve()}:{layer}"} if layer else {}
        return bench.Config(track=layer_loop.write_track(folder, count, length, channels, outputs), **options)

    return config


# The plain loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [None, (0.08,), (0.0,)])
def test_scores_equal_the_plain_loop_to_every_printed_digit(h):
    """Test and validation scores and the learning curve at full size equal torch.nn.GRU, one run at a time."""
    config = bench.Config(epochs=2)
    runs = [bench.Run(3, lr, h) for lr in (0.006, 0.0015)]
    for run, record in zip(runs, train(config, *runs), strict=True):
        data = plain_data(run.seed)
        model, score = plain_loop.train(run.seed, run.lr, run.h, config.epochs, data)
        assert abs(record.score - score) < PRINTED
        assert f"{record.score:.10f}" == f"{score:.10f}"
        assert abs(record.validation - plain_loop.mse(model, data, "val")) < PRINTED
        assert list(record.state.curve) == [1, 2]
        assert record.state.curve == pytest.approx(model.curve, abs=PRINTED)


@pytest.mark.parametrize("h", [None, (0.08,), (0.02, 0.3)])
@pytest.mark.parametrize("sizes", [(100, 40, 20), (65, 257, 1)])
def test_short_last_batch_is_kept(sizes, h):
    """Sizes that no batch divides train and score like the oracle, which keeps the short last batch, of one even; the
    weights agree too, of a multiscale stack as well."""
    config, run = bench.Config(epochs=3, sizes=sizes), bench.Run(1, 0.006, h)
    model, score = plain_loop.train(1, 0.006, h, 3, plain_data(1, sizes))
    with bench.computing(config):
        training = bench.Training(bench.Model(config, [run]))
        assert list(training.run()) == [1, 2, 3]
        (record,) = bench.records(training)
    assert abs(record.score - score) < PRINTED
    assert record.state.curve == pytest.approx(model.curve, abs=PRINTED) and list(model.curve) == [1, 2, 3]
    own = [*training.model.core, *(p[None] for layer in training.model.layers[0] for p in layer.parameters())]
    expected = [*model.gru.parameters(), *model.readout.parameters(), *model.layers.parameters()]
    assert all((a[0] - b).abs().max() < 1e-9 for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"outputs": 2}, {}),
        ({"outputs": 5, "channels": 2, "length": 2}, {"hidden": 7}),
        ({"count": 9}, {"batch": 1}),
        ({"count": 7}, {"batch": 3, "hidden": 1}),
        ({"count": 5, "channels": 1}, {"batch": 100}),
        ({"count": 2}, {"batch": 64}),
    ],
)
@pytest.mark.parametrize("layer", [None, "Recurrent"])
def test_any_shape_trains_as_in_a_plain_loop(layer, shape, options, custom):
    """Several target columns (the MSE is their mean), hidden sizes, batches of one, three, and more than there is."""
    config = custom(**shape, **options, layer=layer)
    runs = [bench.Run(seed, lr, layer and (0.1,)) for seed, lr in ((0, 0.01), (4, 0.003))]
    for run, record in zip(runs, train(config, *runs), strict=True):
        data = layer_loop.make_data(config.track, run.seed)
        layer_class = layer and getattr(user_layers, layer)
        alone = layer_loop.train(layer_class, run.seed, run.lr, run.h or (), data, 3, config.batch, config.hidden)
        assert record.score == pytest.approx(alone.test, rel=1e-11)
        assert record.validation == pytest.approx(alone.validation, rel=1e-11)


@pytest.mark.parametrize("clip", [1e-6, 0.05, 1e9])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8)])
@pytest.mark.parametrize("epsilon", [1e-8, 0.3])
def test_optimiser_equals_torch_adam_with_clipping(epsilon, betas, clip, custom):
    """A rate and a clip for every run equal torch.optim.Adam and clip_grad_norm_, whatever their constants: all
    gradients clipped, some, none; side by side are runs whose layers' gradients differ by a factor of ten thousand."""
    config = custom(outputs=2, layer="Stepping", betas=betas, epsilon=epsilon, clip=clip)
    runs = [bench.Run(1, lr, (h,)) for lr, h in ((0.0015, 0.001), (0.003, 1.0), (0.01, 10.0))]
    data = layer_loop.make_data(config.track, 1)
    with bench.computing(config):
        training = bench.Training(bench.Model(config, runs))
        list(training.run())
    for i, run in enumerate(runs):
        alone = layer_loop.train(
            user_layers.Stepping, 1, run.lr, run.h, data, 3, 8, clip=clip, betas=betas, eps=epsilon
        )
        own = [*(weight[i] for weight in training.model.core), *training.model.layers[i][0].parameters()]
        for ours, theirs in zip(own, alone.parameters(), strict=True):
            assert (ours - theirs).abs().max() < 1e-10


def test_placebos_gate_stays_where_it_began():
    """At h = 0 the gate has no gradient at all, so that Adam leaves its every bit; the channel mix is trained."""
    run = bench.Run(0, 0.006, (0.0,))
    with bench.computing(TINY):
        training = bench.Training(bench.Model(TINY, [run]))
        list(training.run())
        ((layer,),), ((fresh,),) = training.model.layers, bench.Model(TINY, [run]).layers
    assert torch.equal(layer.gate.weight, fresh.gate.weight) and torch.equal(layer.gate.bias, fresh.gate.bias)
    assert (layer.mix.weight != fresh.mix.weight).all()


@pytest.mark.parametrize(("epochs", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_learning_curve_is_noted_after_powers_of_two_and_the_last_epoch(epochs, expected, custom):
    """The curve's values are the plain loop's test MSE after these epochs, on the first 256 sequences."""
    config, run = custom(count=300, length=3, channels=1, epochs=epochs, batch=150), bench.Run(2, 0.02, None)
    (record,) = train(config, run)
    assert list(record.state.curve) == expected
    data = layer_loop.make_data(config.track, 2)
    first = data | {"test": tuple(part[:256] for part in data["test"])}
    curve = layer_loop.train(None, 2, 0.02, (), first, epochs, 150).curve
    assert record.state.curve == pytest.approx({epoch: curve[epoch] for epoch in expected}, rel=1e-12)
    assert record.score == pytest.approx(layer_loop.train(None, 2, 0.02, (), data, epochs, 150).test, rel=1e-12)


# Beside any others ----------------------------------------------------------------------------------------------------

GROUPS = [(0, 1, 2, 3, 4), (4, 2, 0), (1, 3), (2, 2)]


def assert_equal_bits(config, runs, groups=GROUPS):
    """Every run comes out alone as in any group, whatever its place there."""
    alone = [bits(train(config, run)[0]) for run in runs]
    assert len({one[-3] for one in alone}) == len(runs)
    for group in groups:
        found = train(config, *(runs[i] for i in group))
        assert [bits(record) for record in found] == [alone[i] for i in group], group


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"batch": 7}),
        ({"count": 17, "channels": 5, "length": 4}, {}),
        ({"count": 13, "channels": 1, "outputs": 2}, {"batch": 5, "hidden": 9}),
        ({"count": 5, "length": 3}, {"batch": 1}),
        ({"count": 17, "length": 3}, {"batch": 4}),
        ({"count": 19, "channels": 2, "outputs": 3}, {"batch": 19, "dtype": "float32", "hidden": 6}),
    ],
)
@pytest.mark.parametrize("steps", [None, (0.0, 0.08, 0.3, 0.02, 1.0), "stack"])
def test_a_run_has_the_same_bits_alone_and_beside_others(steps, shape, options, custom):
    """Weights, Adam's moments, curve and scores do not depend on the group: odd batches, batches of one, several target
    columns; seeds, rates and step sizes side by side."""
    hs = [None if steps is None else (0.3, h) if steps == "stack" else (h,) for h in (0.0, 0.08, 0.3, 0.02, 1.0)]
    runs = [bench.Run(seed, 0.01 * (1 + seed), h) for seed, h in zip((0, 1, 2, 0, 5), hs, strict=True)]
    runs[3] = dataclasses.replace(runs[3], lr=0.02)
    assert_equal_bits(custom(**shape, **options), runs)


@pytest.mark.parametrize("layer", ["FourierBlock", "ComplexFilter", "FixedAttribute"])
def test_where_rounding_grows_bits_are_still_equal(layer, custom):
    """24 epochs at the rate 0.05, where a difference in the last bit would be seen in the first digits."""
    config = custom(epochs=24, layer=layer, length=8, batch=11)
    assert_equal_bits(config, [bench.Run(seed, 0.05, (0.08,)) for seed in range(3)], [(0, 1, 2), (2, 0)])


def test_rounding_does_grow(custom):
    """At that rate a last bit changed before the training is a different score after it."""
    config, run = custom(epochs=24, layer="FourierBlock", length=8, batch=11), bench.Run(0, 0.05, (0.08,))
    with bench.computing(config):
        model = bench.Model(config, [run])
        with torch.no_grad():
            model.core[1] *= 1 + 1e-15
        training = bench.Training(model)
        list(training.run())
        (record,) = bench.records(training)
    assert record.score != train(config, run)[0].score


# Resuming -------------------------------------------------------------------------------------------------------------


def stages(config, *runs):
    """Train runs to the end; returns their states after each epoch, and their records."""
    with bench.computing(config):
        training = bench.Training(bench.Model(config, runs))
        return {epoch: training.states() for epoch in training.run()}, bench.records(training)


@pytest.mark.parametrize("layer", ["kinetic", *(layer.__name__ for layer in user_layers.ALLOWED)])
def test_resuming_equals_going_through(layer, custom):
    """From the states of any epoch, in any group, the training ends at the same bits as one that was never stopped."""
    config = custom(epochs=3, layer=None if layer == "kinetic" else layer)
    runs = [bench.Run(seed, lr, (0.08,)) for seed, lr in ((0, 0.01), (3, 0.02), (0, 0.03))]
    states, through = stages(config, *runs)
    through = [bits(record) for record in through]
    assert [state.epoch for state in states[1]] == [1] * 3
    assert [bits(record) for record in train(config, *runs, states=states[1])] == through
    assert [bits(record) for record in train(config, *runs[:0:-1], states=states[2][:0:-1])] == through[:0:-1]


@pytest.mark.parametrize("h", [None, (0.08,), (0.0,)])
def test_more_epochs_go_on_from_fewer(h, custom):
    """A finished training of few epochs is the beginning of a longer one, whose curve has all its checkpoints."""
    short, long = custom(epochs=3), custom(epochs=6)
    runs = [bench.Run(0, 0.01, h), bench.Run(1, 0.02, h)]
    states = [record.state for record in train(short, *runs)]
    assert [list(state.curve) for state in states] == [[1, 2, 3]] * 2
    for went_on, fresh in zip(train(long, *runs, states=states), train(long, *runs), strict=True):
        assert went_on.state.curve.items() >= fresh.state.curve.items()
        went_on.state.curve.pop(3)
        assert bits(went_on) == bits(fresh)


def test_finished_states_are_scored_without_training(custom):
    """From a state of the last epoch nothing is trained; if the curve lacks that epoch, it is measured then."""
    config, runs = custom(epochs=3), [bench.Run(0, 0.01, None), bench.Run(1, 0.02, None)]
    expected = [bits(record) for record in train(config, *runs)]
    states = stages(custom(epochs=4), *runs)[0][3]
    assert [list(state.curve) for state in states] == [[1, 2]] * 2
    assert [bits(record) for record in train(config, *runs, states=states)] == expected


def test_states_are_copies(custom):
    """What was handed out stays as it is while the training goes on, and a resumed training leaves it alone."""
    config, runs = custom(epochs=3), [bench.Run(0, 0.01, (0.08,)), bench.Run(1, 0.02, (0.08,))]
    with bench.computing(config):
        training = bench.Training(bench.Model(config, runs))
        going = training.run()
        next(going)
        states = training.states()
        before = [(s.epoch, s.weights.tobytes(), s.mean.tobytes(), s.square.tobytes(), dict(s.curve)) for s in states]
        list(going)
    train(config, *runs, states=states)
    after = [(s.epoch, s.weights.tobytes(), s.mean.tobytes(), s.square.tobytes(), dict(s.curve)) for s in states]
    assert before == after


# Divergence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "rate"), DIVERGING)
@pytest.mark.parametrize("h", [None, (0.08,)])
def test_diverged_run_does_not_touch_its_neighbours(h, config, rate):
    """Beside a run that diverges the others keep every bit, and the diverged one has no score instead of NaN."""
    neighbours, lost = [bench.Run(0, 0.003, h), bench.Run(1, 0.006, h)], bench.Run(0, rate, h)
    sound = train(config, neighbours[0], bench.Run(0, 0.0015, h), neighbours[1])
    mixed = train(config, neighbours[0], lost, neighbours[1])
    assert all(bits(sound[i]) == bits(mixed[i]) for i in (0, 2))
    assert mixed[1].score is None and mixed[1].validation is None
    assert [bool(record.state.finite) for record in mixed] == [True, False, True]


def test_a_lost_run_stays_lost(custom):
    """A run that diverged before it was resumed has no score afterwards, even if its numbers look sound."""
    config, runs = custom(), [bench.Run(0, 0.01, None), bench.Run(1, 0.01, None)]
    lost, sound = stages(config, *runs)[0][1]
    records = train(config, *runs, states=[dataclasses.replace(lost, finite=False), sound])
    assert records[0].score is None and records[0].validation is None and not records[0].state.finite
    assert records[1].score is not None and records[1].state.finite


def test_the_test_score_says_whether_a_run_diverged(custom, monkeypatch):
    """Where it is not finite, validation has no score either; where validation alone overflows, the score stays."""
    scores = {"test": np.array([1.0, np.inf, np.nan]), "val": np.array([np.inf, 2.0, 3.0])}
    monkeypatch.setattr(bench, "evaluate", lambda model, split, most=None: scores[split])
    found = train(custom(), *(bench.Run(seed, 0.01, None) for seed in range(3)))
    assert [(record.score, record.validation) for record in found] == [(1.0, None), (None, None), (None, None)]


@pytest.mark.parametrize("rate", [1e6, 1e20])
@pytest.mark.parametrize("h", [None, (0.08,)])
def test_a_rate_that_stays_finite_keeps_its_score(h, rate):
    """Adam's steps are as long as the rate: it trains to a useless number, which is the oracle's and no divergence."""
    (record,) = train(TINY, bench.Run(0, rate, h))
    _, expected = plain_loop.train(0, rate, h, TINY.epochs, plain_data(0, TINY.sizes))
    assert record.score == pytest.approx(expected, rel=1e-9)
    assert record.score > rate and record.state.finite


def test_a_rate_of_a_million_stays_finite_in_float32():
    """The same in the narrower dtype, whose largest number is 3e38."""
    (record,) = train(FLOAT32, bench.Run(0, 1e6, None))
    assert record.score > 1e6


# The rest -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [None, (0.08,)])
def test_float32_trains_to_nearly_the_same_score(h):
    """The faster mode learns the same: the score agrees with the float64 oracle's to about three digits."""
    (record,) = train(FLOAT32, bench.Run(1, 0.006, h))
    _, expected = plain_loop.train(1, 0.006, h, 3, plain_data(1, TINY.sizes))
    assert record.state.weights.dtype == np.float32
    assert record.score == pytest.approx(expected, rel=1e-3)


def test_training_learns():
    """Two epochs bring the test error far below that of the untrained model and of guessing the mean."""
    config = bench.Config(epochs=2)  # the data of the first test, still known
    run = bench.Run(3, 0.006, None)
    with bench.computing(config):
        (before,) = bench.evaluate(bench.Model(config, [run]), "test")
    assert train(config, run)[0].score < 0.25 * min(before, 1)


def test_evaluation_is_the_mean_over_all_sequences_and_columns(custom):
    """The MSE of a split is the plain mean over its sequences and target columns; of the first ones, theirs."""
    config = custom(count=601, outputs=2, length=2, channels=1)
    with bench.computing(config), torch.no_grad():
        model = bench.Model(config, [bench.Run(0, 0.01, None), bench.Run(1, 0.01, None)])
        for split, most in itertools.product(("train", "test", "val"), (None, 1, 256, 300)):
            tokens, targets = model.batch(split, [slice(0, most)] * 2)
            expected = (model(tokens) - targets).square().flatten(1).mean(1)
            assert bench.evaluate(model, split, most) == pytest.approx(expected.numpy(), rel=1e-13)


def test_training_draws_from_no_global_generator(custom):
    """Global seeds of torch and numpy neither matter nor move, with a layer that draws its own weights as well."""
    for layer, config in ((None, TINY), ("Buffered", custom(layer="Buffered"))):
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002  the legacy generator is what must not be used
            states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
            found.append(bits(train(config, bench.Run(1, 0.003, (0.08,)))[0]))
            assert torch.equal(torch.get_rng_state(), states[0]), layer
            assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
        assert found[0] == found[1]
