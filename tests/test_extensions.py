"""What the reference lacks: rollout against the slow oracle, placebo, selection, multiscale stacks, own signatures."""

import dataclasses
import json
import math

import plain_loop
import pytest
import torch

import stage2_bench as bench

SMALL = dataclasses.replace(bench.Config(), epochs=1, seeds=(0, 1), sweep_seeds=1)


@pytest.mark.parametrize("h", [None, 0.08])
def test_closed_loop_equals_the_oracle(h):
    """64 steps of feeding predictions back agree to the printed digits with a plain loop on torch.nn.GRU."""
    run = bench.Run(0, 0.006, None if h is None else (h,))
    model = bench.StackedModel(SMALL, [run])
    flat, _ = bench.train(model)
    found = bench.rollout(model, flat)[0]
    ready, raw, scales = plain_loop.make_data(0)
    oracle, _ = plain_loop.train(0, 0.006, h, 1, ready)
    errors = plain_loop.closed_loop(oracle, ready, raw, scales)
    assert found["rollout"] == pytest.approx([errors[step - 1] for step in (1, 4, 16, 64)], abs=1e-9)
    seen, true = raw[2][:256], raw[4][:256]
    floor = [(((seen[:, 32] - true[:, 32 + step]) ** 2).mean() ** 0.5) / scales[3] for step in (1, 4, 16, 64)]
    assert found["floor"] == pytest.approx(floor, rel=1e-12)


@pytest.mark.parametrize("track", ["lorenz", "irregular"])
def test_closed_loop_of_the_truth_has_no_error(track, monkeypatch):
    """A model that knows the next position stays on the trajectory: window, clock and differences advance rightly."""
    config = dataclasses.replace(SMALL, track=track, sizes=(8, 8, 8))
    model = bench.StackedModel(config, [bench.Run(0, 0.006, (0.08,))])
    data = model.data[0]
    path, step = data.trajectories, iter(range(64))

    def oracle(self, flat, tokens, mixed=None, layers=None):
        true = path.position[:, path.window + next(step)]
        return torch.from_numpy((true - data.target_mean) / data.target_std)[None]

    monkeypatch.setattr(bench.StackedModel, "__call__", oracle)
    assert max(bench.rollout(model, model.initial())[0]["rollout"]) < 1e-12


def arm(means, scores, h, grid=(0.0015, 0.003, 0.006), validation=None, probes=()):
    """Return an arm with hand-made numbers."""
    rows = tuple((lr, h) for lr in grid)
    return bench.Arm(rows, tuple(means), tuple(validation or means), tuple(scores), tuple(probes) or ({},) * 8, 3585)


def outcome(**changes):
    """Return an outcome whose idea is worse by 1e-3 at every seed, and whose placebo equals the baseline."""
    base = [0.001 * (i + 1) for i in range(8)]
    parts = {
        "baseline": arm([0.3, 0.2, 0.1], base, None),
        "idea": arm([0.3, 0.1, 0.2], [b + 0.001 for b in base], (0.08,), validation=[0.3, 0.2, 0.1]),
        "placebo": arm([0.3, 0.2, 0.1], base, (0.0,)),
        "diverged": (),
    }
    return bench.Outcome(**(parts | changes))


def test_selection_names_edges_and_the_validation_choice():
    """The baseline's best rate is the grid's largest; the idea's is inside, but validation would choose another."""
    block = bench.selection_block(bench.Config(), outcome())
    assert block["baseline"] == {"edge": "upper", "validation_choice": {"lr": 0.006, "h": None}, "agrees": True}
    assert block["idea"] == {"edge": None, "validation_choice": {"lr": 0.006, "h": 0.08}, "agrees": False}


def test_placebo_is_judged_against_both():
    """Equal to the baseline: p = 1; better than the idea at every seed: p = 2/256."""
    block = bench.placebo_block(bench.Config(), outcome())
    assert block["versus_baseline"]["p_exact"] == 1.0 and block["versus_baseline"]["delta_mean"] == 0.0
    assert block["versus_idea"]["p_exact"] == 2 / 256 and block["versus_idea"]["placebo_wins"] == 8


def test_flagged_rates():
    """A diverged row and one that is worse than predicting the mean are named; sound ones are not."""
    lost = bench.Run(2, 0.006, None)
    rows = bench.flagged_rows(outcome(baseline=arm([5.0, 0.2, math.inf], [0.1] * 8, None), diverged=(lost,)))
    assert [(row["cfg"]["lr"], row["reason"], row["diverged_seeds"]) for row in rows] == [
        (0.0015, "worse than predicting the mean", []),
        (0.006, "diverged", [2]),
    ]


def test_rollout_block_corrects_over_the_horizons():
    """Four exact p of 2/256 become 8/256 by Holm; a seed without rollout makes its horizon null."""
    base = [{"rollout": [0.1 + i, 0.2 + i, 0.3 + i, 0.4 + i], "floor": [1, 2, 3, 4]} for i in range(8)]
    worse = [{"rollout": [value + 0.01 for value in probe["rollout"]], "floor": [1, 2, 3, 4]} for probe in base]
    made = outcome(
        baseline=arm([0.3] * 3, [0.1] * 8, None, probes=base), idea=arm([0.3] * 3, [0.1] * 8, (0.08,), probes=worse)
    )
    rows = bench.rollout_block(bench.Config(), made)
    assert [row["horizon"] for row in rows] == [1, 4, 16, 64]
    assert [row["p_exact"] for row in rows] == [2 / 256] * 4
    assert [row["p_holm"] for row in rows] == [8 / 256] * 4
    lame = dataclasses.replace(made, idea=dataclasses.replace(made.idea, probes=(*worse[:7], {})))
    assert bench.rollout_block(bench.Config(), lame)[0]["idea"] is None


def report_of(tmp_path, *options):
    """Run the command line in this process and return the report."""
    short = ["--seeds", "2", "--sweep-seeds", "1", "--epochs", "1", "--jobs", "1", "--quiet", "--lrs", "0.003"]
    assert bench.main([*short, "--out-dir", str(tmp_path), *options]) == 0
    return json.loads((tmp_path / bench.REPORT).read_text())


def test_joint_sweep_and_multiscale_stack(tmp_path):
    """--h with two entries gives two rows; a stack is a list in cfg, and has 24 parameters a layer, placebo alike."""
    report = report_of(tmp_path, "--h", "0.08", "0.02+0.08+0.32")
    assert [row["cfg"]["h"] for row in report["idea_sweep"]] == [0.08, [0.02, 0.08, 0.32]]
    depth = 3 if isinstance(report["best_idea_cfg"]["h"], list) else 1
    assert report["parameter_parity"]["idea"] == 3585 + 24 * depth == report["extensions"]["placebo"]["parameters"]
    first = report["best_idea_cfg"]["h"]
    first = first[0] if depth == 3 else first
    signature = report["mechanism_signature"]
    assert signature["predicted_fourier_attenuation"] == round(math.exp(-9 * first), 7)
    assert signature["predicted_transport_displacement"] == round(16 * first, 7)


OWN = """
import torch
class Own(torch.nn.Module):
    def __init__(self, channels, length, h):
        super().__init__()
        self.h, self.scale = h, torch.nn.Parameter(torch.ones(channels))
    def forward(self, tokens):
        return tokens * (1 + self.h * self.scale)
    def signature(self, tokens):
        return {"predicted_gain": 1 + self.h, "observed_gain": float(self(tokens).norm() / tokens.norm())}
"""


def test_own_signature_of_an_idea(tmp_path):
    """A class that measures itself fills the block; each observed number is judged by its prediction."""
    (tmp_path / "own.py").write_text(OWN)
    report = report_of(tmp_path, "--idea", f"{tmp_path / 'own.py'}:Own")
    block = report["mechanism_signature"]
    assert block["predicted_gain"] == 1.08 and block["observed_gain"] == pytest.approx(1.08, abs=0.05)
    assert block["confirmed"] is True
    assert report["extensions"]["options"]["idea"]["class"] == "Own"
    assert report["extensions"]["isolated_mechanism"] is None
