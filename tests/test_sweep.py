"""Sweep and pairs: which configuration wins, on which seeds, and how the grid of --lrs auto grows.

A backend with hand-made scores stands in for the training; what the report says of the choice comes from real runs on a
track of 24 short sequences, whose validation split contradicts its test split.
"""

import dataclasses
import itertools
import json

import numpy as np
import pytest

import stage2_bench as bench

DEFAULT = bench.Config()
H, STACK = (0.08,), (0.02, 0.08, 0.32)
ZERO = {1: (0.0,), 3: (0.0, 0.0, 0.0)}  # the placebo's steps, by depth


class Backend:
    """Trains nothing: a run scores what `score(run)` says, its validation what `validation(run)` says (by default the
    opposite, so that a choice by validation is always the wrong one); notes what it was asked for."""

    def __init__(self, score, validation=None):
        self.score = score
        self.validation = validation or (lambda run: None if score(run) is None else 10 - score(run))
        self.asked, self.probed = [], []

    def train(self, runs):
        self.asked.append(list(runs))
        empty = np.zeros(1)
        return {
            run: bench.Record(
                self.score(run),
                self.validation(run),
                bench.State(16, empty, empty, empty, self.score(run) is not None, {16: self.score(run)}),
                3585 + 24 * len(run.h or ()),
            )
            for run in runs
        }

    def probe(self, found):
        self.probed += found
        return {run: {"of": run} for run in found}


def swept(score, config=DEFAULT, placebo=True, **changes):
    """Run the benchmark on hand-made scores; returns (arms, backend)."""
    backend = Backend(score, changes.pop("validation", None))
    return bench.benchmark(dataclasses.replace(config, **changes), backend, placebo), backend


def by_rate(table, **others):
    """Return a score that depends on the rate alone; a keyword gives an arm a table of its own."""

    def score(run):
        name = "baseline" if run.h is None else "idea" if any(run.h) else "placebo"
        return others.get(name, table)[run.lr]

    return score


# The choice -----------------------------------------------------------------------------------------------------------


def test_the_best_rate_is_the_one_with_the_lowest_test_mse():
    """Each arm has its own best rate, by the test MSE; validation, which says the opposite, is only reported."""
    first, second, third = ({0.0015: a, 0.003: b, 0.006: c} for a, b, c in ((3, 1, 2), (2, 3, 1), (1, 2, 3)))
    arms, _ = swept(by_rate(first, idea=second, placebo=third))
    assert {name: arm.best for name, arm in arms.items()} == {
        "baseline": (0.003, None),
        "idea": (0.006, H),
        "placebo": (0.0015, ZERO[1]),
    }
    assert arms["baseline"].means == (3, 1, 2) and arms["baseline"].validation == (7, 9, 8)
    assert arms["baseline"].grid == ((0.0015, None), (0.003, None), (0.006, None))


def test_the_sweep_looks_at_the_first_seeds_only():
    """The later seeds, on which another rate is far better, are trained at the winner alone and change no mean."""
    table = {0.0015: 0.3, 0.003: 0.1, 0.006: 0.2}

    def score(run):
        return table[run.lr] + run.seed / 1000 if run.seed < 11 else 10 * (0.0065 - run.lr)

    arms, backend = swept(score, seeds=tuple(range(8, 16)), sweep_seeds=3)
    baseline = arms["baseline"]
    assert baseline.means == (0.309, 0.109, 0.209)
    assert baseline.scores == [0.108, 0.109, 0.11] + [0.035] * 5
    trained = set(itertools.chain(*backend.asked))
    wanted = {(s, lr, h) for s in range(8, 11) for lr in table for h in (None, H, ZERO[1])}
    wanted |= {(s, 0.003, h) for s in range(8, 16) for h in (None, H, ZERO[1])}
    assert {(run.seed, run.lr, run.h) for run in trained} == wanted


def test_every_pair_is_at_each_arms_own_best():
    """Records and probes stand in the order of the seeds; the placebo is trained, but nothing is measured of it."""
    arms, backend = swept(by_rate({0.0015: 3, 0.003: 1, 0.006: 2}, idea={0.0015: 3, 0.003: 2, 0.006: 1}))
    assert [probe["of"] for probe in arms["baseline"].probes] == [bench.Run(s, 0.003, None) for s in range(8)]
    assert [probe["of"] for probe in arms["idea"].probes] == [bench.Run(s, 0.006, H) for s in range(8)]
    assert {run.h for run in backend.probed} == {None, H}
    assert [len(arm.records) for arm in arms.values()] == [8, 8, 8]


@pytest.mark.parametrize("grid", list(itertools.permutations((0.0015, 0.003, 0.006))))
def test_the_smaller_rate_wins_a_tie(grid):
    """In whatever order the rates were given."""
    arms, _ = swept(by_rate({0.0015: 2, 0.003: 1, 0.006: 1}), lrs=grid)
    assert {arm.best[0] for arm in arms.values()} == {0.003}


def test_a_tie_is_one_of_printed_scores():
    """Means are of ten decimals: what is lower in the eleventh is no better; an exact half goes to the even digit."""
    tied = {0.0015: 0.10000000004, 0.003: 0.1, 0.006: 0.2}
    assert swept(by_rate(tied))[0]["baseline"].best == (0.0015, None)
    scores = iter(itertools.cycle((0.0000000001, 0.0000000002)))
    table = {seed: next(scores) for seed in range(8)}
    means = swept(lambda run: table[run.seed], sweep_seeds=2)[0]["baseline"].means
    assert means == (2e-10,) * 3  # 1.5 units of 1e-10


def test_the_idea_chooses_among_rates_and_steps_together():
    """With several h the best row is the best pair of both; the smaller h wins a tie."""
    usual, other = {0.0015: 5, 0.003: 3, 0.006: 4}, {0.0015: 2, 0.003: 7, 0.006: 6}
    arms, _ = swept(lambda run: (other if run.h == (0.16,) else usual)[run.lr], hs=(H, (0.16,)))
    assert arms["idea"].best == (0.0015, (0.16,)) and len(arms["idea"].grid) == 6
    assert arms["baseline"].best == (0.003, None) and len(arms["baseline"].grid) == 3
    arms, _ = swept(lambda run: 1.0, hs=((0.16,), H))
    assert arms["idea"].best == (0.0015, H)


# Diverged -------------------------------------------------------------------------------------------------------------


def test_a_diverged_rate_never_wins():
    """1e-2 diverges, 1e-3 scores .5, 1e-1 scores .4: 1e-1 wins."""
    arms, _ = swept(by_rate({1e-2: None, 1e-3: 0.5, 1e-1: 0.4}), lrs=(1e-2, 1e-3, 1e-1))
    for arm in arms.values():
        assert arm.best[0] == 1e-1
        assert arm.means == (float("inf"), 0.5, 0.4)


def test_a_rate_that_diverged_on_one_seed_is_not_averaged_over_the_rest():
    """However good its other seeds are; the seed is named, and validation has no mean either."""
    table = {0.0015: 0.3, 0.003: 0.2, 0.006: 0.001}
    arms, _ = swept(lambda run: None if run.lr == 0.006 and run.seed == 2 else table[run.lr])
    for arm in arms.values():
        assert arm.best[0] == 0.003
        assert arm.means == (0.3, 0.2, float("inf"))
        assert arm.validation[2] == float("inf")
        assert arm.lost == ((), (), (2,))


def test_a_later_seed_that_diverges_leaves_the_choice_alone():
    """The pair has no score, and the sweep is what it was."""
    arms, _ = swept(lambda run: None if run.seed == 6 else {0.0015: 3, 0.003: 1, 0.006: 2}[run.lr])
    assert arms["idea"].best == (0.003, H) and arms["idea"].lost == ((), (), ())
    assert arms["idea"].scores == [1, 1, 1, 1, 1, 1, None, 1]


def test_where_everything_diverged_the_smallest_rate_stands_for_the_arm():
    """There is still a configuration to report, and no score."""
    arms, _ = swept(lambda run: None, lrs=(0.003, 0.0015))
    assert {name: arm.best[0] for name, arm in arms.items()} == dict.fromkeys(arms, 0.0015)
    assert arms["baseline"].scores == [None] * 8


# Edges ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations((1e-2, 1e-4, 1e-3))))
def test_an_edge_is_one_of_the_numbers_and_not_of_their_order(order):
    """Rates 1e-2, 1e-4, 1e-3 scoring .3, .5, .2: 1e-3 wins and is no edge."""
    arms, _ = swept(by_rate({1e-2: 0.3, 1e-4: 0.5, 1e-3: 0.2}), lrs=order)
    assert arms["baseline"].best[0] == 1e-3
    assert bench.edge(1e-3, order) is None
    assert bench.edge(1e-4, order) == "lower" and bench.edge(1e-2, order) == "upper"
    assert bench.edge(1e-3, [1e-3]) == "only"


# --lrs auto -----------------------------------------------------------------------------------------------------------


def every(rates):
    """Return the same rates for all three arms."""
    return {name: list(rates) for name in bench.ARMS}


def grown(score, **changes):
    """Return (the final rates of each arm, and those that each round added)."""
    arms, backend = swept(score, lr_search="auto", **changes)
    rounds, known = [], set()
    for asked in backend.asked:
        rounds.append(sorted({run.lr for run in asked} - known))
        known |= set(rounds[-1])
    return {name: [lr for lr, h in arm.grid if h == arm.grid[0][1]] for name, arm in arms.items()}, rounds


def test_the_grid_grows_upwards_by_three_at_the_most():
    """A larger rate is always better: 0.012, 0.024, 0.048, one a round, and then no more; all arms have all of them."""
    rates, rounds = grown(lambda run: 1 - run.lr)
    assert rates == every([0.0015, 0.003, 0.006, 0.012, 0.024, 0.048])
    assert rounds == [[0.0015, 0.003, 0.006], [0.012], [0.024], [0.048], []]


def test_the_grid_grows_downwards_by_three_at_the_most():
    """A smaller rate is always better: halves, in ascending order in the report."""
    rates, _ = grown(lambda run: run.lr)
    assert rates == every([0.0015 / 8, 0.0015 / 4, 0.0015 / 2, 0.0015, 0.003, 0.006])


@pytest.mark.parametrize(("best", "last"), [(0.003, 0.006), (0.006, 0.012), (0.012, 0.024), (0.024, 0.048)])
def test_the_grid_stops_as_soon_as_the_best_rate_is_inside(best, last):
    """One rate beyond the best one, and none where the best is inside from the start."""
    rates, _ = grown(lambda run: abs(run.lr - best))
    assert {max(own) for own in rates.values()} == {last} and {min(own) for own in rates.values()} == {0.0015}


def test_both_edges_grow_in_one_round():
    """Where baseline and idea are best at different edges, both sides get a rate in the same round: nine at the end."""
    rates, rounds = grown(lambda run: run.lr if run.h is None else 1 - run.lr)
    assert rounds[1:4] == [[0.00075, 0.012], [0.000375, 0.024], [0.0001875, 0.048]]
    assert [len(own) for own in rates.values()] == [9, 9, 9]
    rates, rounds = grown(lambda run: 1 - run.lr if run.h is None else run.lr)
    assert rounds[1] == [0.00075, 0.012] and len(rates["idea"]) == 9


@pytest.mark.parametrize("arm", ["baseline", "idea"])
def test_one_arm_at_an_edge_is_enough(arm):
    """The grid is common: it grows for all, whichever of baseline and idea is at the edge."""

    def score(run):
        return 1 - run.lr if (run.h is None) == (arm == "baseline") and run.h != ZERO[1] else abs(run.lr - 0.003)

    assert grown(score)[0] == every([0.0015, 0.003, 0.006, 0.012, 0.024, 0.048])


def test_the_placebos_edge_does_not_count():
    """It is not judged, and so asks for no rates."""
    rates, _ = grown(lambda run: 1 - run.lr if run.h == ZERO[1] else abs(run.lr - 0.003))
    assert rates == every([0.0015, 0.003, 0.006])


@pytest.mark.parametrize(("good", "grows"), [(0.08, False), (0.16, True)])
def test_an_idea_with_several_steps_has_the_rate_of_its_best_row(good, grows):
    """h = 0.08 is best inside, 0.16 at the edge: only where 0.16 is the better of the two does the grid grow."""

    def score(run):
        rest = 0 if run.h in (None, ZERO[1], (good,)) else 1
        return rest + (0.1 - run.lr if run.h == (0.16,) else abs(run.lr - 0.003))

    rates, _ = grown(score, hs=(H, (0.16,)))
    assert len(rates["baseline"]) == len(rates["idea"]) == (6 if grows else 3)


def test_a_rate_that_diverges_ends_the_growth():
    """0.012 diverges: 0.006 is then inside the grid, and the best."""
    rates, _ = grown(lambda run: None if run.lr > 0.006 else 1 - run.lr)
    assert max(rates["baseline"]) == 0.012


def test_the_growth_ends_where_everything_diverges():
    """Three smaller rates are tried, and that is all."""
    rates, _ = grown(lambda run: None)
    assert rates["idea"] == [0.0015 / 8, 0.0015 / 4, 0.0015 / 2, 0.0015, 0.003, 0.006]


def test_a_given_grid_stays_as_it_is():
    """Without auto the best rate may be at the edge, which the report says."""
    arms, backend = swept(lambda run: 1 - run.lr)
    assert arms["idea"].best == (0.006, H)
    assert {run.lr for asked in backend.asked for run in asked} == {0.0015, 0.003, 0.006}


# The placebo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("winner", "loser"), [(STACK, H), (H, STACK)])
def test_the_placebo_is_as_deep_as_the_winning_stack(winner, loser):
    """It has the winner's number of parameters, also where a placebo of the other depth scores better."""
    depth, other = len(winner), len(loser)

    def score(run):
        return {None: 5.0, winner: 1.0, loser: 2.0, ZERO[depth]: 4.0, ZERO[other]: 3.0}[run.h] + run.lr

    arms, _ = swept(score, hs=(H, STACK))
    assert arms["idea"].best[1] == winner
    assert arms["placebo"].grid == tuple((lr, ZERO[depth]) for lr in (0.0015, 0.003, 0.006))
    assert arms["placebo"].scores == [4.0015] * 8
    assert arms["placebo"].records[0].parameters == arms["idea"].records[0].parameters


def test_no_placebo_is_trained_where_none_is_wanted():
    """For an idea whose output does not depend on h it would be the idea again."""
    arms, backend = swept(lambda run: run.lr, placebo=False)
    assert list(arms) == ["baseline", "idea"]
    assert all(run.h in (None, H) for asked in backend.asked for run in asked)


# What the report says of the choice -----------------------------------------------------------------------------------

# Its validation targets are the negatives of what it trains and tests on: the better by test, the worse by validation.
CONTRARY = """
import numpy as np

def make(seed, split):
    rng = np.random.default_rng([seed, len(split)])
    tokens = rng.standard_normal((24, 8, 2))
    return tokens, tokens[:, -1, 0] * (-1 if split == "val" else 1)
"""

# The larger h, up to 1, the larger the tokens and the faster it learns; above 1 hardly anything gets through.
# Seed 1 is given NaN by "Fragile".
IDEAS = """
import torch

class Gain(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.h = h
    def forward(self, tokens):
        return tokens * (self.h if self.h <= 1 else 0.01)

class Fragile(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.gain = 1 + h + (float("nan") if torch.initial_seed() == 1 else 0)
    def forward(self, tokens):
        return tokens * self.gain
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Return a function: the report of an idea on the contrary track, run in this process with the given options."""
    base = tmp_path_factory.mktemp("selection")
    (base / "contrary.py").write_text(CONTRARY)
    (base / "ideas.py").write_text(IDEAS)

    def report(idea, *options):
        words = ["--track", base / "contrary.py", "--idea", f"{base / 'ideas.py'}:{idea}", "--out-dir", base / "out"]
        words += ["--epochs", 20, "--hidden", 4, "--seeds", 2, "--jobs", 1, "--quiet", *options]
        assert bench.main([str(word) for word in words]) == 0
        return json.loads((base / "out" / bench.REPORT).read_text())

    return report


def test_selection_says_what_validation_would_have_chosen(reported):
    """The larger rate learns more, and so is best by test and worst by validation, which disagrees."""
    report = reported("Gain", "--h", "1", "--lrs", "0.02", "0.005", "0.01")
    block = report["extensions"]["selection"]
    assert block["baseline"] == {
        "edge": "upper", "configurations": 3, "validation_choice": {"lr": 0.005, "h": None}, "agrees": False,
    }  # fmt: skip
    assert block["idea"] == block["baseline"] | {"h_edge": None, "validation_choice": {"lr": 0.005, "h": 1.0}}
    assert set(block["placebo"]) == {"edge", "configurations"}
    assert report["baseline"]["best_cfg"] == {"lr": 0.02, "h": None}
    assert report["best_idea_cfg"] == {"lr": 0.02, "h": 1.0}
    assert [row["cfg"]["lr"] for row in report["baseline"]["sweep"]] == [0.02, 0.005, 0.01]
    assert report["baseline"]["union_lr_grid"] == [0.02, 0.005, 0.01]


@pytest.mark.parametrize(
    ("steps", "edge"),
    [
        (("1",), None),
        (("1", "0.1", "0.3"), "upper"),
        (("1", "2", "3"), "lower"),
        (("2", "0.1", "1"), None),
        (("0.1", "1+1", "0.3"), None),
    ],
)
def test_selection_names_the_edge_of_h(reported, steps, edge):
    """Only where several single steps were swept and one of them wins; the idea has more configurations then."""
    report = reported("Gain", "--h", *steps, "--lrs", "0.02", "0.01", "--sweep-seeds", "1")
    best = report["best_idea_cfg"]["h"]
    assert best == ([1.0, 1.0] if "1+1" in steps else 1.0)
    block = report["extensions"]["selection"]
    assert block["idea"]["h_edge"] == edge
    assert [block[name]["configurations"] for name in bench.ARMS] == [2, 2 * len(steps), 2]


def test_selection_of_a_single_rate_is_its_only_one(reported):
    """Neither a lower nor an upper edge."""
    block = reported("Gain", "--lrs", "0.01")["extensions"]["selection"]
    assert {block[name]["edge"] for name in bench.ARMS} == {"only"}


def test_diverged_rows_are_flagged_with_their_seeds(reported):
    """The idea is NaN on seed 1 of three: its rows and the placebo's are named, the baseline's are sound; where all
    rows diverged, validation has no choice, and the pair has no score."""
    report = reported("Fragile", "--seeds", "3", "--lrs", "0.01", "0.02")
    flagged = report["extensions"]["flagged"]
    rows = [("idea", 0.08, lr) for lr in (0.01, 0.02)] + [("placebo", 0.0, lr) for lr in (0.01, 0.02)]
    assert flagged == [
        {"model": name, "cfg": {"lr": lr, "h": h}, "reason": "diverged", "diverged_seeds": [1]} for name, h, lr in rows
    ]
    assert [row["mean"] for row in report["idea_sweep"]] == [None, None]
    assert report["idea"]["per_seed"][1] is None and None not in report["baseline"]["full"]["per_seed"]
    assert report["comparison"]["verdict"] == "not judged: idea diverged at seed 1"
    chosen = report["extensions"]["selection"]["idea"]
    assert chosen["validation_choice"] is chosen["agrees"] is None
    sound = reported("Fragile", "--seeds", "3", "--sweep-seeds", "1", "--lrs", "0.01")
    assert sound["extensions"]["flagged"] == [] and sound["idea"]["per_seed"][1] is None


def test_rates_worse_than_predicting_the_mean_are_flagged(reported):
    """A rate of 1e6 stays finite, loses, and is named with its reason; 1e200 diverges."""
    report = reported("Gain", "--h", "1", "--lrs", "0.02", "1e6", "1e200")
    found = {name: [] for name in bench.ARMS}
    for row in report["extensions"]["flagged"]:
        found[row["model"]].append((row["cfg"]["lr"], row["reason"], row["diverged_seeds"]))
    wrong = [(1e6, "worse than predicting the mean", []), (1e200, "diverged", [0, 1])]
    assert found["baseline"] == found["idea"] == wrong
    assert report["baseline"]["best_cfg"]["lr"] == report["best_idea_cfg"]["lr"] == 0.02
    floor = report["extensions"]["floors"]["predict_mean"]["mean"]
    assert [row["mean"] is None or row["mean"] > floor for row in report["idea_sweep"]] == [False, True, True]


def test_auto_puts_its_rates_into_every_sweep(reported):
    """The union grid and all three sweeps have the final rates, ascending, and the options say how they were found."""
    report = reported("Gain", "--h", "1", "--lrs", "auto", "--sweep-seeds", "1")
    rates = [0.0015, 0.003, 0.006, 0.012, 0.024, 0.048]
    assert report["baseline"]["union_lr_grid"] == rates
    for sweep in (report["baseline"]["sweep"], report["idea_sweep"], report["extensions"]["placebo"]["sweep"]):
        assert [row["cfg"]["lr"] for row in sweep] == rates
    assert report["extensions"]["options"]["lr_search"] == "auto"
