"""Which Ulysses degrees the heads of a model allow: arithmetic on integers, without torch."""

from math import lcm

from lab.errors import RecipeError
from lab.shape import Shape


def degrees(heads: int, kv_heads: int) -> list[int]:
    """Return every Ulysses degree C that the heads allow, in ascending order.

    C divides the H query heads, and one of C and K divides the other, where K is ``kv_heads``.
    """
    return [
        c
        for c in range(1, heads + 1)
        if heads % c == 0 and (kv_heads % c == 0 or c % kv_heads == 0) and heads % kv_heads == 0
    ]


def degree_pairs(shape: Shape, ranks: int) -> list[tuple[int, int]]:
    """Return every pair of a Ulysses and a ring degree whose product is ``ranks``.

    The pair with the largest Ulysses degree is the first. Windows allow no ring that sends: with them,
    the only pair has the largest Ulysses degree that divides the ranks.
    """
    legal = [c for c in reversed(degrees(shape.H, shape.K)) if ranks % c == 0]
    return [(legal[0], 1)] if shape.has_windows else [(c, ranks // c) for c in legal]


def token_multiple(ulysses: int, ring: int) -> int:
    """Return the number that must divide S, the tokens of a sequence.

    All 2R pieces of a ring must have the same length, and all C*R ranks must have equally many tokens, with
    C = ``ulysses`` and R = ``ring``.
    """
    return lcm(2 * ring, ulysses * ring) if ring > 1 else ulysses


def check_ring(shape: Shape, ring: int, exchange: str = "send") -> None:
    """Refuse a ring of several ranks that sends keys, for a model whose layers have windows.

    Raises:
        RecipeError: ``ring`` is above 1, ``exchange`` is "send", and a layer has a window.
    """
    if ring > 1 and exchange == "send" and shape.has_windows:
        raise RecipeError(
            f"ring={ring} with a model whose layers have sliding windows: a rank of a ring has no whole "
            "windows; set ring_exchange='gather', or ring=1 and ulysses to share a sequence"
        )


def check_degree(heads: int, kv_heads: int, degree: int) -> None:
    """Refuse a Ulysses degree that the heads do not allow.

    Raises:
        RecipeError: The degree is not one of ``degrees``; the message has the rule and the degrees that work.
    """
    if degree in degrees(heads, kv_heads):
        return
    rule = (
        f"it does not divide the {heads} query heads"
        if degree < 1 or heads % degree
        else f"of it and the {kv_heads} key/value heads neither divides the other"
    )
    works = ", ".join(map(str, degrees(heads, kv_heads)))
    raise RecipeError(f"ulysses={degree}: {rule}; these work: {works}")
