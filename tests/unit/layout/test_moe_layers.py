"""--moe-layer-freq is read as Megatron evaluates it, without evaluating it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.layout import LayoutError, moe_layer_pattern
from tests.helpers.upstream_source import functions_of

entries = st.lists(st.sampled_from("01"), max_size=4).map(lambda items: f"[{','.join(items)}]")
expressions = st.recursive(
    entries,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("+".join),
        st.tuples(inner, st.integers(0, 4)).map(lambda pair: f"({pair[0]})*{pair[1]}"),
        st.tuples(st.integers(0, 3), st.integers(0, 3), inner).map(lambda t: f"({t[0]}+{t[1]})*({t[2]})"),
    ),
    max_leaves=6,
)


def megatron(text):
    import re

    return functions_of("megatron", "training/arguments.py", ["moe_freq_type", "_eval_pattern"], re=re).moe_freq_type(
        text
    )


@settings(max_examples=60, deadline=None)
@given(expressions)
def test_expressions_mean_what_megatron_makes_of_them(text):
    theirs = megatron(text)
    assert list(moe_layer_pattern(text, len(theirs))) == [bool(entry) for entry in theirs]


@pytest.mark.parametrize("freq, layers", [("[0]*3+[1]*75", 78), ("[0,1]*24", 48), ("[1]*1", 1), ("2", 7), (3, 7)])
def test_known_forms(freq, layers):
    theirs = megatron(freq)
    expected = [layer % theirs == 0 for layer in range(layers)] if isinstance(theirs, int) else theirs
    assert list(moe_layer_pattern(freq, layers)) == expected


def test_lists_are_taken_as_they_are():
    assert moe_layer_pattern([0, 1, 1], 3) == moe_layer_pattern((0, 1, 1), 3) == (False, True, True)


@pytest.mark.parametrize(
    "freq, message",
    [
        ("[0]*3+[1]*58", "describes 61 layers, --num-layers is 12"),
        ("[0] * 3 + [1] * 9", "without blanks"),
        ("__import__('os').system('false')", "digits"),
        ("[0]*3+1", "a list and a number cannot be added"),
        ("[0]*[1]", "cannot be repeated"),
        ("[0]*9999999999", "more than any model has layers"),
        ("[[0]*3]*4", "must be a number, or a list of 1"),
        ("[0,2]*6", "must be a number, or a list of 1"),
        ("[0*3", "does not read as a list"),
        ("[1][0]", "is no list, sum or repetition"),
        ("often", "does not read as a list"),
        ([0, True] * 6, "must be a number, or a list of 1"),
        (0, "is 0, must be >= 1"),
        ("-1", "is -1, must be >= 1"),
        (None, "is None"),
    ],
)
def test_what_describes_no_layers_is_refused(freq, message):
    """The text used to reach eval(); nothing but sums and repetitions of lists is understood now."""
    with pytest.raises(LayoutError, match="--moe-layer-freq: .*" + message) as caught:
        moe_layer_pattern(freq, 12)
    if "--moe-layer-freq " in caught.value.try_ and "*5" not in caught.value.try_:
        assert len(moe_layer_pattern(caught.value.try_.split()[1], 12)) == 12
