"""Why models generalize: similarity analysis, probes, attention, pictures. Each on a model whose answer is known."""
import json
import shutil
import sys

import pytest
import torch

import claims
import data
import eval as evaluation
import train


class Known(torch.nn.Module):
    """A model whose hidden states are what `state` makes of a trial."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def features(self, instruction, stimulus):
        return self.state(instruction, stimulus)


def see_stimulus(instruction, stimulus):
    return evaluation.one_hot(stimulus)


def see_answer(instruction, stimulus):
    return torch.nn.functional.one_hot(data.solve(instruction, stimulus)[0], 138).float()


def test_spearman_by_hand():
    """Ranks 1 2.5 2.5 4 and 2 1 3 4: covariance 3 over the root of 4.5 times 5."""
    x, y = torch.tensor([1.0, 5, 5, 9]), torch.tensor([20.0, 10, 30, 40])
    assert evaluation.spearman(x, y) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert evaluation.spearman(x, x ** 3) == pytest.approx(1) and evaluation.spearman(x, -x) == pytest.approx(-1)


@pytest.mark.parametrize("state, organized_like", [(see_stimulus, "stimulus"), (see_answer, "answer")])
def test_alignment_says_what_hidden_states_are_organized_like(state, organized_like):
    result = evaluation.alignment(Known(state), "systematic3", "cpu")
    assert result.keys() == {f"{where}: {what}" for where in ("in", "out")
                             for what in ("stimulus", "instruction", "answer")}
    for part, value in result.items():
        assert value == pytest.approx(1, abs=1e-3) if organized_like in part else abs(value) < 0.5


def test_probe_decodes_what_is_there_and_nothing_else():
    scores, unseen = evaluation.probe(Known(see_answer), "productive", "cpu", 1000)
    near, far, raw_near, raw_far = scores["answer"]
    assert near == far == 1 and raw_near < 0.6 and raw_far < 0.6
    near, far, raw_near, raw_far = scores["shape of operator 1"]
    assert near < 0.3 and raw_near > 0.45 and raw_far < raw_near
    assert unseen["kind of operator 1"] == 0 and unseen["answer"] > 0  # 1,000 trials do not show every cell
    assert len(scores) == 3 * 3 + 1


@pytest.mark.slow
def test_probe_is_fitted_on_one_half_alone():
    """States that name the trial let a fit remember its half; on the other half nothing can be decoded."""
    noise = torch.randn(1000, 900, generator=torch.Generator().manual_seed(0))
    place = iter(range(0, 2000, 100))

    def state(instruction, stimulus):
        start = next(place) % 1000
        return noise[start:start + len(instruction)]

    scores, _ = evaluation.probe(Known(state), "productive", "cpu", 1000)
    assert scores["kind of operator 1"][0] < 0.35


def test_attention_is_drawn_where_a_model_looks():
    """Untrained, treetfmr already finds an object by its shape and color: similar vectors match."""
    torch.manual_seed(0)
    model = evaluation.module_of("treetfmr").Model(dim=512)
    text = evaluation.attention(model, "systematic1", "cpu")
    grid, first = text.split("Attention 1, 1:")[0], text.split("Attention 1, 1:")[1].split("Attention 1, 2:")
    row = next(i for i, line in enumerate(grid.split("\n     0 ")[1].splitlines()[1:]) if "[" in line)
    assert "9" in first[0].splitlines()[1 + row] and sum("9" in line for line in first[0].splitlines()[1:]) == 1
    assert "0% on the grid" in first[1] and len(first[1].splitlines()) == 1  # no second selector


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_TRIALS", 50)
        patch.setattr(train, "TEST_TRIALS", 100)
        train.main(["--model", "treetfmr", "perceiver", "--split", "distractor", "systematic1", "--dim", "16", "--steps", "4",
                    "--batch-size", "8", "--eval-every", "2", "--device", "cpu", "--out", str(out)])
    return out


def test_flags_add_what_they_name(runs, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "PROBE_TRIALS", 100)
    evaluation.main([str(runs / "distractor"), "--saved", "--rsa", "--probe", "--attention"])
    out = capsys.readouterr().out
    assert out.count("decoded in %") == out.count("Attention 1, 1:") == 2
    assert "in: stimulus" in out and "out: answer" in out
    evaluation.main([str(runs), "--saved"])
    assert not any(word in capsys.readouterr().out for word in ("decoded", "Attention", "orrelation"))


def test_similarity_is_saved_and_computed_alike(runs, capsys):
    """From the weights, or from what train.py saved when it ended: the same table."""
    tables = []
    for flags in (["--saved"], []):
        evaluation.main([str(runs / "distractor" / "treetfmr"), "--n", "100", "--rsa", "--device", "cpu", *flags])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "0." in tables[0].splitlines()[-1]


def test_runs_that_have_not_begun_are_left_out(runs, tmp_path, capsys):
    folder = tmp_path / "runs"
    shutil.copytree(runs / "distractor", folder)
    (next((folder / "perceiver").rglob("checkpoint.pt"))).unlink()
    evaluation.main([str(folder), str(folder / "treetfmr"), "--n", "20"])  # named twice, counted once
    out = capsys.readouterr().out
    assert "treetfmr" in out and "perceiver" not in out and "seeds" not in out


def test_results_on_different_test_sets_stay_apart(runs, tmp_path, capsys):
    shutil.copytree(runs / "distractor", tmp_path / "runs")
    path = next((tmp_path / "runs" / "perceiver").rglob("result.json"))
    result = json.loads(path.read_text())
    result["accuracy"].pop("distractors40")
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit) as stop:
        evaluation.main([str(tmp_path), "--saved"])
    assert stop.value.code == 2 and "tested on different sets" in capsys.readouterr().err


def test_saved_results_need_no_weights_and_must_be_whole(runs, tmp_path, capsys):
    folder = tmp_path / "seed0"
    folder.mkdir()
    for name in ("config.json", "result.json"):
        (folder / name).write_bytes(next((runs / "distractor" / "treetfmr").rglob(name)).read_bytes())
    evaluation.main([str(tmp_path), "--saved"])
    assert "treetfmr" in capsys.readouterr().out
    whole = (folder / "result.json").read_text()
    for damage in (whole[:50], "[]", whole.replace("per_operator", "other"),
                   json.dumps(json.loads(whole) | {"alignment": None}), whole.replace(f'"format": {evaluation.FORMAT}', '"format": 1')):
        (folder / "result.json").write_text(damage)
        with pytest.raises(SystemExit) as stop:
            evaluation.main([str(tmp_path), "--saved"])
        assert stop.value.code == 2 and "result.json is damaged" in capsys.readouterr().err
    (folder / "result.json").unlink()
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path), "--saved"])
    assert "has a result.json: leave out --saved" in capsys.readouterr().err.splitlines()[-1]


def test_an_arrow_marks_what_was_still_rising(runs, tmp_path, capsys):
    log = next((runs / "distractor" / "perceiver").rglob("log.csv"))
    before = log.read_text()
    for last, marked in ((0.7, True), (0.505, False)):
        log.write_text("step,trials,loss,train\n2,16,1,0.5\n4,32,1," + f"{last}\n")
        assert evaluation.rising(evaluation.log_of(log.parent)) == marked
        evaluation.main([str(runs / "distractor"), "--saved"])
        line = next(line for line in capsys.readouterr().out.splitlines() if "perceiver" in line)
        assert line.count("↑") == marked
    log.write_text(before)


def test_plot(runs, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
        evaluation.main([str(runs), "--saved", "--plot", str(tmp_path / "a.png")])
    assert stop.value.code == 2 and "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    evaluation.main([str(runs), "--saved", "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit) as stop:
        evaluation.main([str(runs), "--saved", "--plot", str(tmp_path / "nowhere" / "a.png")])
    assert stop.value.code == 2 and "cannot write" in capsys.readouterr().err


def test_better_needs_more_than_the_interval_over_seeds():
    """Means 0.8 and 0.5; with variances 0.01 and three seeds each the interval is 2.78 * 0.0816 = 0.227."""
    high, low = [0.7, 0.8, 0.9], [0.4, 0.5, 0.6]
    assert claims.better(high, low) and not claims.better(low, high)
    assert not claims.better(high, [x + 0.1 for x in low])
    assert claims.better([0.5, 0.52], [0.35])  # a baseline is exact: one degree of freedom, an interval of 12.7 * 0.01
    assert not claims.better([0.44, 0.48], [0.35])


def fake(split, model, accuracies, settings="quick", learned=1.0, layers=2, like_answer=0.0):
    """Runs of one model, a seed for each accuracy out of distribution."""
    tests = list(data.SPLITS[split])[1:]
    near = evaluation.in_distribution(split)[-1]
    empty = [{"format": evaluation.FORMAT} | {key: kind() for key, kind in kinds.items()}
             for kinds in evaluation.KEYS.values()]
    return [(empty[0] | {"split": split, "model": model, "settings": settings, "seed": seed, "model_args": {"layers": layers}},
             empty[1] | {"accuracy": dict.fromkeys(tests, value) | {near: learned}, "chance": dict.fromkeys(tests, 0.35),
              "alignment": {"out: stimulus": 0.2, "out: answer": 0.2 + like_answer}})
            for seed, value in enumerate(accuracies)]


CROSS = [run for model in ("crossattn", "perceiver") for run in fake("distractor", model, [0.98, 0.99])]
DEEP = {"settings": "quick-layers4", "layers": 4}
HEADS = {"settings": "quick-layers4-heads8", "layers": 4}
SHALLOW = {"settings": "quick-layers1", "layers": 1}


@pytest.mark.parametrize("claim, splits, expected", [
    ("1", {"distractor": CROSS + fake("distractor", "rnn", [0.5, 0.51])}, "holds (2 of 2)"),
    ("1", {"distractor": CROSS + fake("distractor", "rnn", [0.5, 0.51]) + fake("distractor", "sstfmr", [0.99, 1])},
     "holds in part (2 of 4)"),
    ("1", {"distractor": CROSS + fake("distractor", "rnn", [0.99, 1])}, "does not hold (0 of 2)"),
    ("1", {"distractor": CROSS + fake("distractor", "rnn", [0.5, 0.51], learned=0.94)}, "cannot be judged"),
    ("1", {"distractor": CROSS + fake("distractor", "rnn", [0.5])}, "cannot be judged"),  # a single seed
    ("2", {"systematic1": fake("systematic1", "crossattn", [0.9, 0.91]) + fake("systematic1", "gru", [0.5, 0.51])},
     "holds (1 of 1)"),
    ("3", {"distractor": fake("distractor", "sstfmr", [0.9, 0.91], **DEEP) + fake("distractor", "sstfmr", [0.5, 0.51], **SHALLOW),
           "productive": fake("productive", "sstfmr", [0.3, 0.31], **DEEP) + fake("productive", "sstfmr", [0.3, 0.31], **SHALLOW)},
     "holds (4 of 4)"),
    ("3", {"distractor": fake("distractor", "sstfmr", [0.9], **DEEP) + fake("distractor", "sstfmr", [0.91], **HEADS)
           + fake("distractor", "sstfmr", [0.5, 0.51], **SHALLOW)}, "cannot be judged"),  # other heads are no seed
    ("4", {"productive": fake("productive", "gru", [0.3, 0.31])}, "holds (3 of 3)"),
    ("4", {"productive": fake("productive", "gru", [0.8, 0.81])}, "does not hold (0 of 3)"),
])
def test_verdicts_follow_the_rule(claim, splits, expected):
    text = next(text for text in claims.CLAIMS if text.startswith(claim))
    assert claims.verdict(splits, claims.CLAIMS[text], "quick") == expected
    assert expected in claims.claims_table(splits)


@pytest.mark.parametrize("model, schedule, unchanged", [
    ("gru", "quick", True), ("sstfmr", "quick", False), ("gru", "full", False)])  # the full schedule trains by Muon
def test_what_paper_does_not_change_is_one_run_and_counts_at_both_sizes(model, schedule, unchanged):
    usual, paper = (next(train.configurations(train.parse(["--model", model, "--schedule", schedule, *flags])[1]))
                    for flags in ([], ["--paper"]))
    assert claims.counts(usual, schedule) and claims.counts(paper, f"{schedule}-paper")
    assert (usual == paper) == claims.counts(usual, f"{schedule}-paper") == claims.counts(paper, schedule) == unchanged
    small, = train.configurations(train.parse(["--model", model, "--schedule", schedule, "--dim", "64"])[1])
    assert not claims.counts(small, schedule) and not claims.counts(small, f"{schedule}-paper")


@pytest.mark.parametrize("sign, expected", [
    (1, "holds (0.89: 0.23 to 0.99)"), (-1, "does not hold (-0.89: -0.99 to -0.23)"), (0, "cannot be judged"),
    (-2, "does not hold (-1.00: ")])
def test_claim_5_is_a_rank_correlation(sign, expected):
    """Ranks 1 2 3 4 5 6 against 2 1 3 4 6 5 give r = 1 - 6 * 4 / (6 * 35) = 0.886, whose interval is tanh(1.402 - 1.166)
    = 0.23 to tanh(1.402 + 1.166) = 0.99; five pairs are too few. treetfmr is not the paper's and does not count."""
    runs = fake("distractor", "treetfmr", [0.1], like_answer=sign)
    ranks = (2, 1, 3, 4, 6, 5) if abs(sign) < 2 else range(1, 7)
    for i, (model, rank) in enumerate(zip(claims.CROSS + claims.OTHERS, ranks)):
        runs += fake("distractor", model, [0.1 * rank] * 2, like_answer=sign * i / 10)
    if sign == 0:
        runs = runs[:5]
    assert claims.claim_5({"distractor": runs}, "quick").startswith(expected)
    within = {1: "0.89", -1: "-0.89", 0: "", -2: "-1.00"}[sign]  # 0: of two models
    few = fake("systematic1", "rnn", [0.1])
    lines = claims.within_table({"distractor": runs, "systematic1": few}).splitlines()
    assert lines[0].split("  ")[1:] == ["distractor", "systematic1"] and lines[1].split() == ["quick", *within.split()]


def test_claims_read_the_runs(tmp_path, capsys):
    for seed, (config, result) in enumerate(CROSS + fake("distractor", "rnn", [0.5, 0.51])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "result.json").write_text(json.dumps(result))
    claims.main([str(tmp_path), "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("|")[2].strip() == "quick" and "holds (2 of 2)" in lines[2]
    for file in tmp_path.glob("*/config.json"):  # the same seed from two folders is one run
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": 0}))
    claims.main([str(tmp_path), "--markdown"])
    assert "cannot be judged" in capsys.readouterr().out.splitlines()[2]
