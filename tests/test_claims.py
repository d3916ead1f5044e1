"""The rules that judge the papers' claims, on runs made up so that the outcome is known."""
import json

import pytest

import claims
import data
from claims import interval, outcome
from test_train import refusal

AUTHORS = {name: label for label, name in claims.RELEASED.items()}


def like(answer):
    return {"out: stimulus": 0, "out: instruction": 0, "out: answer": answer}


def fake(name, accuracies, split="distractor", learned=1.0, **changes):
    """Runs of one model, a seed for each accuracy out of distribution. `learned` in distribution,
    of all seeds or of each."""
    model, _, settings = name.rstrip("]").partition("[")
    tests = list(data.SPLITS[split])[1:]
    near = claims.in_distribution(split.removesuffix("_release"))[-1]
    config = {"split": split, "model": model, "settings": settings or "default", "steps": 1,
              "batch_size": 1, "model_args": {"dim": 512}}
    result = {"kinds": {}, "tests": {}, "log": [], "alignment": like(0),
              "baselines": {test: {"chance": 0.35, "condition-blind": 0.45} for test in tests}}
    for key, value in changes.items():
        of_result = key in ("alignment", "decoded", "untrained", "tests")
        (result if of_result else config)[key] = value
    shares = learned if isinstance(learned, list) else [learned] * len(accuracies)
    return [(config | {"seed": seed},
             result | {"accuracy": dict.fromkeys(tests, value) | {near: share}})
            for seed, (value, share) in enumerate(zip(accuracies, shares))]


HIGH, LOW, EQUAL = [0.98, 0.99, 0.985], [0.5, 0.51, 0.52], [0.985, 0.98, 0.99]
CROSS = fake("crossattn[firstread]", HIGH) + fake("perceiver", HIGH)


def judged(runs, number, ground=0):
    """The counts of a claim on a ground, as "for/against/open", and the sentence."""
    text = claims.claims_text(runs).split("\n\n")[1::2][ground].splitlines()[number - 1]
    head, counts, seen = text.split("**")
    assert head.startswith(f"{number}. ")
    return "/".join(part.split()[0] for part in counts.split(", ")), seen


def test_the_interval_over_seeds_and_the_three_outcomes():
    """Means 0.8, 0.5; with variances 0.01 and three seeds each the interval is 2.78 * 0.0816. With
    variances 0.01 and 0 there are two degrees of freedom, not four: 4.30 * 0.0577."""
    high, low = [0.7, 0.8, 0.9], [0.4, 0.5, 0.6]
    assert interval(high, low) == pytest.approx((0.3, 2.78 * 0.0816), abs=1e-3)
    assert interval(high, 3 * [0.5]) == pytest.approx((0.3, 4.30 * 0.0577), abs=1e-3)
    assert interval([0.5, 0.52], [0.35]) == pytest.approx((0.16, 12.71 * 0.01))  # exact: a baseline
    for difference, half, better, no_better in (
            (0.3, 0.2, "for", "against"), (-0.3, 0.2, "against", "for"),
            (0.3, 0.4, "open", "open"), (0.0, 0.01, "against", "for"),
            (0.01, 0.011, "open", "open"), (-0.015, 0.004, "against", "for"),
            (0.01, 0.005, "for", "for")):  # within 2 points and yet better: as the claim says
        assert outcome(difference, half, True) == better
        assert outcome(difference, half, False) == no_better


@pytest.mark.parametrize("ground, split, name", [
    (0, "distractor", str), (1, "distractor", AUTHORS.get),
    (2, "distractor_release", AUTHORS.get)])
def test_each_outcome_on_each_ground(ground, split, name):
    """... and nothing on the other grounds."""
    cross = [run for model in claims.CROSS for run in fake(name(model), HIGH, split)]
    for other, counts in ((LOW, "2/0/6"), (EQUAL, "0/2/6"), ([0.2, 0.9, 1], "0/0/8")):
        runs = cross + fake(name("gru"), other, split)
        assert [judged(runs, 1, place)[0] for place in range(3)] == [
            counts if place == ground else "0/0/8" for place in range(3)]
    others = fake("authors[architecturernn]", LOW, split)  # 256 units: not as released
    seen = judged(cross + fake(name("gru"), LOW, split) + others, 1, ground)[1]
    assert "for: +47.5 points; no run: rnn on distractor, " in seen


@pytest.mark.parametrize("model, settings, name", [
    ("authors", "steps4000-batchsize128", "authors"),
    ("authors", "dim512-steps4000-batchsize128-architecturernn", "authors[dim512-architecturernn]"),
    ("authors", "steps10000", "authors[steps10000]"),
    ("authors", "steps4000-batchsize1280", "authors[steps4000-batchsize1280]"),
    ("mlp", "steps4000-batchsize128", "mlp[steps4000-batchsize128]")])
def test_512_000_trials_are_the_authors_models_own(model, settings, name):
    assert claims.name_of({"model": model, "settings": settings}) == name


@pytest.mark.parametrize("claim", range(1, 10))
def test_a_missing_run_never_counts_against_a_claim(claim):
    """Without any runs, all is open. Without those of one model, fewer outcomes are not open."""
    assert judged([], claim)[0].startswith("0/0/")
    runs = [run for split in claims.FARTHEST for model in claims.DEFAULT
            for run in fake(model, HIGH, split)] + CROSS
    full = [*map(int, judged(runs, claim)[0].split("/"))]
    for missing in claims.DEFAULT:
        left = [run for run in runs if run[0]["model"] != missing]
        less = [*map(int, judged(left, claim)[0].split("/"))]
        assert less[0] <= full[0] and less[1] <= full[1] and less[2] >= full[2]


def organized(answers, accuracies, **changes):
    """Of claim 5's six models, each organized like the answer so much."""
    return [run for model, more, accuracy in zip(claims.OTHERS + claims.CROSS, answers, accuracies)
            for run in fake(model, [accuracy] * 3, alignment=like(more), **changes)]


def scaled(accuracies, units=1024, times=20, settings="dim1024-steps20"):
    """Claim 6's MLP, which need not have learned in distribution."""
    return fake(f"mlp[{settings}]", accuracies, learned=0.5, model_args={"dim": units}, steps=times)


def places(**shares):
    return {place.replace("_", " "): {"in: letter": 0.5, "out: letter": share, "out: color": share}
            for place, share in shares.items()}


def bottleneck(values):
    others = fake("sstfmr", [0.8, 0.81, 0.82], "systematic1")
    return fake("hypertfmr", values, "systematic1") + others


CLOSE, SPLITS = [0.5, 0.501, 0.502], ("distractor", "systematic1")
DEEP = [run for split in SPLITS for run in fake("sstfmr[layers4]", HIGH, split)]
DEEP += [run for split in SPLITS for run in fake("sstfmr[layers1]", LOW, split)]
DEEP += fake("sstfmr[layers4]", LOW, "productive") + fake("sstfmr[layers1]", LOW, "productive")
LATE, FOURTH = ([0.98, 0.99, 0.3], [1, 1, 0.4]), ([0.98, 0.99, 0.3, 0.985], [1, 1, 0.4, 0.95])
# Ranks 1 to 6 against 1 2 3 4 6 5: r = 1 - 6 * 2 / (6 * 35) = 0.94. Left out one by one, four times
# 1 - 6 * 2 / (5 * 24) = 0.9, and twice 1: the interval is 2.57 * 5 / 6 ** 0.5 * 0.0516
UP, DOWN = [0, 0.1, 0.2, 0.3, 0.4, 0.5], [0, -0.1, -0.2, -0.3, -0.4, -0.5]
RANKS, MLP = [0.1, 0.2, 0.3, 0.4, 0.6, 0.5], fake("mlp", LOW, learned=0.5)
KNOWN = {"decoded": places(block_1=0.99, features=0.2, code=0.97), "untrained": places(code=1)}
HYPER = fake("hypertfmr", [0.8, 0.81, 0.82], "systematic1", **KNOWN)
GENERAL = fake("sstfmr", HIGH, "systematic1", **KNOWN)
OLD = fake("sstfmr", HIGH, "systematic1", decoded=places(features=0.99))  # nothing else


@pytest.mark.parametrize("claim, runs, counts, says", [
    # seeds count that have learned: three of them, on both sides
    (1, fake("perceiver", LATE[0], learned=LATE[1]) + fake("rnn", LOW), "0/0/8",
     "seeds that count: perceiver on distractor 2 of 3"),
    (1, fake("perceiver", FOURTH[0], learned=FOURTH[1]) + fake("rnn", LOW), "1/0/7",
     "for: +47.5 points"),
    (1, fake("perceiver", FOURTH[0], learned=FOURTH[1]), "0/0/8", "perceiver on distractor 3 of 4"),
    (1, CROSS + fake("rnn", LOW, learned=0.94), "0/0/8", "rnn on distractor 0 of 3"),
    (1, CROSS + fake("rnn", LOW[:2]), "0/0/8", "rnn on distractor 2 of 2"),
    # seeds of different code, settings or tests are not pooled
    *((1, CROSS + fake("rnn", LOW) + fake("rnn", LOW, **changes)[1:], "0/0/8",
       "runs of different code, settings or tests: rnn on distractor")
      for changes in ({"code": {"data.py": "abc"}}, {"decay": "all"}, {"model_args": {"dim": 9}},
                      {"tests": {"a": 1}})),
    (2, DEEP, "1/0/17", "no run: "),
    (3, DEEP, "2/0/7", ""),  # three seeds and an interval of 2.3 points
    (3, fake("sstfmr[layers4]", CLOSE, "productive") + fake("sstfmr[layers1]", CLOSE, "productive"),
     "3/0/6", ""),
    (3, fake("sstfmr[heads8]", HIGH, "productive") + fake("sstfmr[heads1]", CLOSE, "productive"),
     "0/3/6", "against: +48.4"),
    # no better than a baseline, also within 2 points of chance
    *((4, fake("gru", accuracies, "productive"), counts, "") for accuracies, counts in (
        ([0.30, 0.31, 0.32], "6/0/30"), ([0.35, 0.351, 0.352], "6/0/30"), (HIGH, "0/6/30"),
        ([0.40, 0.401, 0.402], "3/3/30"), ([0.3, 0.5, 0.9], "0/0/36"))),
    (4, fake("gru", HIGH, "productive", learned=0.9), "0/0/36", "gru on productive 0 of 3"),
    (5, organized(UP, RANKS), "1/0/0", "learned: rank correlation 0.94±0.27 over 6 models"),
    (5, organized(DOWN, RANKS), "0/1/0", "learned: rank correlation -0.94±0.27 over 6"),
    (5, organized(UP, RANKS, learned=0.5), "0/0/1", "not learned: rank correlation 0.94±0.27"),
    (5, organized(UP[:3], RANKS), "0/0/1", "learned: fewer than four models"),
    (5, organized(UP[:3], RANKS) + organized(UP, RANKS, learned=0.5)[9:], "0/0/1", ""),
    (5, organized(UP, [0.3, 0.6, 0.1, 0.5, 0.2, 0.4]), "0/0/1", "learned: rank correlation"),
    # corners by units and trials; alone, it has twenty times the trials of nothing
    (6, MLP + scaled([0.96, 0.961, 0.962]), "2/0/2", ""),
    (6, MLP + scaled([0.7, 0.701, 0.702]), "1/1/2", ""),
    (6, MLP + scaled(LOW, settings="dim1024-batchsize20"), "0/1/3", ""),
    *((6, runs, "0/0/4", "no run: mlp[1024 units, x20] on distractor") for runs in (
        MLP + scaled(HIGH, times=10), MLP + scaled(HIGH, units=512), scaled(HIGH),
        MLP + scaled(HIGH, settings="dim1024-steps20-lr0.1"))),
    (6, MLP + scaled(HIGH[:2]), "0/0/4", "mlp[1024 units, x20] on distractor 2 of 2"),
    # in the best and last place: claim 7 where a model generalizes, 9 where it has learned
    (7, HYPER, "0/0/72", ""), (9, HYPER, "2/1/7", "gCOG states the task"),
    (9, HYPER, "2/1/7", "for: +2.0 to +4.0 points; against: -75.0 points"),
    (7, GENERAL, "1/1/70", ""), (9, GENERAL, "1/1/8", ""),
    (7, OLD, "1/0/71", "not measured: best of sstfmr on systematic1"),
    (7, fake("sstfmr", HIGH, "systematic1"), "0/0/72", "not measured"),
    (9, fake("sstfmr", HIGH, "systematic1"), "0/0/10", "not measured"),
    (8, bottleneck(HIGH), "1/0/1", ""), (8, bottleneck(LOW), "0/1/1", ""),
    (8, bottleneck([0.5, 0.9, 1]), "0/0/2", "undecided")])
def test_each_claim_is_judged_by_its_rules(claim, runs, counts, says):
    found, seen = judged(runs, claim)
    assert found == counts and says in seen


def test_three_tables_of_the_runs(tmp_path, capsys):
    """... which count no run twice, and read why.json where it is."""
    runs = CROSS + 2 * fake("sstfmr", [0.5]) + fake("rnn", LOW, decoded={"out: letter": 0.25})
    runs += fake("rnn[dim64]", [0.9]) + fake("authors", [0.9])
    for i, (config, result) in enumerate(runs):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "result.json").write_text(json.dumps(result))
    why = {"alignment": like(0.75),
           "decoded": places(features=0.125, code=0.5), "untrained": places(features=1)}
    (tmp_path / "0" / "why.json").write_text(json.dumps(why))
    claims.main([str(tmp_path)])
    summary, states, text = capsys.readouterr().out.strip().split("\n\n", 2)
    summary, states = ([[cell.strip() for cell in line.split("|")[1:-1]]
                        for line in table.splitlines()] for table in (summary, states))
    names = [row[0] for row in summary[2:]]
    assert {*names} == {"chance", "condition-blind", *claims.CROSS, "rnn", "sstfmr"}
    cells = dict(row[:2] for row in summary[2:])
    assert cells["chance"] == "35.0 -> 35.0" and cells["rnn"] == "100.0 -> 51.0±1.0"
    rows = {row[0]: row[1:] for row in states[2:]}
    assert rows["Our models, distractor, rnn"] == [
        "0.00", "0.00", "0.00", "", "", "25.0±0.0", "", "51.0±1.0"]
    cross = rows["Our models, distractor, crossattn[firstread]"]  # why.json of one seed in three
    assert cross[2:7] == ["0.25", "50.0", "50.0", "12.5", "100.0"]
    assert "The authors' models, distractor, crossattn[firstread]" in rows and len(rows) == 5
    assert "sstfmr on distractor 1 of 1" in text
    for name in "why.json", "result.json":
        (tmp_path / "0" / name).write_text("{")
        line, = refusal(capsys, claims, tmp_path)
        assert f"{name} is missing or damaged" in line
