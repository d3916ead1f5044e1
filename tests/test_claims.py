"""The rule that judges the paper's claims, on runs made up so that the verdict is known."""
import json

import pytest

import claims
import data
import eval as evaluation


def test_better_needs_more_than_the_interval_over_seeds():
    """Means 0.8, 0.5; with variances 0.01 and three seeds each the interval is 2.78 * 0.0816. With
    variances 0.01 and 0 there are two degrees of freedom, not four: 4.30 * 0.0577."""
    high, low = [0.7, 0.8, 0.9], [0.4, 0.5, 0.6]
    assert claims.better(high, low) and not claims.better(low, high)
    assert not claims.better(high, [x + 0.1 for x in low])
    assert claims.better(high, 3 * [0.54]) and not claims.better(high, 3 * [0.56])
    assert claims.better([0.5, 0.5], [0.4, 0.4]) and not claims.better([0.5, 0.5], [0.5, 0.5])
    assert claims.better([0.5, 0.52], [0.35])  # a baseline is exact: an interval of 12.7 * 0.01
    assert not claims.better([0.44, 0.48], [0.35])


def fake(model, accuracies, split="distractor", settings="default", learned=1.0, like_answer=0.0,
         decoded=None):
    """Runs of one model, a seed for each accuracy out of distribution."""
    tests, near = list(data.SPLITS[split])[1:], evaluation.in_distribution(split)[-1]
    config = {"split": split, "model": model, "settings": settings, "steps": 1, "precision": "",
              "model_args": {}}
    baselines = {test: {"chance": 0.35, "condition-blind": 0.45} for test in tests}
    return [(config | {"seed": seed},
             {"accuracy": dict.fromkeys(tests, value) | {near: learned}, "kinds": {}, "tests": {},
              "decoded": {} if decoded is None else {"in: letter": 0.5, "out: letter": decoded},
              "log": [], "baselines": baselines,
              "alignment": {"out: stimulus": 0.2, "out: answer": 0.2 + like_answer}})
            for seed, value in enumerate(accuracies)]


READ = {"settings": "firstread"}
CROSS = fake("crossattn", [0.98, 0.99], **READ) + fake("perceiver", [0.98, 0.99])
RNN = fake("rnn", [0.5, 0.51])
DEEP, SHALLOW, SCALED = ({"settings": x} for x in ("layers4", "layers1", "dim1024"))


@pytest.mark.parametrize("claim, runs, expected", [
    ("1", CROSS + RNN, "holds (2 of 2)"),
    ("1", CROSS + fake("rnn", [0.5, 0.51], learned=0.5), "holds (2 of 2, 2 others not learned)"),
    ("1", CROSS + RNN + fake("sstfmr", [0.99, 1]), "holds in part (2 of 4)"),
    ("1", CROSS + RNN + fake("sstfmr", [0.99, 1], settings="dim64"), "holds (2 of 2)"),
    ("1", CROSS + fake("rnn", [0.99, 1]), "does not hold (0 of 2)"),
    ("1", CROSS + fake("rnn", [0.5]), "cannot be judged (rnn on distractor)"),  # one seed
    ("1", fake("crossattn", [0.9, 0.91], learned=0.94, **READ) + fake("crossattn", [1, 1]) + RNN,
     "cannot be judged (crossattn[firstread] learned distractor to 94 %)"),
    ("3", fake("sstfmr", [0.9, 0.91], **DEEP) + fake("sstfmr", [0.5, 0.51], **SHALLOW)
     + fake("sstfmr", [0.3, 0.31], "productive", **DEEP)
     + fake("sstfmr", [0.3, 0.31], "productive", **SHALLOW), "holds (4 of 4)"),
    ("3", fake("sstfmr", [0.9], **DEEP) + fake("sstfmr", [0.5, 0.51], **SHALLOW)
     + fake("sstfmr", [0.91], settings="layers4-heads8"), "cannot be judged"),
    ("4", fake("gru", [0.3, 0.31], "productive"), "holds (6 of 6)"),
    ("4", fake("gru", [0.4, 0.401], "productive"), "holds in part (3 of 6)"),  # above chance
    ("6", fake("mlp", [0.5, 0.51]) + fake("mlp", [0.97, 0.98], learned=0.9, **SCALED),
     "holds (2 of 2)"),
    ("6", fake("mlp", [0.5, 0.51]) + fake("mlp", [0.7, 0.71], **SCALED), "holds in part (1 of 2)"),
    ("8", fake("hypertfmr", [0.98, 0.99], "systematic1") + fake("sstfmr", [0.9, 0.91],
     "systematic1", learned=0.9), "holds (1 of 1, 1 others not learned)"),
])
def test_verdicts_follow_the_rule(claim, runs, expected):
    text = next(text for text in claims.CLAIMS if text.startswith(claim))
    assert claims.verdict(of_splits(runs), claims.CLAIMS[text]).startswith(expected)
    assert row(runs, claim)[0].startswith(expected)


def of_splits(runs):
    return {split: [run for run in runs if run[0]["split"] == split] for split in data.SPLITS}


def row(runs, claim):  # -> the verdicts on our models and on the authors'
    table = claims.claims_table(of_splits(runs))
    line, = (line for line in table.splitlines() if f"| {claim} " in line)
    return [cell.strip() for cell in line.split("|")[2:4]]


def test_the_authors_models_are_judged_apart_and_as_released():
    """crossattn and dstfmr with 256 units, gru with 512; not with another embedding or width."""
    theirs = [*fake("authors", [0.98, 0.99]),
              *fake("authors", [0.5, 0.51], settings="architecturedstfmr"),
              *fake("authors", [0.5, 0.51], settings="dim512-architecturegru"),
              *fake("authors", [1.0, 1.0], settings="architecturernn"),
              *fake("authors", [1.0, 1.0], settings="embedonehot")]
    assert row(theirs, 1) == ["cannot be judged (rnn on distractor)", "holds (2 of 2)"]
    assert row(theirs + CROSS + RNN, 1) == ["holds (2 of 2)", "holds (2 of 2)"]


def test_claims_7_and_9_ask_what_can_be_decoded():
    """Claim 7 where 95 % are right on the last test set, claim 9 where it may be less."""
    runs = (fake("hypertfmr", [0.8, 0.81], "systematic1", decoded=0.96)
            + fake("sstfmr", [0.95, 0.96], "systematic1", decoded=0.9)
            + fake("gru", [1, 1], decoded=0.95) + fake("rnn", [1, 1]) + fake("mlp", [1], decoded=0)
            + fake("sstfmr", [1, 1], "systematic1", settings="dim64", decoded=0))
    assert row(runs, 7)[0] == "holds in part (1 of 2: 90 to 95 %)"
    assert row(runs, 9)[0] == "holds in part (1 of 2: 90 to 96 %)"
    assert row(RNN, 9) == row(RNN, 7) == ["cannot be judged (no such runs)"] * 2


@pytest.mark.parametrize("sign, expected", [
    (1, "holds (0.89: 0.23 to 0.99)"), (-1, "does not hold (-0.89: -0.99 to -0.23)"),
    (0, "cannot be judged (5 of 6"), (-2, "does not hold (-1.00: ")])
def test_claim_5_is_a_rank_correlation(sign, expected):
    """Ranks 1 2 3 4 5 6 against 2 1 3 4 6 5 give r = 1 - 6 * 4 / (6 * 35) = 0.886, whose interval
    is tanh(1.402 - 1.166) to tanh(1.402 + 1.166). looptfmr, not the paper's, does not count."""
    runs = fake("looptfmr", [0.1], like_answer=sign)
    ranks = (2, 1, 3, 4, 6, 5) if abs(sign) < 2 else range(1, 7)
    for i, (model, rank) in enumerate(zip(claims.CROSS + claims.OTHERS, ranks)):
        name, _, settings = model.rstrip("]").partition("[")
        runs += fake(name, [0.1 * rank] * 2, settings=settings or "default",
                     like_answer=sign * i / 10)
    assert claims.claim_5({"distractor": runs if sign else runs[:10]}).startswith(expected)


def test_three_tables_of_the_runs(tmp_path, capsys):
    """... which count none twice: one seed of sstfmr in two folders cannot be compared with."""
    runs = CROSS + 2 * fake("sstfmr", [0.5]) + fake("rnn", [0.5, 0.51], decoded=0.25)
    runs += fake("rnn", [0.9], settings="dim64") + fake("authors", [0.9])
    for i, (config, result) in enumerate(runs):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "result.json").write_text(json.dumps(result))
    claims.main([str(tmp_path)])
    summary, states, verdicts = ([[cell.strip() for cell in line.split("|")[1:-1]]
                                  for line in table.splitlines()]
                                 for table in capsys.readouterr().out.strip().split("\n\n"))
    assert [row[0] for row in summary[2:]] == ["chance", "condition-blind", "crossattn[firstread]",
                                               "perceiver", "rnn", "sstfmr"]
    assert summary[2][1] == "35.0 -> 35.0" and summary[6][1] == "100.0 -> 50.5±0.7"
    state = "distractor, rnn", "0.20", "0.20", "50.0±0.0", "25.0±0.0", "50.5±0.7"
    assert [*state] in states
    assert [row[0] for row in states[2:]] == [f"distractor, {name}" for name in (
        "crossattn[firstread]", "perceiver", "rnn", "sstfmr", "authors' crossattn[firstread]")]
    assert verdicts[2][1] == "holds (2 of 2)"
