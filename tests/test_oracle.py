"""The oracle, data.solve, checks every trial. Here it is checked on trials worked by hand, and on trials corrupted so
that it has to object. Then what people see of a trial."""
import pytest
import torch

import data
from data import (EXIST, GET_COLOR, GET_LOCATION, GET_SHAPE, IF_ELSE, PRODUCT_EVEN, PRODUCT_ODD, SUM_EVEN, SUM_ODD,
                  solve)
from test_data import RULES


def grid(objects):
    """{(row, column): (shape, color)} as a stimulus (1, 100, 2)."""
    return torch.tensor([[objects.get(divmod(cell, 10), (0, 0)) for cell in range(100)]])


HAND_WORKED = [  # operator, shape, color, shape 2, color 2; {(row, column): (shape, color)}; answer class
    ((EXIST, 1, 1, 0, 0), {(0, 0): (1, 1), (5, 5): (2, 1)}, 0),  # the red a is there
    ((EXIST, 1, 1, 0, 0), {(0, 0): (1, 2), (5, 5): (2, 1)}, 1),  # a green a and a red b are not a red a
    ((GET_LOCATION, 3, 4, 0, 0), {(3, 7): (3, 4), (7, 3): (4, 3)}, 39),  # 2 + cell 37
    ((GET_COLOR, 5, 0, 0, 0), {(9, 9): (5, 9), (0, 1): (6, 9)}, 136),  # cyan, the ninth color: 128 + 8
    ((GET_SHAPE, 0, 10, 0, 0), {(2, 0): (10, 10), (0, 2): (10, 9)}, 111),  # j, the tenth letter: 102 + 9
]
SUM, PRODUCT = (SUM_EVEN, SUM_ODD), (PRODUCT_EVEN, PRODUCT_ODD)
NUMBERS = [  # the sum or product of rows and columns: where it is even, Even answers 0 (True) and Odd answers 1
    (SUM, (1, 1, 0, 0), {(3, 4): (1, 1), (3, 5): (1, 2)}, 7),
    (SUM, (1, 1, 2, 2), {(3, 4): (1, 1), (0, 1): (2, 2), (5, 6): (3, 3)}, 8),
    (PRODUCT, (1, 1, 0, 0), {(3, 5): (1, 1), (3, 4): (1, 2)}, 15),
    (PRODUCT, (1, 1, 2, 2), {(3, 5): (1, 1), (7, 9): (2, 2), (9, 8): (3, 3)}, 945),
]
# if the red a adds up to an odd number, the color of b, otherwise whether blue c and pink d multiply to an even one
TREE3 = [(SUM_ODD, 1, 1, 0, 0), (IF_ELSE, 0, 0, 0, 0), (GET_COLOR, 2, 0, 0, 0), (PRODUCT_EVEN, 3, 3, 4, 8)]
GRID3 = {(3, 5): (1, 1), (0, 0): (2, 6), (3, 3): (3, 3), (2, 5): (4, 8), (6, 6): (5, 4)}  # e: the one distractor
# if there is a purple f: if red a and green b add up to an even number, where cyan h is, otherwise which color i has
# otherwise: if white g multiplies to an odd number, which letter is brown, otherwise whether blue c adds up to one
TREE5 = [(EXIST, 6, 5, 0, 0), (IF_ELSE, 0, 0, 0, 0), (SUM_EVEN, 1, 1, 2, 2), (PRODUCT_ODD, 7, 7, 0, 0),
         (IF_ELSE, 0, 0, 0, 0), (IF_ELSE, 0, 0, 0, 0),
         (GET_LOCATION, 8, 9, 0, 0), (GET_COLOR, 9, 0, 0, 0), (GET_SHAPE, 0, 10, 0, 0), (SUM_ODD, 3, 3, 0, 0)]
GRID5 = {(1, 1): (1, 1), (2, 3): (2, 2), (7, 9): (7, 7), (8, 8): (8, 9), (5, 5): (9, 8), (4, 4): (10, 10),
         (6, 1): (3, 3), (9, 0): (4, 4), (0, 9): (6, 6)}  # yellow d: distractor; orange f: stands in for the purple f
HAND_WORKED_TREES = [
    (TREE3, GRID3, 0),  # 3 + 5 is even: right; 3 * 3 * 2 * 5 is even
    (TREE3, {**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)}, 133),  # 3 + 4 is odd: left; orange
    (TREE5, GRID5, 111),  # no purple f: right; 7 * 9 is odd: left; the brown letter is j
    (TREE5, {**GRID5, (7, 9): (0, 0), (7, 0): (7, 7)}, 0),  # 7 * 0 is even: right, right; 6 + 1 is odd
    (TREE5, {**GRID5, (0, 9): (6, 5)}, 135),  # purple f: left; 1 + 1 + 2 + 3 is odd: right; the i is pink
    (TREE5, {**GRID5, (0, 9): (6, 5), (2, 3): (0, 0), (2, 2): (2, 2)}, 90),  # 1 + 1 + 2 + 2 is even: left; cell 88
]


@pytest.mark.parametrize("tokens, objects, answer", [
    *(([token], objects, answer) for token, objects, answer in HAND_WORKED),
    *(([(op, *selectors)], objects, (number + odd) % 2) for operators, selectors, objects, number in NUMBERS
      for odd, op in enumerate(operators)),
    *HAND_WORKED_TREES])
def test_hand_worked_trials(tokens, objects, answer):
    solved, obeys = solve(torch.tensor([tokens]), grid(objects), distractors=(1, 1))
    assert solved.tolist() == [answer] and obeys.all()


@pytest.mark.parametrize("rule, tokens, objects", [
    (1, {3: (PRODUCT_EVEN, 3, 3, 3, 3)}, {}),  # one operator asks twice for the blue c
    (1, {3: (PRODUCT_EVEN, 1, 1, 4, 8)}, {}),  # two operators ask for the red a
    (1, {2: (GET_COLOR, 3, 0, 0, 0)}, {}),  # GetColor asks for the c, which has to be its own
    (1, {2: (GET_SHAPE, 0, 8, 0, 0)}, {}),  # GetShape asks for what is pink
    (1, {0: (EXIST, 10, 10, 0, 0), 3: (EXIST, 10, 10, 0, 0)}, {(6, 6): (0, 0)}),  # for a brown j that is not there
    (2, {}, {(6, 6): (4, 8)}),  # two pink d
    (2, {}, {(6, 6): (2, 4)}),  # two b, off the answering path
    (2, {}, {(2, 5): (4, 7)}),  # no pink d
    (2, {}, {(0, 0): (6, 6)}),  # no b, off the answering path
    (2, {2: (GET_COLOR, 0, 0, 0, 0)}, {(0, 0): (0, 0)}),  # GetColor asks for nothing
    (3, {}, {(6, 6): (0, 0)}),  # no distractor
    (3, {}, {(8, 8): (5, 5)}),  # two distractors
    (5, {}, {(6, 6): (5, 0)}),  # half an object
    (5, {}, {(6, 6): (0, 4)})])
def test_the_oracle_refuses_on_the_broken_rule_alone(rule, tokens, objects):
    instruction = torch.tensor([[tokens.get(i, token) for i, token in enumerate(TREE3)]])
    _, obeys = solve(instruction, grid({**GRID3, **objects}), distractors=(1, 1))
    assert [r for r, holds in zip(RULES, obeys[0].tolist()) if not holds] == [rule]


# ---- for people -----------------------------------------------------------------------------------------------------

def test_names_questions_and_grids():
    assert [data.name(a) for a in (0, 1, 39, 102, 137)] == ["True", "False", "row 3, column 7", "a", "brown"]
    assert data.describe(torch.tensor(TREE3)).splitlines() == [
        "if SumOdd: do the row and column of the red a add up to an odd number?",
        "  then GetColor: which color is the b?",
        "  else ProductEven: do the row and column of the blue c and the pink d multiply to an even number?"]
    assert data.describe(torch.tensor(TREE5)).splitlines() == [
        "if Exist: is the purple f on the grid?",
        "  then if SumEven: do the row and column of the red a and the green b add up to an even number?",
        "    then GetLocation: where is the cyan h?",
        "    else GetColor: which color is the i?",
        "  else if ProductOdd: do the row and column of the white g multiply to an odd number?",
        "    then GetShape: which letter is brown?",
        "    else SumOdd: do the row and column of the blue c add up to an odd number?"]
    drawn = data.draw(torch.tensor(TREE3), grid(GRID3)[0], color=False)  # brackets: what the answering path asks for
    assert drawn.count("[") == 3 and all(text in drawn for text in ("[a:re", "[c:bl", "[d:pi", " b:or", " e:ye"))


@pytest.mark.parametrize("terminal, no_color, colored", [(True, "", True), (True, "1", False), (False, "", False)])
def test_color_is_for_terminals_that_want_it(terminal, no_color, colored, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    data.main(["--n", "1"])
    assert ("\033[" in capsys.readouterr().out) == colored
