"""The log, the verdict in words, the stage-2 answer and the figure say what the report's numbers say.

Every sentence has its case: a copy of the committed report, edited until just that sentence applies.
"""

import copy
import itertools
import json
import re
import shlex
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg

import stage2_bench as bench

ROOT = Path(bench.__file__).parent
COMMITTED = json.loads((ROOT / bench.REPORT).read_text())
OUTPUT = (ROOT / bench.OUTPUT).read_text()
CONFIG = bench.Config()


def changed(report, changes):
    """Return a copy of a report with {"dotted.path": value} put in; numbers in a path count list items."""
    report = copy.deepcopy(report)
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        block = report
        for part in parents:
            block = block[part]
        block[last] = copy.deepcopy(value)
    return report


def four(value):
    """Write a number with four significant digits."""
    return f"{value:.4g}"


# Nothing more to be said: better than every floor, done with learning, best rates inside the grid.
NEUTRAL = changed(
    COMMITTED,
    {
        "extensions.floors.linear.mean": 0.5,
        "extensions.floors.best": "repeat_last",
        "extensions.still_learning": {"baseline": False, "idea": False, "placebo": False},
        "extensions.selection.baseline.edge": None,
        "extensions.selection.idea.edge": None,
    },
)
TIE = {
    "comparison.verdict": "no significant difference",
    "comparison.p_value": 0.4,
    "extensions.statistics.p_exact": 0.4,
}
LOOP = "extensions.rollout.2"  # horizon 16
AGREES = {"extensions.rollout.0.p_holm": 0.9}  # with a verdict that is none; horizon 1 is significant else
OTHERWISE = {f"{LOOP}.baseline": 0.8, f"{LOOP}.idea": 0.7, f"{LOOP}.p_holm": 0.0123}

CASES = {  # what is changed, and what the one sentence then says, in its order
    "worse than the linear fit": (
        {"extensions.floors.linear.mean": 0.0001697728, "extensions.floors.best": "linear"},
        ["both models are worse", "linear", "0.0001698", four(0.0010516916 / 0.0001697728)],
    ),
    "worse than two floors": (
        {
            "extensions.floors.linear.mean": 0.0005,
            "extensions.floors.repeat_last.mean": 0.0004,
        },
        ["both models are worse", "repeating the last", "0.0004", "2.629", "linear", "0.0005", "2.103"],
    ),
    "baseline still learning": (
        {"extensions.still_learning.baseline": True},
        ["still learning", "8", "16", "baseline's", f"{0.001006648 / 0.0022916548:.2f}"],
    ),
    "idea still learning": (
        {"extensions.still_learning.idea": True},
        ["still learning", "8", "16", "idea's", "0.48"],
    ),
    "lower edge": ({"extensions.selection.idea.edge": "lower"}, ["best rate", "lower edge", "idea's", "--lrs auto"]),
    "upper edge": ({"extensions.selection.baseline.edge": "upper"}, ["best rate", "upper edge", "baseline's"]),
    "one rate": (
        {"extensions.selection.baseline.edge": "only", "extensions.selection.idea.edge": "only"},
        ["one learning rate"],
    ),
    "edge of h": ({"extensions.selection.idea.h_edge": "upper"}, ["step h", "upper edge"]),
    "one test set": ({"extensions.data.distinct_test_sets": 1}, ["one test set", "initialisation and batch order"]),
    "few test sets": ({"extensions.data.distinct_test_sets": 3}, ["3 different test sets", "8 seeds"]),
    "overlap": ({"extensions.data.test_in_train": 0.125}, ["train and test overlap", "12.5 %"]),
    "exact p alone significant": (
        TIE | AGREES | {"comparison.p_value": 0.0512, "extensions.statistics.p_exact": 0.0469},
        ["exact and sampled p disagree", "0.0469", "0.0512"],
    ),
    "sampled p alone significant": (
        {"comparison.p_value": 0.0499, "extensions.statistics.p_exact": 0.05},
        ["exact and sampled p disagree", "0.05", "0.0499"],
    ),
    "closed loop the other way": (OTHERWISE, ["closed loop says otherwise", "16", "better", "0.7", "0.8", "0.0123"]),
    "closed loop finds what the test does not": (
        TIE | AGREES | {f"{LOOP}.baseline": 0.7, f"{LOOP}.idea": 0.8, f"{LOOP}.p_holm": 0.0123},
        ["closed loop says otherwise", "16", "worse", "0.8", "0.7", "0.0123"],
    ),
    "unequal configurations": (
        {"extensions.selection.idea.configurations": 9},
        ["idea's", "9 configurations", "baseline's", "3"],
    ),
    "more parameters": ({"parameter_parity.idea": 3765}, ["5.02 % more parameters", "3765", "3585"]),
    "fewer parameters": ({"parameter_parity.idea": 3405}, ["5.02 % fewer parameters", "3405", "3585"]),
}
ORDER = ["worse than the linear fit", "idea still learning", "upper edge", "one test set", "overlap"]  # by weight
ORDER += ["exact p alone significant", "closed loop finds what the test does not", "unequal configurations"]
ORDER += ["more parameters"]
EVERYTHING = dict(itertools.chain(*(CASES[case][0].items() for case in ORDER))) | CASES["exact p alone significant"][0]


def said(report):
    """Return the sentences of what the verdict hangs on."""
    return [sentence for _, sentence in bench.caveats(report, CONFIG)]


@pytest.mark.parametrize("case", CASES)
def test_a_sentence_is_said_where_it_applies(case):
    """It stands once in the verdict and once in the limitations, with its numbers, and alone."""
    changes, words = CASES[case]
    report = changed(NEUTRAL, changes)
    (sentence,) = said(report)
    assert re.search(".*".join(map(re.escape, words)), sentence, re.IGNORECASE), sentence
    assert bench.verdict_sentence(report, CONFIG).count(sentence) == 1
    assert bench.limitations(report, CONFIG).count(sentence) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"extensions.floors.linear.mean": 0.0012},  # between the two models
        {"extensions.still_learning.placebo": True},
        {"extensions.still_learning.baseline": None, "extensions.still_learning.idea": None},  # one epoch
        {"extensions.selection.placebo.edge": "upper"},
        {"parameter_parity.idea": 3764},  # 4.99 % more
        {"parameter_parity": {"baseline": 3600, "idea": 3780}},  # 5 %, not more
        {"parameter_parity.idea": 3406},  # 4.99 % fewer
        {f"{LOOP}.baseline": 0.7, f"{LOOP}.idea": 0.8, f"{LOOP}.p_holm": 0.001},  # worse, as the verdict says
        OTHERWISE | {f"{LOOP}.p_holm": 0.05},
        OTHERWISE | AGREES | {"comparison.verdict": "idea better (significant)"},
        OTHERWISE | {"comparison.verdict": "not judged: idea diverged at seed 3"},
        {f"{LOOP}.{name}": None for name in ("baseline", "idea", "p_exact", "p_holm")},
        {"extensions.rollout": None},
        {"extensions.floors.repeat_last": None},  # several targets
        {"extensions.statistics.p_exact": None},  # more than 40 pairs
        {"comparison.p_value": 0.049, "extensions.statistics.p_exact": 0.001},
    ],
)
def test_nothing_is_said_where_nothing_applies(changes):
    """Near misses: the placebo's own edge, 4.99 % of parameters, a closed loop that agrees, what cannot be told."""
    assert said(changed(NEUTRAL, changes)) == []


def test_two_edges_two_floors_two_learners_are_all_named():
    """Edges on different sides are two sentences; models at the same one share it, with both shares of the error."""
    edges = {"extensions.selection.baseline.edge": "lower", "extensions.selection.idea.edge": "upper"}
    lower, upper = said(changed(NEUTRAL, edges))
    assert "lower" in lower and "baseline's" in lower and "idea's" not in lower
    assert "upper" in upper and "idea's" in upper and "baseline's" not in upper
    (both,) = said(
        changed(NEUTRAL, {"extensions.still_learning.baseline": True, "extensions.still_learning.idea": True})
    )
    assert re.search(r"baseline's.*0\.44.*idea's.*0\.48", both)


def test_the_verdict_comes_first_then_the_placebo_then_what_it_hangs_on():
    """All at once: the comparison with ratio, pairs and p; what the placebo shows; then each sentence in its order."""
    every = changed(NEUTRAL, EVERYTHING)
    sentence, found = bench.verdict_sentence(every, CONFIG), said(every)
    for case, one in zip(ORDER, found, strict=True):
        assert all(word.lower() in one.lower() for word in CASES[case][1]), (case, one)
    places = [sentence.index(part) for part in ("no significant difference", "placebo", *found)]
    assert places == sorted(places)
    assert sentence.startswith("On track dynamics: no significant difference")
    limits = bench.limitations(every, CONFIG)
    assert [one for one in limits if one in found] == found


def test_verdict_names_means_ratio_pairs_and_p():
    """Each to four digits: 0.001345 / 0.001052 = 1.279, 1 of 8 pairs, the exact p."""
    sentence = bench.verdict_sentence(NEUTRAL, CONFIG)
    head = sentence.partition(" The placebo")[0]
    assert head.startswith("On track dynamics: idea worse (significant)")
    assert re.search(r"idea\S* mean test MSE is 0\.001345\b.*baseline\S* 0\.001052\b.*1\.279 times", head)
    assert "1 of 8 pairs" in head and head.endswith("p = 0.01562.")


def test_without_significance_nothing_is_better_or_worse():
    """Neither in the verdict nor in the limitations, whatever the means are."""
    same = {
        f"extensions.placebo.versus_{name}.{p}": 0.3 for name in ("baseline", "idea") for p in ("p_exact", "p_value")
    }
    for verdict in ("no significant difference", "no difference"):
        report = changed(NEUTRAL, TIE | same | AGREES | {"comparison.verdict": verdict})
        words = " ".join([bench.verdict_sentence(report, CONFIG), *bench.limitations(report, CONFIG)])
        assert f"dynamics: {verdict}:" in words
        assert not re.search("better|worse|outperform|beats", words)


def test_worse_than_the_mean_is_not_judged_with_numbers():
    """Both means and that of predicting the mean are said; there is no winner, no p and no talk of the placebo."""
    verdict = "not judged: both models are worse than predicting the mean"
    means = {"baseline.full.mean": 1.23456, "idea.mean": 2.34567, "comparison.system_worked": False}
    report = changed(NEUTRAL, means | OTHERWISE | {"comparison.verdict": verdict})
    head = bench.verdict_sentence(report, CONFIG).partition(" Both models")[0]
    assert verdict in head and all(number in head for number in ("1.235", "2.346", "0.9715"))
    assert not re.search(r"placebo|pairs won|p = |better|significant", head)
    assert [sentence.count("times") for sentence in said(report)] == [3]  # of the three floors, and no closed loop
    answer = bench.build_answer(CONFIG, report)
    assert (answer["system_judged"], answer["practical_verdict"]) == (False, "neutral")


def test_a_diverged_pair_is_not_judged():
    """The seeds are named, the lost mean is n/a, the placebo is not interpreted."""
    lost = {"idea.mean": None, "idea.std": None, "comparison.verdict": "not judged: idea diverged at seed 2, 5"}
    lost |= {"comparison.p_value": None, "comparison.delta_mean": None, "extensions.statistics.p_exact": None}
    lost |= {f"extensions.placebo.versus_idea.{key}": None for key in ("p_exact", "p_value", "delta_mean")}
    sentence = bench.verdict_sentence(changed(NEUTRAL, lost), CONFIG)
    assert "idea diverged at seed 2, 5" in sentence and "n/a" in sentence and "0.001052" in sentence
    assert "makes a difference" not in sentence and "no different" not in sentence and "p = " not in sentence


# ---------------------------------------------------------------------------------------------------------------------
# Placebo, p and limitations
# ---------------------------------------------------------------------------------------------------------------------


def placebo_words(report):
    """Return the verdict's sentence about the placebo."""
    (found,) = re.findall(r"The placebo .*?(?<!\d)\.(?= |$)", bench.verdict_sentence(report, CONFIG))
    return found


@pytest.mark.parametrize("sign, word", [(-1, "better than"), (1, "worse than")])
@pytest.mark.parametrize("differs_from_baseline", [False, True])
@pytest.mark.parametrize("differs_from_idea", [False, True])
def test_what_the_placebo_shows(differs_from_baseline, differs_from_idea, sign, word):
    """placebo - other < 0 is better, told only where p < 0.05; the operator matters where the idea differs from it."""
    changes = {}
    for name, differs, p in (("baseline", differs_from_baseline, 0.0211), ("idea", differs_from_idea, 0.0322)):
        changes |= {
            f"extensions.placebo.versus_{name}.delta_mean": sign * 0.0007,
            f"extensions.placebo.versus_{name}.p_exact": p if differs else 10 * p,
            f"extensions.placebo.versus_{name}.p_value": 0.5,  # the exact one decides
        }
    sentence = placebo_words(changed(NEUTRAL, changes))
    first = (
        f"{word} the baseline (p = 0.0211)" if differs_from_baseline else "no different from the baseline (p = 0.211)"
    )
    second = f"{word} the idea (p = 0.0322)" if differs_from_idea else "no different from the idea (p = 0.322)"
    assert first in sentence and second in sentence and sentence.index(first) < sentence.index(second)
    assert ("makes a difference" in sentence) == differs_from_idea == ("no sign" not in sentence)
    assert "kinetic operator" in sentence and four(COMMITTED["extensions"]["placebo"]["full"]["mean"]) in sentence


def test_the_placebo_of_an_own_layer_is_about_its_step():
    """Of a user's layer it says what h does, not what the kinetic operator does."""
    idea = {"file": "smoothing.py", "sha256": "0" * 64, "class": "Smoothing"}
    sentence = placebo_words(changed(NEUTRAL, {"extensions.options.idea": idea}))
    assert "step h" in sentence and "kinetic" not in sentence


def without_h():
    """Return a report of a user's layer whose output does not depend on h, and which has no signature."""
    nothing = {f"extensions.{key}": None for key in ("isolated_mechanism", "transport_confirmed", "knockout")}
    nothing |= {"mechanism_signature": None, "extensions.mechanism_untrained": None, "extensions.rollout": None}
    nothing |= {"extensions.selection.placebo": None, "extensions.still_learning.placebo": None}
    for i in range(len(COMMITTED["extensions"]["learning_curve"])):
        nothing |= {f"extensions.learning_curve.{i}.placebo": None}
        nothing |= {f"extensions.learning_curve.{i}.per_seed.placebo": None}
    nothing["extensions.placebo"] = {"reason": "the idea's output does not depend on h"}
    nothing["extensions.options.idea"] = {"file": "square.py", "sha256": "0" * 64, "class": "Square"}
    return changed(NEUTRAL, nothing | {"track": "walk", "model": "rnn_small_Square_vs_raw"})


def test_without_h_no_sentence_speaks_of_placebo_or_step():
    """{reason} alone: neither verdict nor limitations name a placebo, a knockout, an operator or the step h."""
    report = without_h()
    words = " ".join([bench.verdict_sentence(report, CONFIG), *bench.limitations(report, CONFIG)])
    assert not re.search("placebo|knockout|operator|step h|h = 0|attenuation", words)
    assert "no mechanism signature" in words
    parts = sections(bench.build_log(CONFIG, report))
    assert {line.split()[0] for line in parts["Sweep"][1:]} == {"baseline", "idea"}
    assert not re.search("knockout|operator", " ".join(parts["Mechanism"]))


@pytest.mark.parametrize(
    "pairs, exact, expected",
    [(20, 2 / 2**20, "1.907e-06"), (40, 2 / 2**40, "1.819e-12"), (41, None, four(1 / 20_001))],
)
def test_no_sentence_says_that_p_is_0(pairs, exact, expected):
    """All differences of one sign: 2 / 2^n up to 40 pairs, (0 + 1) / (20,000 + 1) above (Davison and Hinkley 1997)."""
    zero = {"comparison.p_value": 0.0, "comparison.n_pairs": pairs, "extensions.statistics.p_exact": exact}
    for name in ("baseline", "idea"):
        zero |= {f"extensions.placebo.versus_{name}.p_value": 0.0, f"extensions.placebo.versus_{name}.p_exact": exact}
    report = changed(NEUTRAL, zero)
    sentence = bench.verdict_sentence(report, CONFIG)
    assert sentence.count(f"p = {expected}") == 3  # the pairs', and the placebo's two
    assert not re.search(r"\bp\S*( =| <)? 0(\.0*)?\b(?!\.)", bench.build_log(CONFIG, report))


def test_limitations_state_power_and_the_smallest_p():
    """What 80 % of repetitions would find, and the smallest p of the sign-flip test, 2 / 2^n, which five pairs cannot
    bring below 0.05."""
    numbers = {"extensions.statistics.detectable_difference": 0.00024908, "extensions.statistics.p_floor": 2 / 2**8}
    words = " ".join(bench.limitations(changed(NEUTRAL, numbers), CONFIG))
    assert re.search(r"difference smaller than 0\.0002491 .*80 %", words)
    assert "0.007812" in words and "cannot reach" not in words
    few = {"n_seeds": 5, "extensions.statistics.p_floor": 0.0625, "extensions.statistics.detectable_difference": None}
    words = " ".join(bench.limitations(changed(NEUTRAL, few), CONFIG))
    assert re.search(r"5 pairs cannot reach p < 0\.05.*0\.0625", words) and "80 %" not in words
    for n, said in ((40, "40 pairs: no exact p below 1.819e-12"), (41, "41 pairs: p is sampled, none below 5e-05")):
        many = {"n_seeds": n, "extensions.statistics.p_floor": 2 / 2**n, "extensions.data.distinct_test_sets": n}
        assert any(each.startswith(said) for each in bench.limitations(changed(NEUTRAL, many), CONFIG))


def test_limitations_of_the_experiment_and_the_mechanism():
    """Track, units and epochs; what validation would have chosen; that the attenuation is the same before training."""
    before = {"extensions.mechanism_untrained.observed_fourier_attenuation": 0.4712345}
    other = {"extensions.options.hidden": 17, "extensions.options.epochs": 5, "track": "lorenz"}
    quiet, loud = changed(NEUTRAL, before | other), {"extensions.selection.idea.agrees": False}
    limits = bench.limitations(quiet, CONFIG)
    assert "lorenz" in limits[0] and "17 units" in limits[0] and "5 epochs" in limits[0]
    assert re.search(r"attenuation is 0\.4869 after and 0\.4712 before training", " ".join(limits))
    (more,) = set(bench.limitations(changed(quiet, loud), CONFIG)) - set(limits)
    assert "validation" in more and "idea" in more and "baseline" not in more
    no_choice = {"extensions.selection.idea.validation_choice": None, "extensions.selection.idea.agrees": None}
    assert bench.limitations(changed(quiet, no_choice), CONFIG) == limits
    assert any("chosen by the test MSE" in sentence for sentence in limits)


# ---------------------------------------------------------------------------------------------------------------------
# Log
# ---------------------------------------------------------------------------------------------------------------------


def sections(log):
    """Return {first word of a section's title: its lines}."""
    blocks = [block.splitlines() for block in log.rstrip("\n").split("\n\n")]
    return {block[0].split()[0].rstrip(":"): block[1:] for block in blocks}


def row_of(lines, *words):
    """Return the cells behind the first words of the one line that begins with them."""
    (found,) = [line.split() for line in lines if line.split()[: len(words)] == list(words)]
    return found[len(words) :]


LOG = sections(bench.build_log(CONFIG, COMMITTED))


def test_committed_output_is_the_committed_reports():
    """stage2_output.txt begins with the log of bench_report.json, verdict first; behind it stand machine, versions and
    wall time, and last the answer as one JSON object; all in ASCII."""
    log, _, rest = OUTPUT.partition("\nMachine\n")
    assert log == bench.build_log(CONFIG, COMMITTED) and OUTPUT.isascii()
    assert log.startswith("Verdict: On track dynamics: idea worse (significant)")
    machine, _, answer = rest.partition("\nStage-2 answer\n")
    assert re.search(r"Python 3\.\d+.*torch \d.*numpy \d.*scipy \d", machine) and re.search(
        r"wall time [\d.]+ s", machine
    )
    assert json.loads(answer) == bench.build_answer(CONFIG, COMMITTED)
    assert answer.endswith("}\n") and "NaN" not in answer


def test_sections_stand_in_their_order():
    """Verdict, options, sweep, pairs, floors, learning curve, mechanism, closed loop, limitations."""
    tables = ["Sweep", "Pairs", "Floors", "Learning", "Mechanism", "Closed"]
    assert list(LOG) == ["Verdict", "Options", *tables, "Limitations"]


def test_numbers_for_a_person_have_four_digits():
    """Measured numbers have at most four significant digits; the report has all."""
    text = bench.build_log(CONFIG, COMMITTED)
    long = [
        n
        for n in re.findall(r"\d+\.?\d*(?:e-?\d+)?", text)
        if len(n.partition("e")[0].replace(".", "").lstrip("0")) > 4
    ]
    assert long == [] and len(re.findall(r"\d\.\d", text)) > 100


def test_sweep_table():
    """Every row of every arm with its mean; the best one and its edge; what was flagged; rates printed alike apart."""
    report = changed(
        COMMITTED,
        {
            "baseline.sweep": [
                {"cfg": {"lr": lr, "h": None}, "mean": mean}
                for lr, mean in ((0.0012, 0.31234567), (0.0014, 0.21234567), (0.003, None))
            ],
            "extensions.selection.baseline.edge": None,
            "extensions.selection.idea.edge": "upper",
            "extensions.selection.placebo.edge": "lower",
            "extensions.placebo.sweep.0.mean": 0.0001,
            "extensions.flagged": [
                {
                    "model": "baseline",
                    "cfg": {"lr": 0.003, "h": None},
                    "reason": "diverged",
                    "diverged_seeds": [1],
                },
                {
                    "model": "idea",
                    "cfg": {"lr": 0.0015, "h": 0.08},
                    "reason": "worse than predicting the mean",
                    "diverged_seeds": [],
                },
            ],
        },
    )
    _, *lines = sections(bench.build_log(CONFIG, report))["Sweep"]
    assert len(lines) == 9
    assert row_of(lines, "baseline", "0.0012", "null") == ["0.3123"]
    assert row_of(lines, "baseline", "0.0014", "null") == ["0.2123", "best"]
    assert row_of(lines, "baseline", "0.003", "null") == ["n/a", "diverged"]
    assert " ".join(row_of(lines, "idea", "0.0015", "0.08")) == "0.005194 worse than predicting the mean"
    best = [line for line in lines if "best" in line]
    assert [("upper" in line, "lower" in line) for line in best] == [(False, False), (True, False), (False, True)]
    assert best[1].split()[:3] == ["idea", "0.006", "0.08"] and best[2].split()[:3] == ["placebo", "0.0015", "0.0"]


def test_sweep_shows_how_the_grid_grew():
    """--lrs auto: the rates that it began with, and those that joined."""
    rates = [0.00075, *CONFIG.lrs, 0.012]
    grown = changed(COMMITTED, {"extensions.options.lr_search": "auto", "baseline.union_lr_grid": rates})
    last = sections(bench.build_log(CONFIG, grown))["Sweep"][-1]
    assert re.search(r"0\.0015, 0\.003, 0\.006.*0\.00075, 0\.012", last)
    still = sections(bench.build_log(CONFIG, changed(grown, {"baseline.union_lr_grid": list(CONFIG.lrs)})))["Sweep"][-1]
    assert "auto" in still and "0.012" not in still
    assert not any("auto" in line for line in LOG["Sweep"])


def paired(differences):
    """Return a report whose baseline scores 1 on every seed, and the lines of its seeds."""
    first = [None if d is None else 1.0 for d in differences]
    second = [None if d is None else 1.0 + d for d in differences]
    report = changed(COMMITTED, {"baseline.full.per_seed": first, "idea.per_seed": second})
    return sections(bench.build_log(CONFIG, report))["Pairs"][1:9]


def test_pairs_table():
    """Seed, baseline, idea, idea - baseline; then the statistics, each beside its name."""
    header, *lines = LOG["Pairs"]
    assert re.fullmatch(r"seed +baseline +idea +idea - baseline +better \| worse", header)
    first, second = COMMITTED["baseline"]["full"]["per_seed"], COMMITTED["idea"]["per_seed"]
    for seed, (a, b) in enumerate(zip(first, second, strict=True)):
        assert row_of(lines, str(seed))[:3] == [four(a), four(b), f"{b - a:+.4g}"]
    numbers = {"comparison.delta_mean": 0.000111, "comparison.p_value": 0.0222, "extensions.statistics.p_exact": 0.0333}
    numbers |= {"extensions.statistics.interval_95": [-0.000444, 0.000555]}
    numbers |= {"extensions.statistics.effect_size_dz": 0.666}
    last = sections(bench.build_log(CONFIG, changed(COMMITTED, numbers)))["Pairs"][-1]
    assert re.search(r"mean difference 0\.000111\b.*95 % interval \[-0\.000444, 0\.000555\]", last)
    assert re.search(r"sampled p 0\.0222\b.*exact p 0\.0333\b.*d_z 0\.666\b", last)


def test_bars_point_to_the_better_model():
    """A lower score of the idea draws '<' to the left of the middle, a higher one '>' to the right; lengths are in
    proportion, the smallest difference still shows, none draws nothing, and a lost pair says so."""
    lines = paired([-0.4, -0.2, -1e-6, 0.0, 1e-6, 0.2, 0.4, None])
    bars = [re.search(r"(<*)\|(>*)", line) for line in lines[:7]]
    left, right = [len(bar[1]) for bar in bars], [len(bar[2]) for bar in bars]
    assert left[3:] == right[:4] == [0] * 4
    assert left[:3] == right[6:3:-1] and left[2] == 1 and left[0] == 2 * left[1] > 4
    assert len({bar.end(1) for bar in bars}) == 1, "the middles are one column"
    assert lines[7].split() == ["7", "n/a", "n/a", "n/a", "diverged"]


def test_floors_table():
    """Each floor beside its name, the best one marked, and who is better than it."""
    marked = {"extensions.floors.best": "repeat_last", "extensions.floors.beaten_by": ["baseline", "placebo"]}
    lines = sections(bench.build_log(CONFIG, changed(COMMITTED, marked)))["Floors"]
    found = {word: next(line for line in lines if word in line) for word in ("mean", "repeat", "linear")}
    assert [re.search(r"[\d.]{4,}", line)[0] for line in found.values()] == ["0.9715", "0.006904", "0.0001698"]
    assert [line for line in lines[:3] if "best" in line] == [found["repeat"]]
    assert "baseline and placebo" in lines[-1] and "idea" not in lines[-1]
    assert "none" in LOG["Floors"][-1]


def test_learning_curve_table():
    """A line a checkpoint: baseline, idea, placebo, exact p; then who is still learning."""
    header, *lines = LOG["Learning"]
    assert header.split()[:4] == ["epoch", "baseline", "idea", "placebo"]
    for row in COMMITTED["extensions"]["learning_curve"]:
        expected = [four(row[key]) for key in ("baseline", "idea", "placebo", "p_exact")]
        assert row_of(lines, str(row["epoch"])) == expected
    learning = {"extensions.still_learning": {"baseline": False, "idea": None, "placebo": True}}
    last = sections(bench.build_log(CONFIG, changed(COMMITTED, learning)))["Learning"][-1]
    assert "still learning" in last and "placebo" in last and not re.search("baseline|idea", last)


def test_mechanism_table():
    """Predicted, observed, before training and relative error; whether confirmed; the operator alone; the knockout."""
    numbers = {
        "mechanism_signature.observed_fourier_attenuation": 0.4,
        "extensions.mechanism_untrained.observed_fourier_attenuation": 0.3,
        "mechanism_signature.confirmed": False,
        "extensions.isolated_mechanism.attenuation_max_relative_error": 0.0123,
        "extensions.isolated_mechanism.displacement_slope": 0.0789,
        "extensions.transport_confirmed": None,
        "extensions.knockout.mean": 0.00456,
        "extensions.knockout.ratio": 3.45,
    }
    lines = sections(bench.build_log(CONFIG, changed(COMMITTED, numbers)))["Mechanism"]
    header = lines[0]
    assert [header.index(word) for word in ("predicted", "observed", "before", "error")] == sorted(
        header.index(word) for word in ("predicted", "observed", "before", "error")
    )
    error = four(abs(0.4 - 0.4867523) / 0.4867523)
    assert row_of(lines, "fourier", "attenuation") == ["0.4868", "0.4", "0.3", error]
    assert row_of(lines, "transport", "displacement")[:2] == ["1.28", "-0.1084"]
    assert "not confirmed" in lines and "confirmed" in LOG["Mechanism"] and "not confirmed" not in LOG["Mechanism"]
    alone, knockout = (next(line for line in lines if line.startswith(word)) for word in ("operator", "knockout"))
    assert all(word in alone for word in ("0.0123", "0.0789", "h = 0.08", "not measurable"))
    for confirmed, words in ((True, "transport confirmed"), (False, "transport not confirmed")):
        log = bench.build_log(CONFIG, changed(COMMITTED, {"extensions.transport_confirmed": confirmed}))
        assert [line.endswith(words) for line in sections(log)["Mechanism"] if line.startswith("operator")] == [True]
    assert "0.00456" in knockout and "3.45 times" in knockout


def test_closed_loop_table():
    """A line a horizon: predicting the mean, repeating the last value, baseline, idea, exact p, Holm's p."""
    header, *lines = LOG["Closed"]
    assert re.fullmatch(r"horizon +predict mean +repeat last +baseline +idea +exact p +Holm p", header)
    for row in COMMITTED["extensions"]["rollout"]:
        keys = ("predict_mean", "floor", "baseline", "idea", "p_exact", "p_holm")
        assert row_of(lines, str(row["horizon"])) == [four(row[key]) for key in keys]
    (nothing,) = sections(bench.build_log(CONFIG, changed(COMMITTED, {"extensions.rollout": None})))["Closed"]
    assert "not" in nothing


def test_log_is_ascii_for_any_track():
    """A name of a user's file in other letters is escaped."""
    text = bench.build_log(CONFIG, changed(COMMITTED, {"track": "Fühler \u2192"}))
    assert text.isascii() and text.startswith("Verdict: On track F")


# ---------------------------------------------------------------------------------------------------------------------
# Answer
# ---------------------------------------------------------------------------------------------------------------------


def test_answer_keys_and_their_values():
    """Keys in their order; the metrics are the report's, delta is idea - baseline; worse and significant, mechanism
    confirmed: partial, harms."""
    answer = bench.build_answer(CONFIG, COMMITTED)
    keys = (
        "worked confidence verdict metrics how_to_run files limitations bench_report system_verdict practical_verdict"
    )
    assert list(answer) == [*keys.split(), "mechanism_ok", "system_judged"]
    first, second = (np.array(block["per_seed"]) for block in (COMMITTED["baseline"]["full"], COMMITTED["idea"]))
    metrics = answer["metrics"]
    keys = "baseline idea paired_delta permutation_p_value idea_wins n_pairs parameter_counts"
    assert list(metrics) == keys.split()
    found = [metrics[key] for key in keys.split()[:3]]
    assert found == pytest.approx([first.mean(), second.mean(), (second - first).mean()], abs=6e-11)
    assert (metrics["idea_wins"], metrics["n_pairs"]) == ((second < first).sum(), 8)
    assert metrics["permutation_p_value"] == COMMITTED["comparison"]["p_value"] == 0.01485
    assert metrics["parameter_counts"] == {"baseline": 3585, "idea": 3609}
    assert (answer["worked"], answer["confidence"], answer["mechanism_ok"]) == (False, 9, 1)
    assert (answer["system_verdict"], answer["practical_verdict"], answer["system_judged"]) == (
        "partial",
        "harms",
        True,
    )
    assert answer["verdict"] == bench.verdict_sentence(COMMITTED, CONFIG)
    assert answer["limitations"] == bench.limitations(COMMITTED, CONFIG)
    assert answer["files"] == ["stage2_bench.py", bench.REPORT, bench.OUTPUT]
    assert answer["bench_report"] == COMMITTED


@pytest.mark.parametrize(
    "verdict, confirmed, expected",
    [
        ("idea better (significant)", True, (True, "works", "helps", 1, True)),
        ("idea better (significant)", False, (True, "works", "helps", 0, True)),
        ("idea worse (significant)", True, (False, "partial", "harms", 1, True)),
        ("idea worse (significant)", False, (False, "fails", "harms", 0, True)),
        ("no significant difference", True, (False, "partial", "neutral", 1, True)),
        ("no significant difference", False, (False, "fails", "neutral", 0, True)),
        ("no difference", False, (False, "fails", "neutral", 0, True)),
        ("not judged: idea diverged at seed 1", True, (False, "partial", "neutral", 1, False)),
        ("not judged: both models are worse than predicting the mean", False, (False, "fails", "neutral", 0, False)),
        ("no significant difference", None, (False, "fails", "neutral", 0, True)),  # no signature
    ],
)
def test_answer_of_every_verdict(verdict, confirmed, expected):
    """works: better and significant; partial: not so, but the mechanism is confirmed; helps and harms only where
    significant."""
    changes = {"comparison.verdict": verdict, "comparison.system_worked": verdict == "idea better (significant)"}
    changes |= {"mechanism_signature": None} if confirmed is None else {"mechanism_signature.confirmed": confirmed}
    answer = bench.build_answer(CONFIG, changed(NEUTRAL, changes))
    keys = ("worked", "system_verdict", "practical_verdict", "mechanism_ok", "system_judged")
    assert tuple(answer[key] for key in keys) == expected
    assert [type(answer[key]) for key in keys] == [bool, str, str, int, bool]


def test_confidence_is_exact_in_tenths():
    """floor(10 (1 - p)) at p = 0.9 is 1 and at 0.7 is 3, whatever binary fractions say; without a p it is 0."""
    cases = {0.9: 1, 0.7: 3, 0.3: 7, 0.1: 9, 0.04965: 9, 1.0: 0, 0.0: 10}
    found = [bench.build_answer(CONFIG, changed(NEUTRAL, {"comparison.p_value": p}))["confidence"] for p in cases]
    assert found == list(cases.values())
    lost = {"comparison.p_value": None, "comparison.verdict": "not judged: idea diverged at seed 1", "idea.mean": None}
    assert bench.build_answer(CONFIG, changed(NEUTRAL, lost))["confidence"] == 0


def test_how_to_run_quotes_what_a_shell_would_split():
    """File names with blanks or quotes are one word each, without the folder that they lie in."""
    config = bench.Config(track="/home/me/my data.py", idea="/home/me/it's.py:Blur")
    assert shlex.split(bench.option_words(config)) == ["--track", "my data.py", "--idea", "it's.py:Blur"]


WALK = """
import numpy
def make(seed, split):
    rng = numpy.random.default_rng([seed, len(split)])
    walk = rng.standard_normal((30, 6, 2)).cumsum(1)
    return walk[:, :5], walk[:, 5, 0]
"""
BLUR = """
import torch
class Blur(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.h, self.share = h, torch.nn.Parameter(torch.ones(channels))
    def forward(self, u):
        return u + self.h * self.share * (u.roll(1, 1) - u)
"""


@pytest.mark.parametrize(
    "words",
    [
        "--track walk.py --idea blur.py:Blur --seeds 3:6 --sweep-seeds 2 --epochs 2 --hidden 5 --batch 16 "
        "--dtype float32 --lrs 0.01 1e-05 --h 0.5 0.25+1e-05 --plot figure.svg",
        "--track walk.py --seeds 2 --epochs 1 --lrs auto",
    ],
)
def test_how_to_run_runs_it_again(words, tmp_path, monkeypatch, capsys):
    """The command in the answer gives the same bytes; stdout is the log, without the answer; nothing names a folder of
    this machine; a plot without a folder lies beside the report."""
    monkeypatch.chdir(tmp_path)
    Path("walk.py").write_text(WALK)
    Path("blur.py").write_text(BLUR)
    common = ["--jobs", "1", "--quiet", "--out-dir"]
    assert bench.main([*words.split(), *common, str(tmp_path / "first")]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "first" / bench.OUTPUT).read_text()
    assert printed.startswith("Verdict: On track walk: ") and text.startswith(printed + "\nMachine\n")
    assert "Machine" not in printed and "{" not in printed
    answer = json.loads(text.partition("\nStage-2 answer\n")[2])
    assert str(tmp_path) not in text
    python, script, *options = shlex.split(answer["how_to_run"])
    assert (python, script) == ("python", "stage2_bench.py")
    assert bench.main([*options, *common, str(tmp_path / "second")]) == 0
    first, second = ((tmp_path / name / bench.REPORT).read_bytes() for name in ("first", "second"))
    assert first == second and json.loads(first) == answer["bench_report"]
    figure = tmp_path / "first" / "figure.svg"
    assert figure.exists() == ("--plot" in words) and (not figure.exists() or "learning rate" in figure.read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Figure
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def figure_of(tmp_path_factory):
    """Return a function that draws a report and returns matplotlib's figure, as it was saved, and the file."""
    folder = tmp_path_factory.mktemp("figures")
    count = itertools.count()

    def draw(report, suffix="svg"):
        saved, path = [], folder / f"{next(count)}.{suffix}"
        save = matplotlib.figure.Figure.savefig

        def spy(self, *args, **options):
            save(self, *args, **options)
            saved.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(matplotlib.figure.Figure, "savefig", spy)
            bench.draw(CONFIG, report, path)
        (figure,) = saved
        return figure, path

    return draw


@pytest.fixture(scope="module")
def committed(figure_of):
    """The committed report's figure, and its file."""
    return figure_of(COMMITTED)


@pytest.fixture(scope="module")
def crowded(figure_of):
    """The figure of eight step sizes, nine rates and every caveat, as a PNG, and its file."""
    rates = [0.0015 * 2**i for i in range(-3, 6)]
    steps = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, [0.02, 0.08]]
    every = EVERYTHING | {"extensions.selection.idea.edge": "lower", "extensions.selection.idea.h_edge": "upper"}
    every["baseline.union_lr_grid"] = rates
    every["baseline.sweep"] = [{"cfg": {"lr": lr, "h": None}, "mean": 0.01 / (1 + i)} for i, lr in enumerate(rates)]
    every["idea_sweep"] = [
        {"cfg": {"lr": lr, "h": h}, "mean": 0.01 * (2 + i) / (1 + j)}
        for (i, h), (j, lr) in itertools.product(enumerate(steps), enumerate(rates))
    ]
    return figure_of(changed(NEUTRAL, every), "png")


@pytest.fixture(scope="module")
def tied(figure_of):
    """The figure of a tie on seeds 8 to 15, of which the idea lost 11; the track's name looks like a formula."""
    changes = {"extensions.options.seeds": [8, 16], "idea.per_seed.3": None, "track": "a$b$c"}
    changes |= {"extensions.statistics.interval_95": [0.0001, 0.0005]}
    return figure_of(changed(NEUTRAL, TIE | AGREES | changes))


@pytest.fixture(scope="module")
def bare(figure_of):
    """The figure of a run in which every training diverged, on a user's track, with a layer without signature."""
    report = without_h()
    for block in (report["baseline"]["full"], report["idea"]):
        block |= {"mean": None, "std": None, "per_seed": [None] * 8}
    for row in (*report["baseline"]["sweep"], *report["idea_sweep"]):
        row["mean"] = None
    for row in report["extensions"]["learning_curve"]:
        row |= {"baseline": None, "idea": None, "p_exact": None}
    lost = {
        "comparison.verdict": "not judged: baseline diverged at seed 0",
        "comparison.delta_mean": None,
    }
    return figure_of(changed(report, lost | {"extensions.statistics.interval_95": None}), "pdf")


def panel(figure, word):
    """Return the axes whose title has a word."""
    (axes,) = [axes for axes in figure.axes if word in axes.get_title()]
    return axes


def line_of(axes, label):
    """Return the points [(x, y)] of the one line whose label begins so."""
    (line,) = [line for line in axes.lines if str(line.get_label()).startswith(label)]
    return list(zip(*(np.asarray(values, dtype=float).tolist() for values in line.get_data()), strict=True))


def ticks(axes):
    """Return the x ticks' places and labels."""
    return axes.get_xticks().tolist(), [label.get_text() for label in axes.get_xticklabels()]


def test_figure_has_six_panels_and_the_verdict(committed):
    """The title names model, track and verdict, and below what the verdict hangs on, in the verdict's order."""
    figure, _ = committed
    assert len(figure.axes) == 6
    title = figure.get_suptitle()
    assert "rnn_small_kinetic_vs_raw on dynamics: idea worse (significant)" in title
    tags = [tag for tag, _ in bench.caveats(COMMITTED, CONFIG)]
    assert len(tags) == 3 and [title.index(tag) for tag in tags] == sorted(title.index(tag) for tag in tags)


def test_figure_of_a_tie_calls_nothing_better_or_worse(tied):
    """Its title has the verdict's words alone; a $ in a name is no formula."""
    figure, path = tied
    assert "rnn_small_kinetic_vs_raw on a$b$c: no significant difference<" in path.read_text()
    assert not re.search("better|worse", figure.get_suptitle())


def test_sweep_panel(committed):
    """A line an arm through its printed means, ticks at the rates, and the floors as thin lines with their names."""
    axes = panel(committed[0], "Sweep")
    sweeps = {"baseline": COMMITTED["baseline"]["sweep"], "idea": COMMITTED["idea_sweep"]}
    sweeps["placebo"] = COMMITTED["extensions"]["placebo"]["sweep"]
    for name, sweep in sweeps.items():
        assert line_of(axes, name) == [(row["cfg"]["lr"], row["mean"]) for row in sweep]
    assert ticks(axes) == ([0.0015, 0.003, 0.006], ["0.0015", "0.003", "0.006"])
    assert axes.get_xlabel() == "learning rate" and "target variance = 1" in axes.get_ylabel()
    thin = {line.get_ydata()[0] for line in axes.lines if line.get_linewidth() < 1 and len(set(line.get_ydata())) == 1}
    floors = {
        name: COMMITTED["extensions"]["floors"][name]["mean"] for name in ("predict_mean", "repeat_last", "linear")
    }
    assert thin == set(floors.values())
    for word, floor in zip(("mean", "repeat", "linear"), floors.values(), strict=True):
        (text,) = [text for text in axes.texts if word in text.get_text()]
        assert text.xy[1] == floor


def test_sweep_panel_leaves_out_a_mean_of_zero(figure_of):
    """Logarithmic axes have no place for it."""
    figure, _ = figure_of(changed(COMMITTED, {"baseline.sweep.1.mean": 0.0}))
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == "baseline"]
    assert len(line.get_ydata()) == len(COMMITTED["baseline"]["sweep"]) - 1 and min(line.get_ydata()) > 0


def test_learning_curve_panel(committed):
    """The three arms' means over the epochs."""
    axes, rows = panel(committed[0], "Learning curve"), COMMITTED["extensions"]["learning_curve"]
    for name in ("baseline", "idea", "placebo"):
        assert line_of(axes, name) == [(row["epoch"], row[name]) for row in rows]
    assert ticks(axes) == ([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    assert axes.get_xlabel() == "epoch" and "target variance = 1" in axes.get_ylabel()


def test_differences_panel(tied):
    """idea - baseline by the true seed, the mean as a line, the interval as a band; below 0 the idea is better."""
    axes = panel(tied[0], "differences")
    first, second = COMMITTED["baseline"]["full"]["per_seed"], COMMITTED["idea"]["per_seed"]
    expected = [(8 + i, b - a) for i, (a, b) in enumerate(zip(first, second, strict=True)) if i != 3]  # which diverged
    assert line_of(axes, "one seed") == expected and expected[1][1] > 0
    assert {y for _, y in line_of(axes, "mean")} == {COMMITTED["comparison"]["delta_mean"]}
    (band,) = axes.patches
    box = band.get_extents().transformed(axes.transData.inverted())
    assert [box.y0, box.y1] == pytest.approx([0.0001, 0.0005])
    assert "idea - baseline" in axes.get_ylabel() and "target variance = 1" in axes.get_ylabel()
    assert "below 0: idea better" in axes.get_title()
    assert 0 in [line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1]


def test_closed_loop_panel(committed):
    """Both models and both floors over the horizons, in target std."""
    axes, rows = panel(committed[0], "Closed loop"), COMMITTED["extensions"]["rollout"]
    labels = {"baseline": "baseline", "idea": "idea", "floor": "repeat", "predict_mean": "predict"}
    for name, label in labels.items():
        assert line_of(axes, label) == [(row["horizon"], row[name]) for row in rows]
    assert ticks(axes) == ([1, 4, 16, 64], ["1", "4", "16", "64"]) and "target std" in axes.get_ylabel()


def test_mechanism_panels(committed):
    """exp(-h k^2) and h x, the operator alone, and the trained layers at k = 3 and at token 16."""
    alone, block = COMMITTED["extensions"]["isolated_mechanism"], COMMITTED["mechanism_signature"]
    axes = panel(committed[0], "Diffusion")
    found = line_of(axes, "operator alone")
    assert found == list(enumerate(alone["attenuation"]))[: len(found)] and len(found) > 8
    for k, predicted in line_of(axes, "predicted"):
        assert predicted == pytest.approx(np.exp(-0.08 * k**2))
    assert line_of(axes, "trained") == [(3, block["observed_fourier_attenuation"])]
    axes = panel(committed[0], "Transport")
    assert line_of(axes, "operator alone") == list(enumerate(alone["displacement"]))
    xs, predicted = zip(*line_of(axes, "predicted"), strict=True)
    assert list(xs) == list(range(32)) and list(predicted) == pytest.approx([0.08 * x for x in xs])
    assert line_of(axes, "trained") == [(16, block["observed_transport_displacement"])]


def test_step_sizes_are_told_apart(crowded):
    """Each of eight has its own marker, the first ones (more are seldom swept) their own shade, and a legend entry."""
    axes = panel(crowded[0], "Sweep")
    lines = [line for line in axes.lines if str(line.get_label()).startswith("idea")]
    assert len(lines) == 8 and len({line.get_marker() for line in lines}) == 8
    assert len({(line.get_color(), line.get_alpha()) for line in lines[:4]}) == 4
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [name for name in named if name.startswith("idea")] == [line.get_label() for line in lines]
    assert any("0.64" in name for name in named) and any("0.02" in name and "0.08" in name for name in named)


@pytest.mark.parametrize("which", ["committed", "crowded"])
def test_nothing_covers_anything(which, request):
    """Legends lie outside all axes and on no text; title and labels are inside the figure; tick labels are apart."""
    figure, _ = request.getfixturevalue(which)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    legends = [axes.get_legend().get_window_extent(renderer) for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 6
    fixed = [axes.get_window_extent(renderer) for axes in figure.axes]
    for axes in figure.axes:
        texts = (axes.title, axes.xaxis.label, axes.yaxis.label)
        fixed += [text.get_window_extent(renderer) for text in texts if text.get_text()]
    assert not [(a, b) for a, b in itertools.product(legends, fixed) if a.overlaps(b)]
    frame = figure.bbox.padded(1)
    texts = [*legends, *fixed, figure._suptitle.get_window_extent(renderer)]
    assert not [
        box for box in texts if box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
    ]
    for axes in figure.axes:
        labels = [label.get_window_extent(renderer) for label in axes.get_xticklabels() if label.get_text()]
        assert not [a for a, b in itertools.pairwise(labels) if a.x1 > b.x0 and b.x1 > a.x0], axes.get_title()


def test_empty_panels_have_no_axes(bare):
    """Where there is nothing to draw there are no axes, lines, floors or legends: a sentence and the panel's name."""
    figure, _ = bare
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert not axes.axison and not axes.lines and not axes.patches and axes.get_legend() is None
        (text,) = axes.texts
        assert "not available" in text.get_text()


def test_file_formats(committed, crowded, bare):
    """PNG, PDF, and SVG whose text stays text."""
    assert crowded[1].read_bytes().startswith(b"\x89PNG") and bare[1].read_bytes().startswith(b"%PDF")
    text = committed[1].read_text()
    for words in ("learning rate", "idea worse (significant)", "0.0015", "Learning curve", "idea, h = 0.08"):
        assert re.search(rf"<text[^>]*>[^<]*{re.escape(words)}", text), words


def test_drawing_leaves_no_figure_open(tmp_path):
    """A program that draws many reports does not gather their figures in memory."""
    before = pyplot.get_fignums()
    bench.draw(CONFIG, COMMITTED, tmp_path / "figure.svg")
    assert pyplot.get_fignums() == before


def test_a_failure_while_drawing_is_one_line(tmp_path):
    """A folder that is gone by then: an error that names the file, and no half picture."""
    path = tmp_path / "gone" / "figure.png"
    with pytest.raises(bench.RunError) as failure:
        bench.draw(CONFIG, COMMITTED, path)
    assert "figure.png" in str(failure.value) and "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []
