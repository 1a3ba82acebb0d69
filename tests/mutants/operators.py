"""Mutation operators that cosmic-ray lacks: faults of a trainer that raise no exception."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import parso
from cosmic_ray.operators.operator import Operator
from parso.tree import NodeOrLeaf

Position = tuple[tuple[int, int], tuple[int, int]]

# Methods without which a tensor or text keeps its shape or type.
REMOVABLE_METHODS = "detach abs nan_to_num clamp clamp_ masked_fill float clone strip copy".split()
IN_PLACE = "+= -= *= |= &=".split()
# Functions whose arguments fail in the opposite order, or mean the same.
ORDERED_FUNCTIONS = """
isinstance getattr hasattr zip range super setattr map filter islice next max min promote_types
""".split()


class Rewrite(Operator):
    """An operator that replaces the code of a node."""

    @classmethod
    def examples(cls) -> tuple[()]:
        """Cosmic-ray asks for them; they are in plan.yaml."""
        return ()

    @abstractmethod
    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        """Each code that replaces the node in a mutant."""

    def mutation_positions(self, node: NodeOrLeaf) -> list[Position]:
        return [(node.start_pos, node.end_pos) for _ in self.rewrites(node)]

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        prefix = node.get_first_leaf().prefix
        return parso.parse(prefix + self.rewrites(node)[index])


def _codes(nodes: Sequence[NodeOrLeaf]) -> list[str]:
    return [node.get_code().strip() for node in nodes]


def _is_expression(node: NodeOrLeaf) -> bool:
    return node.type in ("atom_expr", "power")


class RemoveMethod(Rewrite):
    """`x.detach()` becomes `x`, for the methods of `REMOVABLE_METHODS`."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        mutants = []
        codes = _codes(node.children) if _is_expression(node) else []
        for index, code in enumerate(codes[:-1]):
            if code.removeprefix(".") in REMOVABLE_METHODS and codes[index + 1].startswith("("):
                mutants.append("".join(codes[:index] + codes[index + 2 :]))
        return mutants


class DropOperand(Rewrite):
    """`a & b`, `a and b` and `a or b` lose one operand: a mask or a condition is missing."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        if node.type not in ("and_expr", "and_test", "or_test"):
            return []
        mutants = []
        codes = _codes(node.children)
        for index in range(0, len(codes), 2):
            remaining = codes[:index] + codes[index + 2 :] if index == 0 else codes[: index - 1] + codes[index + 1 :]
            mutants.append(" ".join(remaining))
        return mutants


class DropFilter(Rewrite):
    """A comprehension loses its condition."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        return ["if True"] if node.type == "comp_if" else []


class SwapArguments(Rewrite):
    """The first two positional arguments of a call change places: the student for the teacher."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        if node.type != "arglist" or node.parent is None or node.parent.type != "trailer":
            return []
        if node.parent.get_previous_leaf().value in ORDERED_FUNCTIONS:
            return []
        left, comma, right, *others = node.children
        if {"argument", "string"} & {left.type, right.type}:
            return []
        left_code, right_code = _codes([left, right])
        return [f"{right_code}{comma.get_code()} {left_code}{''.join(child.get_code() for child in others)}"]


class TakeBranch(Rewrite):
    """`torch.where(mask, a, b)` and `a if mask else b` become `a`."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        if node.type == "test" and len(node.children) == 5:
            return [f"({node.children[0].get_code().strip()})"]
        if not _is_expression(node) or _codes(node.children[:2]) != ["torch", ".where"]:
            return []
        arguments = node.children[2].children[1]
        is_full = arguments.type == "arglist" and len(arguments.children) >= 5
        calls = "".join(child.get_code() for child in node.children[3:])
        return [f"({arguments.children[2].get_code().strip()}){calls}"] if is_full else []


class RemoveStatement(Rewrite):
    """A call, an assignment in place, `raise`, `del` or `continue` that stands alone becomes `pass`."""

    def rewrites(self, node: NodeOrLeaf) -> list[str]:
        if node.parent is None or node.parent.type != "simple_stmt":
            return []
        is_call = _is_expression(node) and node.get_code().endswith(")")
        is_in_place = node.type == "expr_stmt" and node.children[1].get_code().strip() in IN_PLACE
        is_jump = node.type in ("raise_stmt", "del_stmt") or node.get_code().strip() == "continue"
        return ["pass"] if is_call or is_in_place or is_jump else []


OPERATORS: dict[str, type[Any]] = {
    operator.__name__: operator
    for operator in (RemoveMethod, DropOperand, DropFilter, SwapArguments, TakeBranch, RemoveStatement)
}
