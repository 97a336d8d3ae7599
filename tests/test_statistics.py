"""Statistics: the reference report's own numbers, published traps, and tests that one can check by hand."""

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import stage2_bench as bench

REFERENCE = json.loads(Path(__file__).with_name("reference_report.json").read_text())
BASELINE, IDEA = REFERENCE["baseline"]["full"]["per_seed"], REFERENCE["idea"]["per_seed"]
TIED = (
    [0.049, 0.029, 0.046, 0.042, 0.054, 0.050, 0.032, 0.056],
    [0.051, 0.025, 0.043, 0.040, 0.044, 0.052, 0.021, 0.046],
)


@pytest.fixture(autouse=True)
def no_warnings():
    """A degenerate case gives a reason, not a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_reference_comparison_is_reproduced_whole():
    """The published pairs give the published block, p = 0.04965 to the last digit."""
    assert bench.comparison(BASELINE, IDEA, range(8)) == REFERENCE["comparison"]


@pytest.mark.parametrize(("scores", "block"), [(BASELINE, REFERENCE["baseline"]["full"]), (IDEA, REFERENCE["idea"])])
def test_reference_means_and_stds_are_reproduced(scores, block):
    """The std divides by n."""
    assert bench.summary(scores) == block


def test_exact_p_of_the_reference():
    """12 of the 256 sign flips reach the published mean."""
    assert bench.exact_p(bench.differences(BASELINE, IDEA)) == 12 / 256


def test_ties_with_the_observed_mean_count():
    """Rounding loses six of these eighteen flips to a plain >=, and with them the honest verdict."""
    d = bench.differences(*TIED)
    assert bench.exact_p(d) == 18 / 256
    assert bench.sign_flip_p(d) == 1413 / 20_000


@pytest.mark.parametrize("exponent", [0, -40, -100, 60])
def test_p_does_not_depend_on_the_unit(exponent):
    """A tolerance must be relative."""
    d = np.array([3, -1, 2, 5, -2, 4, 1, 6]) * 2.0**exponent
    assert bench.exact_p(d) == 22 / 256
    assert bench.sign_flip_p(d) == bench.sign_flip_p(d / 2.0**exponent)


@pytest.mark.parametrize("pairs", [8, 1000])
def test_sampled_flips_are_one_draw_of_the_generator(pairs):
    """Drawing in blocks, for memory, gives the very flips of the reference's single call."""
    d = np.random.default_rng(5).normal(0.05, 1, pairs)
    flips = np.random.default_rng(0).choice([-1, 1], size=(20_000, pairs))
    hits = np.abs((flips * d).mean(1)) >= abs(d.mean()) * (1 - 1e-9)
    assert bench.sign_flip_p(d) == hits.mean()


def test_exact_p_agrees_with_enumeration_by_hand():
    """d = 1, 2, 4: of the eight flips two reach 7/3, d = 1, 1, -1: all reach 1/3."""
    assert bench.exact_p(np.array([1.0, 2.0, 4.0])) == 2 / 8
    assert bench.exact_p(np.array([1.0, 1.0, -1.0])) == 1.0


def test_exact_means_that_all_flips_were_enumerated():
    """At 14 pairs scipy's default would sample 9,999 of 16,384; at 17 there is no exact p."""
    d = np.arange(1.0, 15.0)
    assert bench.exact_p(d) == 2 / 2**14
    assert bench.exact_p(np.arange(1.0, 17.0)) == 2 / 2**16
    assert bench.exact_p(np.arange(1.0, 18.0)) is None


def test_no_difference():
    """All pairs equal: p = 1, and the verdict says so."""
    block = bench.comparison([0.5] * 8, [0.5] * 8, range(8))
    assert (block["p_value"], block["verdict"], block["system_worked"]) == (1.0, "no difference", False)
    assert bench.exact_p(np.zeros(8)) == 1.0


def test_constant_difference_has_no_effect_size():
    """Eight differences of .25, rounding noise included: p = 2/256, no spread to divide by."""
    for first in ([1.0] * 8, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]):
        block = bench.statistics_block(bench.Config(), first, [value + 0.25 for value in first])
        assert block["p_exact"] == 2 / 256
        assert block["effect_size_dz"] is block["interval_95"] is block["detectable_difference"] is None
        assert block["reason_for_null"] == "all differences are equal"


def test_one_pair_is_no_traceback():
    """One pair: p = 1, no interval."""
    block = bench.statistics_block(bench.Config(), [0.1], [0.2])
    assert block["p_exact"] == block["p_floor"] == bench.sign_flip_p(np.array([0.1])) == 1.0
    assert block["interval_95"] is block["effect_size_dz"] is block["detectable_difference"] is None


@pytest.mark.parametrize("bad", [None])
def test_a_diverged_pair_never_enters_a_statistic(bad):
    """Mean, std, delta and p are null, and the verdict names the seed."""
    block = bench.comparison([0.1] * 8, [0.2] * 7 + [bad], range(10, 18))
    assert block["delta_mean"] is block["p_value"] is None
    assert block["verdict"] == "not judged: idea diverged at seed 17"
    assert block["idea_wins"] == 0 and not block["system_worked"]
    assert bench.summary([0.1, bad])["mean"] is bench.summary([0.1, bad])["std"] is None
    extra = bench.statistics_block(bench.Config(), [0.1] * 8, [0.2] * 7 + [bad])
    assert extra["p_exact"] is extra["interval_95"] is extra["share_won"] is None
    assert extra["reason_for_null"] == "a pair diverged"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_printed_as_null(value):
    """NaN and infinities become null before anything is computed from them."""
    assert bench.printed(value) is None and bench.finite_or_none(value) is None


def test_degenerate_bootstrap():
    """Seven zeros and a one: BCa gives [0, .5]."""
    assert bench.bootstrap_interval(np.array([0, 0, 0, 0, 0, 0, 0, 1.0])) == [0.0, 0.5]


def test_interval_is_scipys_and_scales():
    """BCa with 9,999 resamples of a fresh generator; a change of unit changes the interval alike."""
    d = bench.differences(BASELINE, IDEA)
    expected = stats.bootstrap((d,), np.mean, n_resamples=9_999, method="BCa", rng=np.random.default_rng(0))
    low, high = expected.confidence_interval
    assert bench.bootstrap_interval(d) == pytest.approx([low, high], abs=1.1e-10)


def test_detectable_difference_has_80_percent_power():
    """The noncentral t of scipy finds a difference of that size in 80 % of repetitions."""
    d = bench.differences(BASELINE, IDEA)
    found = bench.detectable_difference(d, bench.Config())
    shift = found / (np.std(d, ddof=1) / math.sqrt(8))
    assert stats.nct.sf(stats.t.ppf(0.975, 7), 7, shift) == pytest.approx(0.8, abs=1e-5)


def test_holm_by_hand():
    """.01 .04 .03 .005: sorted times 4, 3, 2, 1 and never falling."""
    assert bench.holm([0.01, 0.04, 0.03, 0.005]) == [0.03, 0.06, 0.06, 0.02]
    assert bench.holm([0.5, 0.9, 0.7, 0.6]) == [1.0, 1.0, 1.0, 1.0]
    assert bench.holm([0.1, None]) == [None, None]


def test_verdict_is_a_function_of_numbers():
    """Better and significant is the only way to have worked."""
    assert bench.verdict(-0.1, 0.04, "") == "idea better (significant)"
    assert bench.verdict(-0.1, 0.05, "") == "idea better (not significant)"
    assert bench.verdict(0.1, 0.04, "") == "idea worse (significant)"
    assert bench.verdict(None, None, "idea diverged at seed 3") == "not judged: idea diverged at seed 3"
    better = bench.comparison([0.2, 0.3] * 4, [0.1, 0.1] * 4, range(8))
    assert better["system_worked"] and better["idea_wins"] == 8


def test_a_diverged_rate_never_wins():
    """1e-2: diverged, 1e-3: .5, 1e-1: .4: the last wins; where all diverged, the smallest rate stands."""
    grid = [(1e-2, None), (1e-3, None), (1e-1, None)]
    assert bench.best_row(grid, [math.inf, 0.5, 0.4]) == (1e-1, None)
    assert bench.best_row(grid, [math.inf] * 3) == (1e-3, None)
    assert bench.best_row(grid, [0.4, 0.5, 0.4]) == (1e-2, None)  # the smaller on a tie


def test_edge_of_an_unsorted_grid():
    """1e-3 lies between 1e-2 and 1e-4, wherever it stands in the list."""
    lrs = [1e-2, 1e-4, 1e-3]
    assert [bench.edge(lr, lrs) for lr in lrs] == ["upper", "lower", None]
    assert bench.edge(1e-3, [1e-3]) == "only"
