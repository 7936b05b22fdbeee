"""Python expressions in hostile texts: values and arithmetic are evaluated, and nothing that could run code.

sympy reads text by evaluating Python, and so do some tasks of reasoning-gym. What a text could run there could write
its own verdict, or change the process for the texts that come after it.
"""

import ast
import builtins
from functools import cache
from typing import Any

_PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.expr_context),
)
_ROOTS = ("sqrt", "cbrt", "root", "real_root")


def evaluate(code: str) -> Any:
    """The value of an expression of constants, containers and operators; raises `ValueError` for anything else."""
    text = str(code).strip()
    for node in ast.walk(ast.parse(text, mode="eval")):
        _check(isinstance(node, _PLAIN))
    return builtins.eval(text, {"__builtins__": {}})


@cache
def guard_sympy() -> None:
    """From here on, sympy reads only numbers, symbols and functions of mathematics, in this process."""
    from sympy import Basic
    from sympy.parsing import sympy_parser

    read = sympy_parser.eval_expr

    def harmless(name: str, *scopes: dict[str, Any]) -> bool:
        found = next((scope[name] for scope in scopes if name in scope), None)
        return name in _ROOTS or isinstance(found, Basic) or (isinstance(found, type) and issubclass(found, Basic))

    def guarded(code: Any, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        _check(isinstance(code, str))
        for node in ast.walk(ast.parse(code.strip(), mode="eval")):
            named = isinstance(node, ast.Name) and harmless(node.id, local_dict, global_dict)
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords
            _check(named or called or isinstance(node, _PLAIN))
        return read(code, local_dict, global_dict)

    sympy_parser.eval_expr = guarded


def _check(harmless: bool) -> None:
    if not harmless:
        raise ValueError("a text is never evaluated as Python")
