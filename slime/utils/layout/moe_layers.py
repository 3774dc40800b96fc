"""Which decoder layers are mixtures of experts: Megatron's --moe-layer-freq, read without evaluating it as code."""

import ast
import re

from slime.utils.layout.errors import LayoutError

FLAG = "--moe-layer-freq"
MAX_ENTRIES = 100_000  # more than any model has layers; keeps "[1]*9999999999" from filling the memory


def moe_layer_pattern(freq: str | int | list | tuple, num_layers: int) -> tuple[bool, ...]:
    """Per decoder layer, whether it is MoE.

    freq: n makes every n-th layer MoE, starting with the first; a list says 1 (MoE) or 0 (dense) layer by layer; a
    text is either, the list written with [ ] , + * and parentheses: "[0]*3+[1]*75". As in Megatron there are no
    blanks. Raises LayoutError if it does not describe `num_layers` layers.
    """
    value = _parse(freq) if isinstance(freq, str) else freq
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise LayoutError((FLAG,), f"is {value}, must be >= 1 (n: every n-th layer is MoE, from the first on)")
        return tuple(layer % value == 0 for layer in range(num_layers))
    if not isinstance(value, list | tuple) or not all(type(entry) is int and entry in (0, 1) for entry in value):
        raise LayoutError(
            (FLAG,), f"is {freq}, must be a number, or a list of 1 (MoE) and 0 (dense)", _example(num_layers)
        )
    if len(value) != num_layers:
        raise LayoutError(
            (FLAG,), f"{freq} describes {len(value)} layers, --num-layers is {num_layers}", _example(num_layers)
        )
    return tuple(entry == 1 for entry in value)


def _example(num_layers: int) -> str:
    return f"{FLAG} [0]*1+[1]*{num_layers - 1}" if num_layers > 1 else f"{FLAG} 1"


def _parse(text: str) -> int | list:
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        return int(text)
    try:
        if "[" not in text or re.search(r"[^\d\[\](),+*]", text):
            raise ValueError("only digits and [ ] ( ) , + * may occur, without blanks")
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise LayoutError(
            (FLAG,), f"{text!r} does not read as a list of layers: {reason}", f"{FLAG} [0]*3+[1]*5"
        ) from error


def _value(node: ast.expr) -> int | list:
    """The value of a sum, product or list of integers. ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _add(_value(left), _value(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeat(_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)} is no list, sum or repetition")


def _add(left: int | list, right: int | list) -> int | list:
    if isinstance(left, list) != isinstance(right, list):
        raise ValueError("a list and a number cannot be added")
    return left + right


def _repeat(left: int | list, right: int | list) -> int | list:
    if isinstance(left, list):
        left, right = right, left
    if isinstance(left, list):
        raise ValueError("a list cannot be repeated a list of times")
    entries = len(right) if isinstance(right, list) else right
    if left * entries > MAX_ENTRIES:
        raise ValueError(f"{left} x {entries} is more than any model has layers")
    return left * right
