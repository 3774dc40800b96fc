r"""Mathematical grading: boxes, the two normal forms, equality in value, and answers that try to run or to hang."""

import random
import time

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.rm_hub.deepscaler import final_part, get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.expression import equal_in_value
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
    label_text,
    mathd_normal_form,
)

# ---- boxes ----


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{137}", "137"),  # K30: not "1"
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\fbox{42}", "42"),
        (r"\boxed{1} \fbox{2}", "1"),
        (r"\boxed 5", None),
        (r"\boxed{5", None),
        (r"\boxed}5{", None),
        ("5", None),
        ("", None),
        (r"\boxed{}", ""),
    ],
)
def test_extract_answer(text, content):
    assert extract_answer(text) == content


@given(st.recursive(st.text("ab1", max_size=3), lambda inner: inner.map(lambda s: "{" + s + "}"), max_leaves=4))
def test_any_balanced_content_comes_out_whole(content):
    assert extract_answer(f"text {{ \\boxed{{{content}}} }} end") == content


# ---- equality ----

EQUAL = [
    ("5", "5"),
    (" 5 ", "5."),
    ("5.0", "5"),
    ("05.50", "5.5"),
    (".5", "0.5"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\dfrac{1}2", "1/2"),
    (r"\tfrac{3}{4}", "0.75"),
    ("1,234,567", "1234567"),
    (r"1{,}234", "1234"),
    ("$5", "5"),
    (r"\$1,000", "1000"),
    (r"50\%", "50"),
    ("90^\\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"\text{east}", "east"),
    (r"\text{East}", "east"),
    (r"10\text{ cm}", "10"),
    ("10 meters", "10"),
    ("10 square feet^2", "10 square"),
    ("2.5 million", "2500000"),
    ("x=7", "7"),
    ("7 3/4", r"7\frac{3}{4}"),
    ("-7 3/4", "-7.75"),
    (r"\sqrt3", r"\sqrt{3}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{\frac{1}{2}}{3}", r"\frac{0.5}{3}"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("xy+y", "y(x+1)"),
    (r"2\pi", r"\pi\cdot 2"),
    (r"\frac{x}{2}", "0.5x"),
    ("(1, 2)", "(1,2)"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3,\pi/2)"),
    (r"(\frac{1}{2}, \sqrt{4})", r"(\frac12,\sqrt 4)"),
    (r"[0,\infty)", r"[0, \infty)"),
    ("1 or 2", "1, 2"),
]
DIFFERENT = [
    ("5", "6"),
    ("", "5"),
    ("-5", "5"),
    ("4/2", "2"),  # an integer is asked for
    ("2/4", "1/2"),  # unreduced
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("(1,2]", "(1,2)"),
    ("(1,2)", "[1,2]"),
    ("(1,2,3)", "(1,2)"),
    ("(1,2)", "(2,1)"),
    ("x", "y"),
    ("sqrt(x^2)", "x"),  # not for negative x
    ("1.0000000001", "1.0000000002"),
    (r"e^{2x}", "e^2x"),
    ("parameter", "para"),
    ("1/(2-2)", "2/(1-1)"),
    ("abc", "cba"),  # more letters than two: text only
    ("2^10", "2^5*2^5"),  # two-digit exponents: text only
    ("hello", "5"),
    ("(((((", "5"),
    ("5)", "5"),
    ("1..2", "1.2"),
]


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal_answers(answer, label):
    assert grade_answer(answer, label)
    assert grade_answer(label, answer)


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_answers(answer, label):
    assert not grade_answer(answer, label)


def test_factorials_have_a_value():
    assert equal_in_value("5!/7", "120/7") and not equal_in_value("5!/7", "121/7")
    assert not equal_in_value("99999!", "99999!+1")


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("  x=\\frac12 ", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        ("3/4", r"\frac{3}{4}"),
        (r"\sqrt2+ \sqrt 3", r"\sqrt{2}+\sqrt{3}"),
        ("a .5", "a0.5"),
        (r"\text{yes}", "yes"),
        ("abc=5", "abc=5"),
        (r"5\text{ cm}", "5"),
        (r"\left(1,\!2\right)", "(1,2)"),
    ],
)
def test_mathd_normal_form(answer, form):
    assert mathd_normal_form(answer) == form


def test_the_two_paths_on_their_own():
    assert grade_answer_mathd("0.5", "1/2") and not grade_answer_mathd("0.25", "1/4")
    assert grade_answer_sympy("0.25", "1/4") and not grade_answer_sympy("", "")


@pytest.mark.parametrize(
    ("label", "text"),
    [(None, ""), ("", ""), ("  ", ""), (0, "0"), (3.5, "3.5"), (r"is \boxed{7}", "7"), (r"\boxed{", "")],
)
def test_label_text(label, text):
    assert label_text(label) == text


def test_the_label_zero_is_a_label():
    assert grade_answer_verl(r"\boxed{0}", 0) and not grade_answer_verl(r"\boxed{1}", 0)


def test_no_label_or_no_box_is_wrong():
    assert not grade_answer_verl(r"\boxed{5}", "") and not grade_answer_verl(r"\boxed{}", None)
    assert not grade_answer_verl("5", "5")


# ---- values against sympy, whose parser only sees what this file writes ----


def random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([str(draw.randint(1, 9)), "x", "y", f"{draw.randint(1, 9)}.5", "pi"])
    a, b = random_expression(draw, depth - 1), random_expression(draw, depth - 1)
    shapes = [
        f"({a}+{b})",
        f"({a}-{b})",
        f"({a})*({b})",
        f"({a})/({b}+11)",
        f"sqrt({a}+3)",
        f"({a})^{draw.randint(2, 3)}",
    ]
    return draw.choice(shapes)


@pytest.mark.parametrize("seed", range(25))
def test_values_agree_with_sympy(seed):
    """An expression equals what sympy makes of it by expanding, and no longer does with a thousandth more."""
    draw = random.Random(seed)
    text = random_expression(draw, 3)
    expanded = str(sympy.expand(sympy.sympify(text, rational=True))).replace(" ", "").replace("**", "^")
    if any(token in expanded for token in ("^(", "exp")) or len(expanded) > 300 or "^1" in expanded:
        pytest.skip("sympy writes this one with exponents outside the grammar")
    assert equal_in_value(text, expanded)
    assert not equal_in_value(text, f"{expanded}+1/1000")


# ---- answers that attack ----

ATTACKS = [
    "__import__('os')._exit(1)",
    "exec('1')",
    "().__class__.__bases__[0]",
    "lambda:0",
    "9**9**9**9",
    "9^9^9^9",
    "((((9^9)^9)^9)^9)^9",
    "99999999999999999999!",
    "((9!)!)!",
    "2^" * 100 + "2",
    "9^60!",
    "9^-60!",
    "root(1/60!,9)+x^60!",
    "root(60!,60!)^60!",
    "(" * 200 + "1" + ")" * 200,
    "-" * 290 + "1",
    "sqrt" * 70 + "2",
    "x" * 290,
    "1/" * 140 + "3",
    "9" * 5000,
    "\\frac" * 300,
    "{" * 20000,
    "\\boxed{" * 3000,
    "\\frac{" * 60 + "1" + "}" * 60,
    "1," * 200,
    "$" * 499,
    "(1,2)" * 90,
    "10^9 million billion trillion",
    "9" * 300 + " trillion",
    "\x00\ud7ff٣²",
]


@pytest.mark.parametrize("answer", ATTACKS, ids=range(len(ATTACKS)))
def test_k37_hostile_answers_are_wrong_soon_and_never_run(answer, tmp_path):
    start = time.process_time()
    assert not grade_answer(answer, "137")
    assert not grade_answer(answer, "x^2+1")
    assert grade_answer_verl(f"\\boxed{{{answer}}}", "137") is False
    assert time.process_time() - start < 2.0


def test_k37_python_in_an_answer_has_no_effect(tmp_path):
    target = tmp_path / "ran"
    for code in (f"open('{target}', 'w')", f"__import__('os').system('touch {target}')"):
        assert grade_answer_verl(rf"\boxed{{{code}}}", "1") is False
        assert not equal_in_value(code, "1")
    assert not target.exists()


@given(
    st.text(alphabet="0123456789xy+-*/^!().,\\{}[]sqrtfacpi ", max_size=60),
    st.text("0123456789xy+-*/^!()., ", max_size=20),
)
@settings(max_examples=300, deadline=2000)
def test_arbitrary_text_is_graded_without_an_error(answer, label):
    assert grade_answer(answer, label) in (True, False)
    if label_text(label):
        assert grade_answer(label, label)


# ---- deepscaler ----


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>\boxed{1}</think> \boxed{42}", 1),
        (r"<think>\boxed{42}</think> \boxed{1}", 0),
        (r"<think>\boxed{42}</think> 42", 0),
        (r"so \boxed{42}", 1),  # K12a: no marker
        (r"<think> so \boxed{42}", 0),  # thinking never ended
        (r"reasoning \boxed{1}###Response\boxed{2}###Response\boxed{42}", 1),  # K12b: the last segment
        (r"\boxed{42}###Response\boxed{1}", 0),
        (r"###Response\boxed{42}###Response none", 0),
        (r"</think> \fbox{42}", 1),  # K12c
        (r"a</think>b\boxed{1}</think>\boxed{42.0}", 1),
        ("", 0),
    ],
)
def test_k12_deepscaler(response, reward):
    assert get_deepscaler_rule_based_reward(response, "42") == reward
    assert get_deepscaler_rule_based_reward(response, r"\boxed{42}") == reward
    assert get_deepscaler_rule_based_reward(response, "") == 0


def test_final_part_prefers_the_think_marker():
    assert final_part("a</think>b###Responsec") == "b###Responsec"
    assert final_part("a</think>b</think>c") == final_part("a###Responseb###Responsec") == "c"
