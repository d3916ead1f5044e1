"""Draws the ladder: accuracy by depth of every rung, and of LoopTfmr by what it sees and carries.

    python tests/ladder.py recorded/fourth .github/ladder.png    # needs matplotlib
"""
import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import data  # noqa: E402
from eval import drawing, read  # noqa: E402

DEPTHS = [3, 5, 7, 9]
LADDER = {  # rung -> folder, color, where its label ends or begins (depth, accuracy in %)
    "1 EOS answers": ("papertfmr/layers2-readeos", "0.6", (2.9, 56)),
    "2 the root answers": ("papertfmr/layers2", "0.6", (2.9, 78)),
    "3 a token per named object": ("sstfmr/layers2", "0.6", (2.9, 91)),
    "4b six layers": ("sstfmr/layers6", "0.6", (2.9, 95)),
    "4 three layers": ("sstfmr/default", "0.6", (2.9, 100)),
    "5 view all, state": ("looptfmr/carrystate-viewall", "#D55E00", (5.1, 41)),
    "6 view own, state": ("looptfmr/carrystate", "#0072B2", (5.1, 59)),
    "7 view own, answer": ("looptfmr/default", "#000000", (5.1, 95))}
VIEWS = {"own": "", "all": "viewall"}
CARRIES = {"answer": "", "state": "carrystate", "recall": "carryrecall"}


def curves(folder):
    """The accuracies in % of each finished run below a folder, by depth."""
    results = [read(path)["accuracy"] for path in sorted(folder.glob("seed*/result.json"))]
    return [[100 * accuracy[f"depth{depth}"] for depth in DEPTHS] for accuracy in results]


def draw(axis, seeds, color):
    """A thin line per seed and a thick one for their mean."""
    for seed in seeds:
        axis.plot(DEPTHS, seed, color=color, linewidth=0.6)
    axis.plot(DEPTHS, [statistics.mean(at) for at in zip(*seeds)], "o-", color=color, markersize=4)


def ladder(figure, folder):
    """One panel for the rungs, six small ones for what is seen and what goes on."""
    left, right = figure.subfigures(1, 2)
    axis, small = left.subplots(), right.subplots(2, 3, sharex=True, sharey=True)
    for label, (name, color, (x, y)) in LADDER.items():
        if seeds := curves(folder / name):
            draw(axis, seeds, color)
            side = "right" if x < DEPTHS[0] else "left"
            axis.text(x, y, label, color="0.35" if color == "0.6" else color, ha=side, size=9)
    for row, (view, seen) in zip(small, VIEWS.items()):
        for panel, (carry, kept) in zip(row, CARRIES.items()):
            name = "-".join(filter(None, [kept, seen])) or "default"
            if seeds := curves(folder / "looptfmr" / name):
                draw(panel, seeds, "#000000")
            panel.set_title(f"view {view}, {carry}", fontsize="small")
    result = next((folder / "sstfmr/default").glob("seed*/result.json"))
    baselines = read(result)["baselines"]
    blind = [100 * baselines[f"depth{depth}"]["condition-blind"] for depth in DEPTHS]
    for panel in [axis, *small.flat]:
        panel.plot(DEPTHS, blind, ":", color="0.4", linewidth=1)
        panel.set(xticks=DEPTHS, ylim=(0, 104))
    axis.text(7.2, 44, "condition-blind", color="0.4", size=9)
    axis.text(5.6, 22, "1, 2, 3, 4, 4b", color="0.35", ha="center", size=9)
    axis.set(xlim=(0.1, 9.3), ylabel="accuracy in % (thin: a seed, thick: the mean)")
    for panel in [axis, *small[1]]:
        panel.set_xlabel("depth (3 is trained)")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draw the ladder.", usage=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, help="above productive/, with the runs of all rungs")
    parser.add_argument("picture", type=Path, help="the file to write, such as ladder.png")
    args = parser.parse_args(argv)
    with data.ending(parser), drawing(args.picture, 12, 4.6) as figure:
        ladder(figure, args.folder / "productive")


if __name__ == "__main__":
    main()
