"""The oracle, data.solve, against trials worked by hand. Then what people see of a trial."""
import os
import subprocess
import sys

import pytest
import torch

import data

(EXIST, GET_LOCATION, GET_COLOR, GET_SHAPE, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD,
 IF_ELSE) = range(1, 10)
# if the red a adds up to an odd number: the color of b
# otherwise: whether blue c and pink d multiply to an even number
TREE3 = [(SUM_ODD, 1, 1, 0, 0), (IF_ELSE, 0, 0, 0, 0),
         (GET_COLOR, 2, 0, 0, 0), (PRODUCT_EVEN, 3, 3, 4, 8)]
GRID3 = {(3, 5): (1, 1), (0, 0): (2, 6), (3, 3): (3, 3), (2, 5): (4, 8), (6, 6): (5, 4)}
TREE5 = [(EXIST, 6, 5, 0, 0), (IF_ELSE, 0, 0, 0, 0),  # test_a_trial_in_english spells it out
         (SUM_EVEN, 1, 1, 2, 2), (PRODUCT_ODD, 7, 7, 0, 0), *[(IF_ELSE, 0, 0, 0, 0)] * 2,
         (GET_LOCATION, 8, 9, 0, 0), (GET_COLOR, 9, 0, 0, 0),
         (GET_SHAPE, 0, 10, 0, 0), (SUM_ODD, 3, 3, 0, 0)]
GRID5 = {(1, 1): (1, 1), (2, 3): (2, 2), (7, 9): (7, 7), (8, 8): (8, 9), (5, 5): (9, 8),
         (4, 4): (10, 10), (6, 1): (3, 3), (9, 0): (4, 4), (0, 9): (6, 5), (3, 6): (5, 6)}
NO_F = {**GRID5, (0, 9): (6, 6), (3, 6): (5, 5)}  # purple f and orange e have swapped their colors


def grid(objects):
    """{(row, column): (shape, color)} as a stimulus (1, 100, 2)."""
    return torch.tensor([[objects.get(divmod(cell, 10), (0, 0)) for cell in range(100)]])


@pytest.mark.parametrize("tokens, objects, answer", [
    # operator, shape, color, shape 2, color 2; {(row, column): (shape, color)}; answer class
    ([(EXIST, 1, 1, 0, 0)], {(0, 0): (1, 1), (5, 5): (2, 2)}, 0),  # the red a is there
    ([(EXIST, 1, 1, 0, 0)], {(0, 0): (1, 2), (5, 5): (2, 1)}, 1),  # a green a and a red b
    ([(GET_LOCATION, 3, 4, 0, 0)], {(3, 7): (3, 4), (7, 3): (4, 3)}, 39),  # 2 + cell 37
    ([(GET_COLOR, 5, 0, 0, 0)], {(9, 9): (5, 9), (0, 1): (6, 9)}, 136),  # 128 + 8: cyan, the ninth
    ([(GET_SHAPE, 0, 3, 0, 0)], {(2, 0): (10, 3), (0, 2): (10, 9)}, 111),  # 102 + 9: j, the tenth
    *(([(operator, *selectors)], objects, answer)  # of all rows and columns
      for selectors, objects, answers in (
          ((1, 1, 0, 0), {(3, 4): (1, 1), (3, 5): (1, 2)}, {SUM_EVEN: 1, SUM_ODD: 0}),  # 7
          ((1, 1, 2, 2), {(3, 4): (1, 1), (0, 1): (2, 2)}, {SUM_EVEN: 0, SUM_ODD: 1}),  # 8
          ((1, 1, 0, 0), {(3, 5): (1, 1), (3, 4): (1, 2)}, {PRODUCT_EVEN: 1, PRODUCT_ODD: 0}),
          ((1, 1, 2, 2), {(3, 5): (1, 1), (7, 9): (2, 2)}, {PRODUCT_EVEN: 1, PRODUCT_ODD: 0}),
          ((1, 1, 2, 2), {(3, 5): (1, 1), (7, 0): (2, 2)}, {PRODUCT_EVEN: 0, PRODUCT_ODD: 1}))
      for operator, answer in answers.items()),
    (TREE3, GRID3, 0),  # 3 + 5 is even: right; 3 * 3 * 2 * 5 is even
    (TREE3, {**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)}, 133),  # 3 + 4 is odd: left; orange
    (TREE5, GRID5, 135),  # purple f: left; 1 + 1 + 2 + 3 is odd: right; the i is pink
    (TREE5, {**GRID5, (2, 3): (0, 0), (2, 2): (2, 2)}, 90),  # 1 + 1 + 2 + 2 is even: left; cell 88
    (TREE5, NO_F, 111),  # no purple f: right; 7 * 9 is odd: left; the brown shape is j
    (TREE5, {**NO_F, (7, 9): (0, 0), (7, 0): (7, 7)}, 0)])  # 7 * 0 is even: right; 6 + 1 is odd
def test_hand_worked_trials(tokens, objects, answer):
    assert data.solve(torch.tensor([tokens]), grid(objects)).tolist() == [answer]


def test_a_trial_in_english():
    tree = data.evaluate(torch.tensor(TREE5), grid(GRID5)[0])
    assert data.describe(tree).splitlines() == [
        "if Exist: is the purple f on the grid?",
        "  then if SumEven: do the row and column of the red a and the green b add up to an even "
        "number?",
        "    then GetLocation: where is the cyan h?",
        "    else GetColor: which color is the i?",
        "  else if ProductOdd: do the row and column of the white g multiply to an odd number?",
        "    then GetShape: which shape is brown?",
        "    else SumOdd: do the row and column of the blue c add up to an odd number?"]
    shown = data.show((torch.tensor(TREE3), grid(GRID3)[0], 0))
    question, picture, answer = shown.split("\n\n")
    assert question.startswith("if SumOdd: ") and answer == "Answer: True"
    assert data.ANSWERS[data.FIRST_CELL + 37] == "row 3, column 7"
    assert picture.splitlines()[4] == "3    .     .     .   [c:bl]  .   [a:re]  .     .     .     ."
    assert picture.count("[") == 3 and all(x in picture for x in ("[d:pi]", " b:or ", " e:ye "))


def test_the_trials_that_are_drawn_are_shown(capsys):
    made = data.trials("systematic3", "train", 2, seed=5, depth=3)
    data.main("--split systematic3 --subset train --depth 3 --n 2 --seed 5".split())
    assert capsys.readouterr().out == "\n\n\n".join(map(data.show, zip(*made))) + "\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has another error for it")
def test_a_reader_that_leaves_early_meets_no_words():
    run = subprocess.Popen([sys.executable, "-c", "import data; input(); data.main()"], text=True,
                           cwd=os.path.dirname(data.__file__), stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()  # as head does
    assert run.communicate("go\n")[1] == "" and run.returncode == 1
