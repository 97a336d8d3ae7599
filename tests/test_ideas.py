"""The layer's other forms (tests/ideas) are what their names say, and the two tables that run them say what the reports
say.  Tests of how a user's layer is checked and trained stand in test_layers.py and test_cli.py."""

import json
import math
from collections import Counter
from pathlib import Path

import budget_table
import idea_table
import numpy as np
import plain_loop
import pytest
import scipy.fft
import torch

import stage2_bench as bench

torch.set_num_threads(1)  # as the script does: threads that wait for a busy core's are slower than none
H = 0.08
FORMS = idea_table.find_ideas()
KINETIC = f"{idea_table.HERE / 'ideas' / 'kinetic.py'}:Kinetic"
START = {"gate_bias_2": -2.0, "gate_bias_3": -3.0, "residual_bias_2": -2.0}  # of the gate's bias, where not -2.5
AS_DRAWN = {"residual", "convex", "convex_identity"}
COMMITTED = json.loads((idea_table.HERE.parent / bench.REPORT).read_text())


def form_class(idea):
    """Import the class of "path.py:Class"."""
    path, _, name = idea.rpartition(":")
    return getattr(bench.load_file(path)[0], name)


def build(form, channels=3, length=32, h=H, seed=1):
    """Return a form's layer in float64, its weights drawn."""
    layer = form_class(FORMS[form])(channels, length, h).double()
    layer.draw(np.random.default_rng(seed))
    return layer


def tokens(channels=3, length=32, batch=4):
    """Return random tokens (batch, T, C)."""
    return torch.from_numpy(np.random.default_rng(2).standard_normal((batch, length, channels)))


def operator(form, u):
    """K(u) of each form, by the plain loop's K and SciPy's cosine transform.

    On one channel alone nothing is transported, and tokens that are all equal do not diffuse.
    """
    length, channels = u.shape[1:]
    if form == "no_transport":
        return torch.cat([plain_loop.kolmogorov(u[:, :, c : c + 1], H) for c in range(channels)], dim=2)
    if form == "reflecting":
        half_waves = np.arange(length)[:, None]
        u = scipy.fft.idct(scipy.fft.dct(u.numpy(), axis=1) * np.exp(-H * (half_waves / 2) ** 2), axis=1)
        u = torch.from_numpy(u)
    if form in ("no_diffusion", "reflecting"):
        equal = [u[:, x : x + 1].expand(-1, length, -1) for x in range(length)]
        return torch.stack([plain_loop.kolmogorov(one, H)[:, x] for x, one in enumerate(equal)], dim=1)
    return plain_loop.kolmogorov(u, H)


def test_the_forms_are_there():
    """Residual, with a gate of its own too; convex, with identity mix too; one part of K left out; reflecting ends;
    another gate bias: the README's table has a row for each."""
    names = {"residual", "residual_bias_2", "convex", "convex_identity", "no_transport", "no_diffusion", "reflecting"}
    assert set(FORMS) == names | {"gate_bias_2", "gate_bias_3"}


@pytest.mark.parametrize("channels, length", [(3, 32), (2, 7), (1, 2), (5, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_its_formula(form, channels, length):
    """u + g (W_m K(u) + b_m), (1 - g) u + g (W_m K(u) + b_m), or W_m ((1 - g) u + g K(u)) + b_m, with the form's K."""
    layer, u = build(form, channels, length), tokens(channels, length)
    for parameter in layer.parameters():  # away from where they start: an open gate, a mix that is no identity
        parameter.data += torch.linspace(-1, 1, parameter.numel(), dtype=torch.float64).view(parameter.shape)
    w_g, b_g, w_m, b_m = layer.gate.weight, layer.gate.bias, layer.mix.weight, layer.mix.bias
    g, moved = 1 / (1 + torch.exp(-(u @ w_g.T + b_g))), operator(form, u)
    if form.startswith("residual"):
        expected = u + g * (moved @ w_m.T + b_m)
    elif form.startswith("convex"):
        expected = (1 - g) * u + g * (moved @ w_m.T + b_m)
    else:
        expected = ((1 - g) * u + g * moved) @ w_m.T + b_m
    torch.testing.assert_close(layer(u), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_drawn_in_the_built_in_order(form, channels):
    """From the pair's stream, uniform in +-1/sqrt(C): gate weight, gate bias, mix weight, mix bias, 2 (C^2 + C) numbers
    (24 for three channels, as in the reference); then the gate's bias is set, or the mix."""
    rng, bound = np.random.default_rng(7), 1 / math.sqrt(channels)
    square = (channels, channels)
    expected = [rng.uniform(-bound, bound, shape) for shape in (square, channels, square, channels)]
    if form not in AS_DRAWN:
        expected[1] = np.full(channels, START.get(form, -2.5))
    if form == "convex_identity":
        expected[2:] = [np.eye(channels), np.zeros(channels)]
    layer = build(form, channels, seed=7)
    found = [value.detach().numpy() for value in layer.parameters()]
    assert len(found) == 4 and all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_without_h_the_gate_has_nothing_to_learn_from(form):
    """At h = 0, the placebo, K is the identity to the bit: where the gate chooses between u and K(u) its gradient is
    exactly 0, or Adam would turn a rounding into steps."""
    layer, u = build(form, h=0.0), tokens()
    assert torch.equal(layer.operator(u), u)
    layer(u).square().sum().backward()
    chooses_mixture = form.startswith(("residual", "convex"))
    assert chooses_mixture or not layer.gate.weight.grad.any()
    assert layer.mix.weight.grad.all()


def test_convex_identity_starts_as_a_choice_between_u_and_k():
    """At h = 0 it starts as the raw model; at h > 0 every token starts between u and K(u)."""
    u = tokens()
    torch.testing.assert_close(build("convex_identity", h=0.0)(u), u, rtol=0, atol=1e-15)
    layer = build("convex_identity")
    share = (layer(u) - u) / (layer.operator(u) - u)
    assert share.min() > 0 and share.max() < 1


def test_reflecting_ends_do_not_meet():
    """An impulse at the first token leaks to the last one on the circle, and not between reflecting ends."""
    impulse = torch.zeros(1, 32, 3, dtype=torch.float64)
    impulse[:, 0] = 1.0
    assert build("residual").diffuse(impulse)[0, -1, 0] > 0.1
    assert abs(build("reflecting").diffuse(impulse)[0, -1, 0]) < 1e-6


def test_no_diffusion_moves_by_h_x():
    """At h = 0.08 token 25 moves by exactly two channels, and no other token changes."""
    u = torch.zeros(1, 32, 3, dtype=torch.float64)
    u[0, 25] = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.zeros_like(u)
    expected[0, 25] = torch.tensor([2.0, 3.0, 1.0])
    torch.testing.assert_close(build("no_diffusion").operator(u), expected, rtol=0, atol=1e-12)


def trained(idea, seeds, epochs):
    """Train an idea's runs at rate 0.006 and return their records."""
    config = bench.Config(idea=idea, epochs=epochs)
    with bench.computing(config):
        training = bench.Training(bench.Model(config, [bench.Run(seed, 0.006, (H,)) for seed in seeds]))
        for _ in training.run():
            pass
        return bench.records(training)


def test_residual_form_has_the_scores_of_the_first_version():
    """When the residual form was the built-in one, eight seeds had the mean 0.0019870063 (std 0.0005591645): the same
    digits come from the file, so draws, formula and trainer are those of then."""
    scores = [record.score for record in trained(FORMS["residual"], range(8), 16)]
    assert [round(scores[0], 10), round(scores[7], 10)] == [0.0016852089, 0.0016548117]
    assert (round(np.mean(scores), 10), round(np.std(scores), 10)) == (0.0019870063, 0.0005591645)


def test_the_base_of_the_forms_is_the_built_in_layer():
    """kinetic.py trains as the committed report's idea did: its learning curve at epochs 1 and 2, to the last digit."""
    rows = {row["epoch"]: row["per_seed"]["idea"] for row in COMMITTED["extensions"]["learning_curve"]}
    first, second = (record.state.curve for record in trained(KINETIC, (0, 7), 2))
    for epoch in (1, 2):
        assert [round(first[epoch], 10), round(second[epoch], 10)] == [rows[epoch][0], rows[epoch][7]]


# ---------------------------------------------------------------------------------------------------------------------
# The tables
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    """Return options of a run of a second: a track of 2 channels and 5 tokens, 3 seeds."""
    track = tmp_path / "walk.py"
    track.write_text(
        "import numpy\n"
        "def make(seed, split):\n"
        "    rng = numpy.random.default_rng([seed, len(split)])\n"
        "    walk = rng.standard_normal((40, 6, 2)).cumsum(1)\n"
        "    return walk[:, :5], walk[:, 5, 0]\n"
    )
    return ["--track", str(track), "--seeds", "3", "--jobs", "1", "--quiet"]


@pytest.fixture
def epochs_trained(monkeypatch):
    """Return a counter of the epochs that each run trains, (h, lr, seed); an idea's name in front where it has h."""
    counted = Counter()

    class Counting(bench.Training):
        def run(self):
            for _ in super().run():
                for run in self.model.runs:
                    idea = Path(self.config.idea).stem if run.h else "baseline"
                    counted[idea, run.h, run.lr, run.seed] += 1
                yield self.epoch

    monkeypatch.setattr(bench, "Training", Counting)
    return counted


def rows_of(text):
    """Return the cells of a Markdown table, header first; every row has as many."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert len({len(row) for row in rows}) == 1 and set(rows.pop(1)) == {"---"}
    return rows


def test_idea_table_trains_the_baseline_once(tiny, epochs_trained, tmp_path, capsys):
    """A row for the baseline, the built-in layer and each form, on odd shapes too; ten commands share one baseline."""
    idea_table.main([*tiny, "--epochs", "2", "--lrs", "0.01", "--out-dir", str(tmp_path / "kept")])
    header, *rows = rows_of(capsys.readouterr().out)
    assert header == ["form", "parameters", "mean test MSE", "ratio", "pairs won", "exact p", "placebo mean"]
    assert [row[0] for row in rows[:2]] == ["baseline (raw tokens)", "kinetic (built in)"]
    assert [row[0] for row in rows[2:]] == [f"`{form}.py`" for form in FORMS]
    assert {row[1] for row in rows[1:]} == {str(int(rows[0][1]) + 12)}  # two times 2 by 2 weights and 2 biases
    assert len({row[2] for row in rows}) == len(rows), "every form has another result"
    report = json.loads((tmp_path / "kept" / bench.REPORT).read_text())  # the last row's
    assert report["model"] == "rnn_small_ResidualBias2_vs_raw" and report["mechanism_signature"] is None
    assert rows[-1][2] == f"{np.mean(report['idea']['per_seed']):.4g}"
    assert rows[-1][6] == f"{np.mean(report['extensions']['placebo']['full']['per_seed']):.4g}"
    assert rows[0][2] == f"{np.mean(report['baseline']['full']['per_seed']):.4g}"
    assert set(epochs_trained.values()) == {2}, "no run trains twice"
    assert len(epochs_trained) == 3 + 10 * (3 + 3)


def test_budget_table_only_adds_epochs(tiny, epochs_trained, tmp_path, capsys):
    """Budgets in ascending order, each with the grid given and with the growing one; no epoch of a run trains twice."""
    options = ["--idea", FORMS["residual"], "--epochs", "3", "1", "--out-dir", str(tmp_path / "kept")]
    budget_table.main([*tiny, *options])
    header, *rows = rows_of(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["1", "1", "3", "3"]
    assert [row[1].endswith(" (auto)") for row in rows] == [False, True, False, True]
    assert {row[1] for row in rows[::2]} == {"0.0015 to 0.006"}
    report = json.loads((tmp_path / "kept" / bench.REPORT).read_text())  # the last row's
    first, second = (np.array(block["per_seed"]) for block in (report["baseline"]["full"], report["idea"]))
    grid = report["baseline"]["union_lr_grid"]
    assert len(grid) > 3 and report["extensions"]["options"]["lr_search"] == "auto"
    assert dict(zip(header, rows[-1], strict=True)) == {
        "epochs": "3",
        "rates tried": f"{min(grid)} to {max(grid)} (auto)",
        "best rate, baseline / idea": f"{report['baseline']['best_cfg']['lr']} / {report['best_idea_cfg']['lr']}",
        "baseline": f"{first.mean():.4g}",
        "idea": f"{second.mean():.4g}",
        "ratio": f"{second.mean() / first.mean():.2f}",
        "pairs won": f"{(second < first).sum()} of 3",
        "exact p": f"{report['extensions']['statistics']['p_exact']:.4f}",
        "verdict": report["comparison"]["verdict"],
        "linear floor": f"{np.mean(report['extensions']['floors']['linear']['per_seed']):.4g}",
    }
    assert set(epochs_trained.values()) <= {1, 3} and 3 in epochs_trained.values()


def test_tables_of_the_committed_report():
    """The built-in layer: 1.28 times the baseline, 1 of 8 pairs won, exact p 4/256, and the linear floor 0.0001698."""
    assert idea_table.row("kinetic", COMMITTED)[3:6] == ["1.28", "1 of 8", "0.0156"]
    assert idea_table.baseline_row(COMMITTED)[1:4] == ["3585", "0.001052", "1.00"]
    other = COMMITTED | {"best_idea_cfg": {"lr": 0.003, "h": H}}
    assert budget_table.row(other)[2] == "0.006 / 0.003"
    cells = budget_table.row(COMMITTED)
    assert cells[:3] == ["16", "0.0015 to 0.006", "0.006 / 0.006"]
    assert cells[5:] == ["1.28", "1 of 8", "0.0156", "idea worse (significant)", "0.0001698"]


def test_tables_show_a_dash_where_a_number_is_missing():
    """A null of the report (a run diverged, no placebo, more than 40 pairs) is a dash, neither number nor traceback."""
    report = json.loads(json.dumps(COMMITTED))
    report["idea"]["mean"] = report["extensions"]["statistics"]["p_exact"] = None
    report["extensions"]["placebo"] = {"reason": "the idea's output does not depend on h"}
    cells = idea_table.row("kinetic", report)
    assert [cells[i] for i in (2, 3, 5, 6)] == ["-"] * 4
    assert [budget_table.row(report)[i] for i in (4, 5, 7)] == ["-"] * 3


def test_tables_end_with_the_status_of_a_failed_command(capsys):
    """A wrong option ends the table with the script's exit status and its line, before any row."""
    with pytest.raises(SystemExit) as left:
        idea_table.main(["--seeds", "0"])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "--seeds" in err
