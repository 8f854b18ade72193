"""The shape of the code, read from its syntax trees: who may import whom, the arguments that docstrings explain.

Every check takes the folder of a package and returns violations as `file:line: what is wrong`. Each is run on hsd_jax,
where it must find nothing, and on a small package with a fault for each, where it must find its own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hsd_jax"

# A module imports only from its own layer and from those before it.
LAYERS = [
    "validation",
    "axes types config",
    "host",
    "tokenizer kernels",
    "models",
    "infer",
    "drafters",
    "settings pair",
    "planning",
    "api inputs prefixes setup session",
    "measure",
    "__init__",
    "train",
    "lab serve",
    "cli",
]
INFER_LAYERS = [
    "sampling chains controls levels tree",
    "rules",
    "adapt",
    "round",
    "plain rows",
    "loop",
]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def parsed(path: Path, written: int) -> ast.Module:
    """The syntax tree of a file, parsed once for all checks while it is as it was `written`, in nanoseconds."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules(package: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """Path, dotted name and syntax tree of every module of a package."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield path, name, parsed(path, path.stat().st_mtime_ns)


def at(package: Path, path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(package.parent)}:{line}: {text}"


def imports(path: Path, name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, inside functions too: `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = name.split(".")
                parents = parents[: len(parents) - node.level + (path.name == "__init__.py")]
                source = ".".join([*parents, source]).rstrip(".")
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def is_below(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def rank_in(layers: list[str], name: str) -> int | None:
    return next((rank for rank, members in enumerate(layers) if name in members.split()), None)


def rank(name: str) -> tuple[int, int] | None:
    """The place of a module in the order, inside `infer` as second number; None where it has no place yet."""
    parts = name.split(".")
    if len(parts) == 1:  # what users import knows the library, not the rooms that are built with it
        return rank_in(LAYERS, "__init__"), 0
    outer = rank_in(LAYERS, parts[1])
    if outer is None or parts[1] != "infer":
        return None if outer is None else (outer, 0)
    inner = rank_in(INFER_LAYERS, parts[2]) if len(parts) > 2 else len(INFER_LAYERS)
    return None if inner is None else (outer, inner)


def wrong_directions(package: Path) -> list[str]:
    """Imports against the order of the layers, and modules that have no place in it."""
    all_of_them = list(modules(package))
    known = {name for _, name, _ in all_of_them}
    found = []
    for path, name, tree in all_of_them:
        own = rank(name)
        if own is None:
            found.append(at(package, path, 1, f"{name} has no layer: add it to the layers in {__name__}"))
            continue
        for line, imported in imports(path, name, tree):
            if not is_below(imported, package.name):
                continue
            while imported not in known and "." in imported:  # an object of a module, not a module
                imported = imported.rpartition(".")[0]
            other = rank(imported)
            if other is not None and other > own:
                found.append(at(package, path, line, f"{name} imports {imported}, which is built on top of it"))
    return found


def foreign_imports(package: Path) -> list[str]:
    """Libraries where they do not belong."""
    found = []
    for path, name, tree in modules(package):
        inner = name.partition(".")[2]
        for line, imported in imports(path, name, tree):
            if is_below(imported, "torch", "pickle", "flax.nnx"):
                found.append(at(package, path, line, f"imports {imported}: no module may"))
            if is_below(imported, "flax.linen") and not is_below(inner, "models"):
                found.append(at(package, path, line, f"imports {imported}: only models/ may"))
            if is_below(imported, "optax", "orbax") and not is_below(inner, "train"):
                found.append(at(package, path, line, f"imports {imported}: only train/ may"))
    return found


def wrong_arguments(package: Path) -> list[str]:
    """Arguments that a docstring explains and the function, or the class it is of, does not take."""
    found = []
    for path, _, tree in modules(package):
        for node in ast.walk(tree):
            if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                continue
            explained = re.search(r"^Args:\n((?:  .*\n|\n)*)", (ast.get_docstring(node) or "") + "\n", re.MULTILINE)
            names = re.findall(r"^  (\w+(?:, \w+)*):", explained[1], re.MULTILINE) if explained else []
            taken = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}
            taken |= {ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)}
            wrong = set(", ".join(names).split(", ")) - taken if names else set()
            found += [at(package, path, node.lineno, f"{node.name} takes no {name}") for name in sorted(wrong)]
    return found


def undefined_names(package: Path) -> list[str]:
    """Names that nothing in their module binds. (Ruff cannot look where letters in strings are dimensions.)"""
    found = []
    for path, _, tree in modules(package):
        bound = {"__file__", "__name__", *dir(builtins)}
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
                bound.add(node.name)
        loads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in bound]
        found += [at(package, path, node.lineno, f"{node.id} is defined nowhere") for node in loads]
    return found


def loop_callers(package: Path) -> list[str]:
    """Calls of the compiled loop of a decoder: who wants rounds asks `Decoder.run`, so caches grow in one place."""
    found = []
    for path, _, tree in modules(package):
        for owner, node in owned(tree):
            callee = node.func if isinstance(node, ast.Call) else None
            if isinstance(callee, ast.Attribute) and callee.attr == "loop" and owner != "run":
                found.append(at(package, path, node.lineno, f"{owner} calls the loop: only `Decoder.run` may"))
    return found


def owned(tree: ast.AST, owner: str = "the module") -> Iterator[tuple[str, ast.AST]]:
    """Every node with the name of the innermost function around it."""
    for node in ast.iter_child_nodes(tree):
        yield owner, node
        yield from owned(node, node.name if isinstance(node, FUNCTIONS) else owner)


CHECKS = [wrong_directions, foreign_imports, wrong_arguments, undefined_names, loop_callers]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package(check):
    violations = check(PACKAGE)
    assert not violations, "\n" + "\n".join(violations)


FAULTY = '''\
"""Each check has something here."""
import optax
from hsd_jax.models import target
def f(x):
    """Does.

    Args:
      x, reach: how far.
    """
    return Placement(3)
def g(d, *given):
    return d.loop(*given)
'''


def test_each_check_finds_its_fault(tmp_path):
    (tmp_path / "hsd_jax").mkdir()
    (tmp_path / "hsd_jax/types.py").write_text(FAULTY)
    found = {check.__name__: check(tmp_path / "hsd_jax") for check in CHECKS}
    assert found == {
        "wrong_directions": ["hsd_jax/types.py:3: hsd_jax.types imports hsd_jax, which is built on top of it"],
        "foreign_imports": ["hsd_jax/types.py:2: imports optax: only train/ may"],
        "wrong_arguments": ["hsd_jax/types.py:4: f takes no reach"],
        "undefined_names": ["hsd_jax/types.py:10: Placement is defined nowhere"],
        "loop_callers": ["hsd_jax/types.py:12: g calls the loop: only `Decoder.run` may"],
    }


TESTS = Path(__file__).resolve().parent
SHARED = {"support", "oracles"}
"""The folders of `tests/` whose modules others may import."""


def crossed_tests(tests: Path) -> list[str]:
    """Test modules that another module imports, and folders of tests that mirror none of the package."""
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    found = [f"{path.name}: no folder of the package" for path in tests.iterdir() if is_stray(path, rooms)]
    for path, name, tree in modules(tests):
        for line, imported in imports(path, name, tree):
            inner = imported.removeprefix(f"{tests.name}.")
            if re.search(r"(^|\.)test_", inner) or is_below(inner, *rooms):
                found.append(
                    at(tests, path, line, f"imports {imported}: only {' and '.join(sorted(SHARED))} are shared")
                )
    return found


def is_stray(path: Path, rooms: set[str]) -> bool:
    return path.is_dir() and path.name not in rooms | SHARED and any(path.glob("*.py"))


def test_tests_mirror_the_package_and_share_through_support():
    assert crossed_tests(TESTS) == []
