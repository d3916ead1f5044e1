"""Which seeds of the ladder's rungs have learned depth 3? With a second argument, draws accuracy by
depth of every rung, and of LoopTfmr by what it sees and carries.

    python tests/ladder.py recorded/fourth
    python tests/ladder.py recorded/fourth .github/ladder.png    # needs matplotlib
"""
import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
from eval import drawing, read, table

DEPTHS = [3, 5, 7, 9]
GRAY, ORANGE, BLUE, BLACK = "0.6", "#D55E00", "#0072B2", "#000000"
LADDER = {  # rung -> folder, color, where its label ends or begins (depth, accuracy in %)
    "1 EOS answers": ("papertfmr/layers2-readeos", GRAY, (2.9, 56)),
    "2 the root answers": ("papertfmr/layers2", GRAY, (2.9, 79)),
    "3 a token per object": ("sstfmr/layers2", GRAY, (2.9, 92)),
    "": ("sstfmr/layers6", GRAY, (2.9, 100)),  # 4b lies on 4
    "4, 4b three, six layers": ("sstfmr/default", GRAY, (2.9, 99)),
    "5 view all": ("looptfmr/carrystate-viewall", ORANGE, (5.15, 43)),
    "6 view own": ("looptfmr/carrystate", BLUE, (5.15, 61)),
    "7 view own, answer": ("looptfmr/default", BLACK, (5.15, 95))}
PANELS = {  # view and carry -> folder, color
    "5 view all, state": ("carrystate-viewall", ORANGE),
    "5b view all, recall": ("carryrecall-viewall", GRAY),
    "5c view all, answer": ("viewall", GRAY),
    "6 view own, state": ("carrystate", BLUE),
    "6b view own, recall": ("carryrecall", GRAY),
    "7 view own, answer": ("default", BLACK)}


def seeds_of(folder):  # seed -> accuracy in % at each depth, of the finished runs of a folder
    results = {int(path.parent.name.removeprefix("seed")): read(path)["accuracy"]
               for path in folder.glob("seed*/result.json")}
    return {seed: [100 * results[seed][f"depth{depth}"] for depth in DEPTHS]
            for seed in sorted(results)}


def by_seed(folder):
    """A row per rung: how many seeds have learned depth 3, and accuracy by seed."""
    names = [name for name, *_ in LADDER.values()]
    names += [f"looptfmr/{name}" for name, _ in PANELS.values()]
    rows = []
    for name in dict.fromkeys(names):
        seeds = seeds_of(folder / name)
        learned = sum(at[0] >= 95 for at in seeds.values())
        each = [", ".join(f"{seed}: {at[i]:.1f}" for seed, at in seeds.items()) for i in (0, -1)]
        rows.append([name, f"{learned} of {len(seeds)}", *each])
    return table(["accuracy in %, by seed", "have learned", "depth 3", "depth 9"], rows)


def draw(axis, folder, color):
    """A thin line per finished run of a folder and a thick one for their mean, if there are any."""
    seeds = [*seeds_of(folder).values()]
    for seed in seeds:
        axis.plot(DEPTHS, seed, color=color, linewidth=0.6)
    if seeds:
        axis.plot(DEPTHS, [statistics.mean(at) for at in zip(*seeds)], "o-", color=color,
                  markersize=4)


def ladder(figure, folder):
    """One panel for the rungs, six small ones for what LoopTfmr sees and what goes on."""
    left, right = figure.subfigures(1, 2)
    axis, small = left.subplots(), right.subplots(2, 3, sharex=True, sharey=True)
    for label, (name, color, (x, y)) in LADDER.items():
        draw(axis, folder / name, color)
        side, dark = ("right", "0.35") if color == GRAY else ("left", color)
        axis.text(x, y, label, color=dark, ha=side, va="center", size=9)
    for panel, (label, (name, color)) in zip(small.flat, PANELS.items()):
        draw(panel, folder / "looptfmr" / name, color)
        panel.set_title(label, fontsize="small")
    result = next(folder.rglob("result.json"))  # any: all were tested on the same trials
    for baseline, style in (("condition-blind", ":"), ("chance", "--")):
        shares = [100 * read(result)["baselines"][f"depth{depth}"][baseline] for depth in DEPTHS]
        for panel in [axis, *small.flat]:
            panel.plot(DEPTHS, shares, style, color="0.4", linewidth=1)
    for panel in [axis, *small.flat]:
        panel.set(xticks=DEPTHS, ylim=(0, 106))
    axis.text(0.3, 4, "thin: one seed, thick: the mean\ndotted: condition-blind\ndashed: chance",
              color="0.35", size=9)
    axis.text(5.1, 23, "1, 2, 3, 4, 4b", color="0.35", size=9)
    axis.set(xlim=(0.1, 9.3), ylabel="accuracy in %")
    for panel in [axis, *small[1]]:
        panel.set_xlabel("depth (1 and 3 are trained)", size="medium" if panel is axis else "small")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Print the ladder.", usage=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, help="above productive/, with the runs of all rungs")
    parser.add_argument("picture", nargs="?", help="a file to draw, such as ladder.png")
    args = parser.parse_args(argv)
    with data.ending(parser):
        folder = args.folder / "productive"
        if not any(folder.rglob("result.json")):
            raise data.UsageError(f"no finished run in {folder}")
        print(by_seed(folder))
        if args.picture:
            with drawing(args.picture, 12, 4.6) as figure:
                ladder(figure, folder)


if __name__ == "__main__":
    main()
