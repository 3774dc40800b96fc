"""Graders of text: DAPO's answer line, token F1, multiple choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.rm_hub.f1 import f1_score, normalize_answer
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward, find_letter
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer

# ---- dapo ----


@pytest.mark.parametrize(
    ("solution", "label", "correct", "pred"),
    [
        ("Answer: 5", "5", True, "5"),
        ("thus\nANSWER  :  5", 5, True, "5"),
        ("Answer: 1\nAnswer: 5", "5", True, "5"),
        ("Answer: 5\nAnswer: 1", "5", False, "1"),
        ("Answer: $x = 5$", "5", True, "5"),
        ("Answer: $5$.", "5", True, "5"),
        ("Answer: 1,234", "1234", True, "1234"),
        ("Answer: 5", "5.0", True, "5"),
        ("Answer: 2", "2.5", False, "2"),  # the label is not cut to an integer
        ("Answer: 2.5", "2.5", True, "2.5"),
        ("Answer: $\\frac12$", r"\frac{1}{2}", True, r"\frac{1}{2}"),  # a label that is no number
        ("Answer: $\\text{east}$", "east", True, "east"),
        ("Answer: 12345678901234567891", "12345678901234567891", True, "12345678901234567891"),
        ("Answer: nan", "nan", True, "nan"),
        ("Answer: 5", "", False, "5"),
        ("Answer: 5", None, False, "5"),
        ("it is 5", "5", False, "[INVALID]"),
        ("Answer: 5" + "." * 300, "5", False, "[INVALID]"),  # outside the window
        ("", "5", False, "[INVALID]"),
    ],
)
def test_dapo(solution, label, correct, pred):
    assert compute_score(solution, label) == {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


@pytest.mark.parametrize(
    ("solution", "correct", "pred"),
    [
        (r"\boxed{5}", True, "5"),
        (r"\boxed{1}\boxed{5}", True, "5"),
        (r"\boxed{5.0}", False, "5.0"),
        ("5", False, "[INVALID]"),
        (r"\boxed{5}" + "." * 100, False, "[INVALID]"),
    ],
)
def test_dapo_strict_box(solution, correct, pred):
    score = compute_score(solution, "5", strict_box_verify=True)
    assert (score["acc"], score["pred"]) == (correct, pred)


def test_dapo_strict_box_looks_from_before_the_last_pause_token():
    solution = r"\boxed{5}" + "." * 200
    assert compute_score(solution, "5", True, pause_tokens_index=[1, 2, 3, 100])["acc"]


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("an apple", "apple"),
        ("5 dollars", "5"),
        (r"5\text{m}", "5"),
        (r"\mbox{cm}5", r"5"),
        (r"1,\text{and}x", "1,x"),
        (r"\textbf{7}", "7"),
        (r"\overline{ab}", "ab"),
        (r"\boxed{3}", "3"),
        ("sqrt3", "sqrt{3}"),
        ("the value $x$ here", "x"),
        ("90^\\circ", "90"),
        ("5<|im_end|>", "5"),
        ("1,2", "12"),
        ("1,x", "1,x"),
    ],
)
def test_minerva_normal_form(answer, form):
    assert normalize_final_answer(answer) == form


# ---- f1 ----


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("The cat!", "cat", 1.0),
        ("a big cat", "the cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),
        ("no", "noanswer", 0.0),
        ("", "cat", 0.0),
        ("one two three four", "three four five six", 0.5),
    ],
)
def test_f1(prediction, truth, score):
    assert f1_score(prediction, truth) == pytest.approx(score)
    assert f1_score(truth, prediction) == pytest.approx(score)


@given(
    st.lists(st.sampled_from(["cat", "dog", "ant"]), max_size=5), st.lists(st.sampled_from(["cat", "dog"]), max_size=5)
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(prediction, truth):
    common, rest = 0, list(truth)
    for word in prediction:
        if word in rest:
            rest.remove(word)
            common += 1
    precision, recall = common / max(len(prediction), 1), common / max(len(truth), 1)
    expected = 2 * precision * recall / (precision + recall) if common else 0.0
    assert f1_score(" ".join(prediction), " ".join(truth)) == pytest.approx(expected)


def test_f1_normal_form():
    assert normalize_answer("  The  A.B. of an owl's theatre ") == "ab of owls theatre"


# ---- gpqa ----


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is C", "C"),
        ("the answer is (b).", "B"),
        ("Answer: D", "D"),
        ("final answer: **B**", "B"),
        (r"The answer is \boxed{C}", "C"),
        ("The answer is C because A is wrong", "C"),
        ("the answer is b because", "B"),
        ("I choose option B, not C", "B"),
        ("C is the correct one", "C"),
        ("d is correct", "D"),
        ("Option A is right", "A"),
        ("the answer is correct", None),  # not the C of "correct"
        ("the answer is a mixture", None),  # not the article
        ("The choice I made was D", "D"),
        ("the answer is Z, so B", "B"),  # not a valid letter
        ("A or B? B", "B"),
        ("DNA and C4", None),
        ("B's rule", None),
        ("", None),
    ],
)
def test_letters_must_stand_alone(text, letter):
    assert find_letter(text, "ABCDEFGHIJ") == letter


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is B", "B", {}, 1),
        ("The answer is A", "B", {}, 0),
        ("The answer is A</think>The answer is B", "b", {}, 1),
        ("The answer is B", 1, {}, 1),
        ("The answer is B", 1, {"correct_letter": "C"}, 1),  # an index comes first
        ("The answer is C", "red", {"correct_letter": "c"}, 1),
        ("The answer is B", "Blue whale", {"choices": ["Ant", "blue  whale!"]}, 1),
        ("The answer is A", "Blue whale", {"choices": ["Ant", "blue whale"]}, 0),
        ("The answer is Y", "two", {"choices": {"X": "one", "Y": "two"}}, 1),
        ("It says E", "B", {"valid_letters": ["A", "B"]}, 0),
        ("surely the blue whale", "Blue whale", {"choices": ["Ant", "blue whale"]}, 1),
        ("it is forty two", None, {"correct_answer": "Forty-two"}, 1),
        ("it is 142", None, {"answer_text": "42"}, 0),  # whole words
        ("vitamin c helps", "C", {}, 0),
        ("", "B", {}, 0),
    ],
)
def test_gpqa(response, label, metadata, reward):
    assert compute_gpqa_reward(response, label, metadata) == reward
