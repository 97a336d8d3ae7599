"""Section 8, statistics: exact numbers by brute force, by closed forms and by hand, and published traps.

All of it is about whole numbers of the last printed digit, 1e-10: `pairs_of` makes scores of known differences.
"""

import dataclasses
import itertools
import json
import math
import re
import warnings
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import plain_loop
import pytest

import stage2_bench as bench

CONFIG = bench.Config()
REFERENCE = json.loads(Path(__file__).with_name("reference_report.json").read_text())
BASELINE, IDEA = REFERENCE["baseline"]["full"]["per_seed"], REFERENCE["idea"]["per_seed"]


@pytest.fixture(autouse=True)
def no_warnings():
    """A degenerate case gives a reason, not a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def scores_of(units):
    """Return whole numbers of 1e-10 as the floats that a report prints."""
    return [float(Decimal(int(x)).scaleb(-10)) for x in units]


def pairs_of(d, config=CONFIG):
    """Return Pairs of scores near 0.5 whose differences, second - first, are d units of 1e-10."""
    first = [5_000_000_000 + 123_456_789 * i for i in range(len(d))]
    return bench.Pairs(scores_of(first), scores_of(a + x for a, x in zip(first, d, strict=True)), config)


def random_vectors(seed, sizes, times, scale=1):
    """Return vectors of small whole numbers, ties and zeros among them, all to a scale."""
    rng = np.random.default_rng(seed)
    return [[int(scale * x) for x in rng.integers(-4, 6, n)] for n in sizes for _ in range(times)]


def enumerated_p(d):
    """Return the share of all sign patterns whose sum is as far from 0 as the observed one, one pattern at a time."""
    sums = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((-1, 1), repeat=len(d))
    ]
    return Fraction(sum(x >= abs(sum(d)) for x in sums), len(sums))


def counted_p(d):
    """Return the same by counting how many patterns reach each sum, pair by pair: for many pairs of small numbers."""
    counts = Counter({0: 1})
    for x in d:
        further = Counter()
        for total, number in counts.items():
            further[total + x] += number
            further[total - x] += number
        counts = further
    return Fraction(sum(number for total, number in counts.items() if abs(total) >= abs(sum(d))), 2 ** len(d))


def subset_means(d):
    """Return the exact means of all subsets that are not empty, sorted."""
    subsets = itertools.chain(*(itertools.combinations(d, size) for size in range(1, len(d) + 1)))
    return sorted(Fraction(sum(subset), len(subset)) for subset in subsets)


def printed(units):
    """Return an exact number of 1e-10 as it is to be printed: the nearest, halves to even."""
    return round(units) / 10**10


# Scores, means, spread ------------------------------------------------------------------------------------------------


def test_reference_comparison_is_reproduced_whole():
    """The published pairs give the published block, p = 0.04965 to the last digit."""
    pairs = bench.Pairs(BASELINE, IDEA, CONFIG)
    found = {
        "delta_mean": pairs.delta_mean,
        "idea_wins": pairs.wins,
        "n_pairs": 8,
        "p_value": pairs.p_value,
        "verdict": bench.verdict(pairs, range(8)),
        "system_worked": False,
    }
    assert found == REFERENCE["comparison"]
    assert pairs.p_value == 993 / 20_000 and pairs.p_exact == 12 / 256


@pytest.mark.parametrize(("scores", "block"), [(BASELINE, REFERENCE["baseline"]["full"]), (IDEA, REFERENCE["idea"])])
def test_reference_means_and_stds_are_reproduced(scores, block):
    """The std divides by n."""
    assert (bench.mean_of(scores), bench.std_of(scores)) == (block["mean"], block["std"])


def test_differences_are_whole_numbers_of_the_last_digit():
    """The rounding of 0.6083869818 - 0.6083869816 is not in its difference, 2 units."""
    assert bench.Pairs([0.6083869816, 1e-10, 3.0], [0.6083869818, 0.0, 1e40], CONFIG).d == [2, -1, 10**50 - 3 * 10**10]
    assert bench.Pairs([0.1000001, 2.0], [0.1, 2.0000003], CONFIG).d == [-1000, 3000]


@pytest.mark.parametrize(
    ("units", "mean"),
    [((1, 2), 2), ((2, 3), 2), ((0, 1), 0), ((3, 4), 4), ((1, 1, 2), 1), ((10**10, 10**10 + 1), 10**10), ((7,), 7)],
)
def test_means_round_halves_to_even(units, mean):
    """A mean is the exact fraction of units, rounded to the nearest; floats would round a half either way."""
    scores, opposite = scores_of(units), scores_of(-x for x in units)
    assert bench.mean_of(scores) == printed(mean)
    pairs = bench.Pairs([0.0] * len(units), opposite, CONFIG)
    assert pairs.delta_mean == printed(-mean)
    assert bench.Pairs(opposite, [0.0] * len(units), CONFIG).delta_mean == printed(mean)
    assert bench.mean_of([x / 10**7 for x in units], 7) == mean / 10**7


def test_means_are_exact_where_floats_are_not():
    """Of random scores in pairs and eights, where one mean in two or eight is an exact half."""
    rng = np.random.default_rng(0)
    for n in (2, 8):
        for units in rng.integers(0, 3 * 10**10, (300, n)).tolist():
            assert bench.mean_of(scores_of(units)) == printed(Fraction(sum(units), n))


def test_std_divides_by_n_and_is_right_for_any_size():
    """By closed form: two values a, b have std abs(a - b) / 2; a tiny spread on a large mean is not lost."""
    assert bench.std_of([1.0, 4.0]) == 1.5
    assert bench.std_of([1e5 + 1e-9, 1e5 + 3e-9]) == pytest.approx(1e-9, abs=1e-10)
    assert bench.std_of(scores_of((10**14, 10**14 + 20))) == 1e-9
    assert bench.std_of([1e40, 3e40]) == 1e40
    assert bench.std_of([0.3] * 8) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_what_is_not_finite_is_printed_as_null(value):
    """NaN and infinities become null before anything is computed from them, and null stays null."""
    assert bench.rounded(value) is None
    assert bench.mean_of([0.1, bench.rounded(value)]) is bench.std_of([0.1, bench.rounded(value)]) is None


def test_numbers_are_printed_to_ten_digits_and_zero_has_no_sign():
    """Ten decimals, or as many as asked for."""
    assert bench.rounded(0.12345678914) == 0.1234567891 and bench.rounded(1 / 3, 7) == 0.3333333
    assert math.copysign(1, bench.rounded(-1e-12)) == 1


# The sign-flip test ---------------------------------------------------------------------------------------------------

KNOWN = {  # published or found in use: differences in units, exact p
    "ties with the observed mean": ([2, -4, -3, -2, -10, 2, -11, -10], Fraction(18, 256)),
    "a mean of exactly 0": ([-30000, -10000, 0, -10000, 0, 20000, 10000, -10000, 30000], Fraction(1)),
    "no difference": ([0] * 8, Fraction(1)),
    "a constant difference": ([2_500_000_000] * 8, Fraction(2, 256)),
    "a constant difference of ten units": ([10] * 8, Fraction(2, 256)),
    "seven zeros and a one": ([0] * 7 + [1], Fraction(1)),
    "one pair": ([3], Fraction(1)),
    "1, 2, 4 by hand: two of eight flips reach 7": ([1, 2, 4], Fraction(2, 8)),
    "1, 1, -1 by hand: all flips reach 1": ([1, 1, -1], Fraction(1)),
    "14 pairs": (range(1, 15), Fraction(2, 2**14)),
    "20 pairs": (range(1, 21), Fraction(2, 2**20)),
    "40 pairs": (range(1, 41), Fraction(2, 2**40)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_exact_p_of_known_cases(case):
    """Exact means that all 2^n patterns are counted: to the last bit, ties included, and never 0."""
    d, p = KNOWN[case]
    assert Fraction(pairs_of(d).p_exact) == p


def test_ties_are_not_lost_to_the_rounding_of_scores():
    """Near 0.05 and near 1 a plain >= of floats finds 12/256 and calls it significant; 18 flips tie or exceed."""
    first = [0.049, 0.029, 0.046, 0.042, 0.054, 0.050, 0.032, 0.056]
    pairs = bench.Pairs(first, [0.051, 0.025, 0.043, 0.040, 0.044, 0.052, 0.021, 0.046], CONFIG)
    assert (pairs.p_exact, pairs.p_value) == (18 / 256, 1413 / 20_000)
    assert bench.verdict(pairs, range(8)) == "no significant difference"
    first = [
        0.6083869816,
        1.3626357024,
        1.375278485,
        0.8519356806,
        1.1744303708,
        0.7185596104,
        0.6623363792,
        0.649005682,
    ]
    other = [
        0.6083869818,
        1.362635702,
        1.3752784847,
        0.8519356804,
        1.1744303698,
        0.7185596106,
        0.6623363781,
        0.649005681,
    ]
    pairs = bench.Pairs(first, other, CONFIG)
    assert pairs.p_exact == 18 / 256
    assert bench.verdict(pairs, range(8)) == "no significant difference"


@pytest.mark.parametrize("scale", [1, 2**10, 10**10, 2**60, 10**50])
def test_p_does_not_depend_on_the_unit(scale):
    """22 of 256 flips, in units of 1e-10 or of 1e40, where int64 overflows."""
    pairs = bench.Pairs([0.0] * 8, scores_of(scale * x for x in (3, -1, 2, 5, -2, 4, 1, 6)), CONFIG)
    assert pairs.p_exact == 22 / 256
    assert pairs.p_value == pairs_of([3, -1, 2, 5, -2, 4, 1, 6]).p_value


@pytest.mark.parametrize("scale", [3 * 10**17, 5 * 10**17, 10**18])
def test_p_where_sums_just_overflow_64_bits(scale):
    """Sums up to 24 scales, 32 in the search: the first beyond 2^63 = 9.2e18 in the search alone, the second in both.
    Differences of one sign are reached by two of 256 flips."""
    d = [scale * x for x in (3, 1, 2, 5, 2, 4, 1, 6)]
    assert bench.Pairs([0.0] * 8, scores_of(d), CONFIG).p_exact == 2 / 256
    mixed = bench.Pairs([0.0] * 8, scores_of(scale * x for x in (3, -1, 2, 5, -2, 4, 1, 6)), CONFIG)
    assert mixed.p_value == pairs_of([3, -1, 2, 5, -2, 4, 1, 6]).p_value


@pytest.mark.parametrize("sizes", [range(1, 6), range(6, 10)])
def test_halves_count_what_full_enumeration_counts(sizes):
    """On random whole numbers with ties and zeros, every pattern one at a time; both signs of d have the same p."""
    for d in random_vectors(1, sizes, 12):
        expected = enumerated_p(d)
        assert Fraction(pairs_of(d).p_exact) == Fraction(pairs_of([-x for x in d]).p_exact) == expected, d


@pytest.mark.parametrize("n", [13, 16, 17, 24, 31, 39, 40])
def test_halves_count_what_a_count_by_sums_counts(n):
    """Up to 40 pairs, odd numbers too, with ties and zeros, beside an independent count of patterns by their sum."""
    for d in random_vectors(n, [n], 1 if n > 31 else 4):
        assert Fraction(pairs_of(d).p_exact) == counted_p(d), d


def test_above_40_pairs_there_is_no_exact_p():
    """Its place is null and says why; the sampled p stays."""
    pairs = pairs_of(range(1, 42))
    assert pairs.p_exact is None and pairs.p_value == 0.0
    assert pairs.reason_for_null == "more than 40 pairs"


@pytest.mark.parametrize(("pairs", "scale"), [(1, 1), (8, 1), (17, 1), (300, 1), (8, 10**50)])
def test_sampled_flips_are_one_draw_of_the_generator(pairs, scale):
    """The very flips of one choice([-1, 1], (20000, n)), however many are drawn at a time; a tie is a hit."""
    d = np.random.default_rng(5).integers(-900, 1100, pairs)
    flips = np.random.default_rng(0).choice([-1, 1], size=(20_000, pairs))
    expected = np.mean(np.abs(flips @ d) >= abs(d.sum()))
    found = bench.Pairs([0.0] * pairs, scores_of(scale * int(x) for x in d), CONFIG)
    assert found.p_value == expected


def test_wins_are_strict():
    """A tie is won by neither."""
    assert pairs_of([-1, 0, 0, 1, -5, 2]).wins == 2
    assert pairs_of([0] * 4).wins == 0


# The interval ---------------------------------------------------------------------------------------------------------


def test_interval_by_hand():
    """Six pairs, k = 1: from the smallest difference to the largest, coverage 1 - 2/64.

    Seven, k = 3: of 1, 2, 3, 10, 20, 30, 40 the smallest subset means are 1 {1}, 3/2 {1, 2}, 2 {2}, and the largest 40,
    35 {30, 40}, 30 {30}; coverage 1 - 6/128.
    """
    six, seven = pairs_of([5, -3, 8, 1, 2, 2]), pairs_of([20, 3, 40, 1, 10, 30, 2])
    assert (six.interval, six.coverage) == ([-3e-10, 8e-10], 0.96875)
    assert (seven.interval, seven.coverage) == ([2e-10, 30e-10], 0.953125)


def test_typical_values_by_hand():
    """Hartigan's property: of the sign patterns of 1, 2, 4 each puts 0 at another rank among the seven subset means.

    So with k of 1, 2 or 3 the interval leaves 0 out for exactly 2 k of the 8 patterns.
    """
    patterns = [
        [s * x for s, x in zip(signs, (1, 2, 4), strict=True)] for signs in itertools.product((-1, 1), repeat=3)
    ]
    assert sorted(sum(mean < 0 for mean in subset_means(d)) for d in patterns) == list(range(8))
    for k in (1, 2, 3):
        intervals = [pairs_of([100 * x for x in d], bench.Config(tail=k / 8)).interval for d in patterns]
        assert sum(low > 0 or high < 0 for low, high in intervals) == 2 * k


@pytest.mark.parametrize(("n", "k"), [(6, 1), (7, 3), (8, 6)])
def test_interval_misses_the_centre_of_exactly_2_k_patterns(n, k):
    """The same for every sign pattern of n differences without ties, around a centre that is not 0."""
    missed, centre = 0, 77_000
    for signs in itertools.product((-1, 1), repeat=n):
        low, high = pairs_of([centre + 1000 * s * 3**i for i, s in enumerate(signs)]).interval
        missed += not low <= centre * 1e-10 <= high
    assert missed == 2 * k
    assert pairs_of(range(n)).coverage == 1 - 2 * k / 2**n


@pytest.mark.parametrize(("n", "nominal"), [(6, 0.96875), (8, 0.953125), (12, 1 - 2 * 102 / 2**12)])
def test_coverage_by_simulation(n, nominal):
    """Of heavy-tailed symmetric differences the interval covers the centre as often as it says."""
    draws = np.random.default_rng(n).laplace(123_456, 1e6, (600, n)).round().astype(int).tolist()
    studies = [pairs_of(d) for d in draws]
    covered = np.mean([low <= 123_456e-10 <= high for low, high in (pairs.interval for pairs in studies)])
    assert abs(covered - nominal) < 3.3 * math.sqrt(nominal * (1 - nominal) / 600)
    assert studies[0].coverage == pytest.approx(nominal, abs=1e-10)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 10, 12])
def test_interval_is_from_the_kth_smallest_to_the_kth_largest_subset_mean(n):
    """All subsets as exact fractions, ties and zeros among them, k = floor(0.025 * 2^n), the ends' halves to even."""
    k = math.floor(Fraction(25, 1000) * 2**n)
    for d in random_vectors(n, [n], 6 if n < 12 else 2):
        means = subset_means(d)
        assert pairs_of(d).interval == [printed(means[k - 1]), printed(means[-k])], d


def test_interval_where_units_need_64_bits():
    """Differences of 0.9 to 1.8 times 1e9 are whole numbers between 2^63 and 2^64, which NumPy takes for floats."""
    pairs = bench.Pairs([0.0, 2.0, 1.0, 1.0, 1.0, 1.0], [1.2e9, 1.0, 1.5, 2.0, 2.0, 3.0], CONFIG)
    assert pairs.interval == [-1.0, 1.2e9]


def test_sampled_p_does_not_depend_on_the_block_it_is_drawn_in():
    """The share of hits of a number of flips that no round number divides, drawn at once by hand."""
    d, flips = np.array([3, -1, 2, 5, -2, 4, 1, 6]), 2_345
    signs = np.random.default_rng(0).choice([-1, 1], size=(flips, len(d)))
    share = np.mean(abs(signs @ d) >= d.sum())
    assert bench.Pairs([0.0] * 8, [x / 10**10 for x in d.tolist()], bench.Config(flips=flips)).p_value == share


def test_interval_of_16_pairs_is_still_of_all_subsets():
    """65,535 means of whole multiples of 720,720, which every size divides; coverage 1 - 2 * 1638 / 65536."""
    d = np.random.default_rng(4).integers(-900, 1200, 16)
    masks = np.arange(1, 2**16)[:, None] >> np.arange(16) & 1
    means = np.sort(720_720 // masks.sum(axis=1) * (masks @ d))
    pairs = pairs_of(d.tolist())
    assert pairs.interval == [printed(Fraction(int(means[i]), 720_720)) for i in (1637, -1638)]
    assert pairs.coverage == round(1 - 2 * 1638 / 65_536, 10)


@pytest.mark.parametrize("sizes", [range(1, 9), range(9, 13), (15, 16)])
def test_p_below_5_percent_just_where_0_is_outside_the_interval(sizes):
    """One test, seen from two sides: on random whole numbers with ties and zeros, up to 16 pairs.

    A thousand units to a step, so that an end that is not 0 is not printed as 0.
    """
    outside = 0
    for d in random_vectors(3, sizes, 40 if max(sizes) < 13 else 6, scale=1000):
        pairs = pairs_of([x + 1000 for x in d])
        low, high = pairs.interval or (0, 0)
        assert (pairs.p_exact < 0.05) == (low > 0 or high < 0), d
        outside += low > 0 or high < 0
    assert outside > 1


def test_above_16_pairs_subsets_are_sampled():
    """17 pairs: the k-th of 9,999 subset means, k = 250, subsets from one draw of the generator, coverage 0.95."""
    d = np.random.default_rng(2).integers(-900, 1400, 17)
    masks = np.random.default_rng(0).random((9_999, 17)) < 0.5
    means = sorted(Fraction(int(d[mask].sum()), int(mask.sum())) for mask in masks)
    pairs = pairs_of(d.tolist())
    assert pairs.interval == [printed(means[249]), printed(means[-250])]
    assert pairs.coverage == 0.95
    assert pairs_of(range(41)).coverage == 0.95


def test_an_empty_sampled_subset_is_the_whole():
    """Of three pairs one sampled subset in eight is empty; it stands for all of them, and nothing is divided by 0.

    With k = 5,500 of 9,999 the interval's lower end is where that can be told: 3/8 of the means are below the whole's.
    """
    config = bench.Config(subset_pairs=2, tail=0.55)
    masks = np.random.default_rng(0).random((9_999, 3)) < 0.5
    masks[masks.sum(axis=1) == 0] = True
    d = np.array([-700, 200, 899])
    means = sorted(Fraction(int(d[mask].sum()), int(mask.sum())) for mask in masks)
    assert pairs_of(d.tolist(), config).interval == [printed(means[5499]), printed(means[-5500])]
    assert means[5499] == 133


def test_scale_of_the_differences_changes_no_probability():
    """Numbers printed to 7 digits, such as RMSEs: p and effect size of those of smaller ones."""
    d = [7, -2, 9, 4, 3, 8, 1]
    small, large = pairs_of(d), bench.Pairs([0.0] * 7, [x / 10**7 for x in d], CONFIG)
    assert (large.p_exact, large.p_value, large.effect_size) == (small.p_exact, small.p_value, small.effect_size)
    assert large.delta_mean == round(1000 * sum(d) / 7) / 10**10
    assert large.interval == pytest.approx([1000 * end for end in small.interval], abs=1e-7)
    assert large.detectable == pytest.approx(1000 * small.detectable, abs=1e-7)


@pytest.mark.parametrize("n", [6, 8, 17])
def test_interval_moves_and_scales_with_the_differences(n):
    """Adding c adds c, ten times the differences are ten times the interval, their negatives its mirror image."""
    d = [840 * int(x) for x in np.random.default_rng(n).integers(-900, 900, n)]
    low, high = (round(end * 1e10) for end in pairs_of(d).interval)
    assert pairs_of([x + 5 for x in d]).interval == pytest.approx(scores_of((low + 5, high + 5)), abs=1.01e-10)
    assert pairs_of([10 * x for x in d]).interval == pytest.approx(scores_of((10 * low, 10 * high)), abs=5.1e-10)
    assert pairs_of([-x for x in d]).interval == scores_of((-high, -low))


# Effect size, detectable difference, reasons --------------------------------------------------------------------------


def test_effect_size_by_hand():
    """1, 2, 3: mean 2, std (ddof 1) 1; 1, 3: 2 / sqrt 2; in any unit, and of either sign."""
    for scale in (1, 10**6, 10**50):
        for d, expected in (((1, 2, 3), 2.0), ((-1, -2, -3), -2.0), ((1, 3), 1.4142135624), ((-5, 5), 0.0)):
            pairs = bench.Pairs([0.0] * len(d), scores_of(scale * x for x in d), CONFIG)
            assert pairs.effect_size == expected


def test_detectable_difference_is_found_by_80_percent_of_studies():
    """Normal studies of 8 pairs whose mean is that many of their std: four of five intervals lie above 0."""
    d = [500_000, -200_000, 900_000, 100_000, 700_000, -400_000, 300_000, 250_000]
    shift = pairs_of(d).detectable / (np.std(d, ddof=1) * 1e-10)
    studies = np.random.default_rng(99).normal(shift, 1, (800, 8))
    found = np.mean([pairs_of((1e6 * study).astype(int).tolist()).interval[0] > 0 for study in studies])
    assert abs(found - 0.8) < 0.05


@pytest.mark.parametrize("n", [6, 8, 17])
def test_detectable_difference_to_the_digit(n):
    """80th percentile of minus the k-th smallest subset mean of 1,000 normal samples, times the std of d (ddof 1)."""
    d = np.random.default_rng(n).integers(-90_000_000, 110_000_000, n)
    masks, k = np.array(list(itertools.product((False, True), repeat=n))[1:]) if n < 17 else None, int(0.025 * 2**n)
    if n == 17:
        masks, k = np.random.default_rng(0).random((9_999, 17)) < 0.5, 250
    samples = np.random.default_rng(0).standard_normal((1_000, n))
    kth = [
        np.sort([z @ mask / mask.sum() for mask in masks] if n < 8 else masks @ z / masks.sum(1))[k - 1]
        for z in samples
    ]
    expected = np.percentile(-np.array(kth), 80) * np.std(d, ddof=1) * 1e-10
    assert pairs_of(d.tolist()).detectable == pytest.approx(expected, abs=1.01e-10)


def test_committed_study_has_its_known_interval():
    """Eight pairs whose interval and detectable difference another implementation gave."""
    first = [
        0.0013865351,
        0.0011705535,
        0.000920187,
        0.0007845681,
        0.0012099649,
        0.00118537,
        0.0010537499,
        0.0007026042,
    ]
    other = [
        0.0013863398,
        0.0014389957,
        0.0010002696,
        0.0011423254,
        0.0014975064,
        0.0017705672,
        0.0016231874,
        0.0008993169,
    ]
    pairs = bench.Pairs(first, other, CONFIG)
    assert pairs.interval == [0.0001161098, 0.000474359]
    assert pairs.detectable == 0.0002490816
    assert (pairs.p_exact, pairs.delta_mean, pairs.wins) == (4 / 256, 0.000293122, 1)


# Differences (None: a diverged run), reason, and what is null: p_exact, interval, coverage, effect size, least found.
REASONS = {
    "one pair": ([3], "one pair", "-icel"),
    "one pair, equal scores": ([0], "one pair", "-icel"),
    "two pairs": ([1, 3], "five pairs or fewer", "-ic-l"),
    "five pairs": ([1, 2, 3, 4, 5], "five pairs or fewer", "-ic-l"),
    "five equal pairs": ([4] * 5, "five pairs or fewer", "-icel"),
    "six pairs": ([1, 2, 3, 4, 5, 6], None, "-----"),
    "no difference": ([0] * 8, "all differences are equal", "---el"),
    "a constant difference": ([10] * 8, "all differences are equal", "---el"),
    "17 equal": ([-7] * 17, "all differences are equal", "---el"),
    "40 pairs": (range(40), None, "-----"),
    "41 pairs": (range(41), "more than 40 pairs", "p----"),
    "41 equal pairs": ([5] * 41, "all differences are equal", "p--el"),
    "one diverged pair": ([None], "a pair diverged", "picel"),
    "one of 8 diverged": ([1, 2, 3, None, 5, 6, 7, 8], "a pair diverged", "picel"),
    "one of 41 diverged": ([*range(40), None], "a pair diverged", "picel"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_told_is_null_for_the_first_reason_that_holds(case):
    """Each degenerate study has its nulls, no others, and one reason; an interval of equal differences is a point."""
    d, reason, nulls = REASONS[case]
    pairs = pairs_of([x or 0 for x in d])
    lost = [None if x is None else score for x, score in zip(d, pairs.second, strict=True)]
    pairs = dataclasses.replace(pairs, second=lost)
    values = (pairs.p_exact, pairs.interval, pairs.coverage, pairs.effect_size, pairs.detectable)
    assert "".join(name if value is None else "-" for name, value in zip("picel", values, strict=True)) == nulls
    assert pairs.reason_for_null == reason
    if pairs.interval and len(set(d)) == 1:
        assert pairs.interval == [printed(d[0])] * 2


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("arm", ["baseline", "idea"])
def test_a_diverged_pair_never_enters_a_statistic(arm, place):
    """Delta and p are null, never 0 or a mean over the rest, and the verdict names arm and seed."""
    scores = {"baseline": [0.1] * 8, "idea": [0.2] * 8}
    scores[arm][place] = None
    pairs = bench.Pairs(scores["baseline"], scores["idea"], CONFIG)
    assert pairs.delta_mean is pairs.p_value is pairs.p_exact is None and pairs.wins == 0
    assert bench.verdict(pairs, range(10, 18)) == f"not judged: {arm} diverged at seed {10 + place}"
    assert bench.mean_of(scores[arm]) is bench.std_of(scores[arm]) is None


@pytest.mark.parametrize("n", [8, 17, 41])
def test_enormous_scores_have_exact_statistics(n):
    """Scores of 1e40, in units of 1e-10 far beyond int64, and one of 0.1 among them: no overflow, no warning."""
    d = random_vectors(n, [n], 1)[0]
    first = [1e40] * (n - 1) + [0.1]
    second = [1e40 + x * 1e38 for x in d[:-1]] + [0.3]
    units = [
        int(Decimal(repr(b)).scaleb(10)) - int(Decimal(repr(a)).scaleb(10)) for a, b in zip(first, second, strict=True)
    ]
    pairs, small = bench.Pairs(first, second, CONFIG), pairs_of([*(10**8 * x for x in d[:-1]), 0])
    assert pairs.d == units
    assert pairs.delta_mean == printed(Fraction(sum(units), n))
    assert pairs.interval == pytest.approx([1e40 * end for end in small.interval], rel=1e-7)
    assert pairs.effect_size == pytest.approx(small.effect_size, rel=1e-8)
    assert pairs.detectable == pytest.approx(1e40 * small.detectable, rel=1e-7)
    if n == 8:
        assert Fraction(pairs.p_exact) == enumerated_p(units)
    assert math.isfinite(bench.std_of(second)) and bench.mean_of(first) == pytest.approx(1e40 * (n - 1) / n)


# Holm, floors, verdict ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.9, 0.7, 0.6], [1.0, 1.0, 1.0, 1.0]),
        ([0.0078125] * 4, [0.03125] * 4),
        ([0.02], [0.02]),
        ([0.1, None], [None, None]),
    ],
)
def test_holm_by_hand(p_values, corrected):
    """Sorted, times 4, 3, 2, 1 and never falling, at most 1; where one is missing there is no correction."""
    assert bench.holm(p_values) == corrected


def test_floors_equal_the_plain_loops():
    """Training mean, last position and linear fit of a built-in track at full size, in this order."""
    expected = plain_loop.floors(*plain_loop.make_data(5))
    found = bench.floors(bench.build_dataset(bench.Config(), 5))
    assert found == pytest.approx(expected, abs=1e-10)
    assert list(found) == ["predict_mean", "repeat_last", "linear"]


def floors_of(folder, body):
    """Return the floors of a track whose make() has this body; rng is the split's own."""
    text = "import numpy as np\ndef make(seed, split):\n    rng = np.random.default_rng([seed, len(split)])\n"
    (folder / "own.py").write_text(text + "".join(f"    {line}\n" for line in body.splitlines()))
    return bench.floors(bench.build_dataset(bench.Config(track=str(folder / "own.py")), 0))


def test_linear_floor_finds_a_line_and_its_constant(tmp_path):
    """A target that is linear in all tokens with an offset is predicted to rounding; one that is a product is not."""
    make = "x = rng.normal(size=(90, 4, 2)) + 7\n"
    assert floors_of(tmp_path, make + "return x, x.reshape(90, 8) @ np.arange(1, 9) - 40")["linear"] < 1e-20
    (tmp_path / "other").mkdir()
    assert floors_of(tmp_path / "other", make + "return x, (x[:, 0, 0] - 7) * (x[:, 1, 1] - 7)")["linear"] > 0.5


@pytest.mark.parametrize(("size", "seen"), [(1e-9, False), (1e-5, True)])
def test_linear_floor_ignores_directions_that_are_rounding(tmp_path, size, seen):
    """Singular values below 1e-7 of the largest are left out: a target that hides there is not found, above it is."""
    body = f"""a, b = rng.normal(size=(2, 200, 2))
x = np.stack([a, a + {size} * b], axis=2)
return x, b[:, 0]"""
    linear = floors_of(tmp_path, body)["linear"]
    assert linear < 1e-3 if seen else linear > 0.9


def test_linear_floor_of_fewer_sequences_than_unknowns_is_the_shortest_fit(tmp_path):
    """Constant channels and too few sequences leave the fit open: it is that of the pseudoinverse."""
    body = "x = rng.normal(size=(9, 6, 3))\nx[..., 1] = 0.1\nreturn x, x[:, 0, 0]"
    found, data = floors_of(tmp_path, body), bench.build_dataset(bench.Config(track=str(tmp_path / "own.py")), 0)
    (x, y), (x_test, y_test) = (data.raw[split] for split in ("train", "test"))
    mean, std = x.mean((0, 1)), np.array([x[..., 0].std(), 1, x[..., 2].std()])
    design, other = (np.c_[((a - mean) / std).reshape(9, -1), np.ones(9)] for a in (x, x_test))
    error = other @ np.linalg.pinv(design, rcond=1e-7) @ (y - y.mean()) - (y_test - y.mean())
    assert found["linear"] == pytest.approx(np.mean(error**2) / y.var(), rel=1e-8)
    assert found["linear"] > 1e-3


def test_floors_are_those_of_float64_whatever_trains():
    """The floors need no network, and so do not lose digits with --dtype float32."""
    configs = [bench.Config(sizes=(60, 30, 10), dtype=dtype) for dtype in ("float64", "float32")]
    one, other = (bench.floors(bench.build_dataset(config, 0)) for config in configs)
    assert one == other


SIGNS = {"better": [-3, -1, -2, -5, -2, -4, -1, -6], "worse": [3, 1, 2, 5, 2, 4, 1, 6]}


@pytest.mark.parametrize("word", SIGNS)
def test_verdict_is_better_or_worse_only_where_significant(word):
    """p < 0.05, of the configured significance: at p itself nothing is called better or worse."""
    pairs = pairs_of(SIGNS[word])
    assert 0 < pairs.p_value < 0.05
    assert bench.verdict(pairs, range(8)) == f"idea {word} (significant)"
    for significance, judged in ((pairs.p_value, False), (math.nextafter(pairs.p_value, 1), True)):
        strict = pairs_of(SIGNS[word], bench.Config(significance=significance))
        assert (bench.verdict(strict, range(8)) != "no significant difference") == judged


@pytest.mark.parametrize("d", [[3, -1, 2, 5, -2, 4, 1, 6], [-3, 1, -2, -5, 2, -4, -1, -6], [1, -1], [5]])
def test_without_significance_nothing_is_better_or_worse(d):
    """22/256, a mean of 0, one pair: no significant difference, whatever the sign."""
    assert bench.verdict(pairs_of(d), range(len(d))) == "no significant difference"


def test_no_difference_is_where_all_pairs_are_equal():
    """Not where the differences cancel."""
    assert bench.verdict(pairs_of([0] * 8), range(8)) == "no difference"
    assert bench.verdict(pairs_of([1, -1, 0]), range(3)) == "no significant difference"


def test_two_models_worse_than_the_training_mean_are_not_judged():
    """Both means above predict_mean: no winner; one at or below it, or no floor known: the usual verdict."""
    pairs = bench.Pairs([2.0] * 8, [1.5] * 8, CONFIG)
    not_judged = bench.verdict(pairs, range(8), 1.4999999999)
    assert not_judged.startswith("not judged: ") and "predicting the mean" in not_judged
    for floor in (1.5, 1.7, 3.0, None):
        assert bench.verdict(pairs, range(8), floor) == "idea better (significant)"
    assert bench.verdict(bench.Pairs([1.5] * 8, [2.0] * 8, CONFIG), range(8), 1.7) == "idea worse (significant)"
    assert bench.verdict(bench.Pairs([1.5] * 8, [1.5] * 8, CONFIG), range(8), 1.0) == not_judged


def test_diverged_seeds_of_both_arms_are_named():
    """Before anything else is said of them."""
    pairs = bench.Pairs([None, 0.1, None], [9.0, None, 9.0], CONFIG)
    found = bench.verdict(pairs, range(4, 7), 0.5)
    assert found == "not judged: baseline diverged at seed 4, 6; idea diverged at seed 5"


# End to end -----------------------------------------------------------------------------------------------------------

BLIND = """import torch
class Blind(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.sight = float(h == 0)
    def forward(self, tokens):
        return tokens * self.sight
"""


@pytest.fixture(scope="module")
def blind_studies(tmp_path_factory):
    """Report and log of 41 and of 20 pairs in which the idea hides the tokens and so loses every one."""
    folder, found = tmp_path_factory.mktemp("blind"), {}
    (folder / "idea.py").write_text(BLIND)
    track = "import numpy as np\ndef make(seed, split):\n    x = np.random.default_rng([seed, len(split)])"
    (folder / "own.py").write_text(f"{track}.normal(size=(40, 2, 1))\n    return x, x[:, -1, 0]\n")
    options = f"--epochs 6 --lrs 0.05 --hidden 3 --batch 8 --jobs 1 --quiet --resume --out-dir {folder}"
    files = f"--track {folder}/own.py --idea {folder}/idea.py:Blind"
    for n in (41, 20):
        assert bench.main([*options.split(), *files.split(), "--seeds", str(n)]) == 0
        log = (folder / bench.OUTPUT).read_text()
        found[n] = json.loads((folder / bench.REPORT).read_text()), log[: log.index("\n{\n")]
    return found


@pytest.mark.parametrize("n", [20, 41])
def test_many_pairs_end_to_end(blind_studies, n):
    """Where every pair is lost, p = 2/2^n, unrounded, and nothing in the log says p = 0.

    Above 40 pairs sentences use (hits + 1) / (flips + 1), here 1/20001.
    """
    report, log = blind_studies[n]
    scores = report["baseline"]["full"]["per_seed"], report["idea"]["per_seed"]
    first, second = ([int(Decimal(repr(x)).scaleb(10)) for x in own] for own in scores)
    d = [b - a for a, b in zip(first, second, strict=True)]
    assert len(d) == n and min(d) > 0
    assert report["comparison"]["verdict"] == "idea worse (significant)"
    assert report["comparison"]["delta_mean"] == printed(Fraction(sum(d), n))
    block = report["extensions"]["statistics"]
    assert block["p_exact"] == (2 / 2**n if n <= 40 else None) and block["p_floor"] == 2 / 2**n
    assert block["interval_coverage"] == 0.95 and block["share_won"] == 0
    assert block["interval_95"][0] > 0
    assert block["reason_for_null"] == (None if n <= 40 else "more than 40 pairs")
    placebo = report["extensions"]["placebo"]
    assert placebo["versus_baseline"]["delta_mean"] == 0 and placebo["versus_idea"]["delta_mean"] < 0
    p = 2 / 2**n if n <= 40 else 1 / 20_001
    assert log.splitlines()[0].count(f"p = {p:.4g}") == 2  # of the idea, and of the placebo against it
    assert not re.search(r"\bp (= )?0(?![.\d])", log)
