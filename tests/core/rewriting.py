"""`python rewriting.py SEED` writes digests of tapes, with the intermediates of every `scoped`
function named and kept at random. Without a seed the code runs as it is."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

KEPT: list[Any] = []  # what rewritten functions named, for ever
FAMILIES = (
    "llama",
    "gpt2",
    "gemma2",
    "cohere",
    "phi3",
    "opt",
    "falcon",
    "nemotron",
    "olmo2",
    "bloom",
    "qwen",
    "persimmon",
    "xglm",
)
JOBS: tuple[dict[str, Any], ...] = (
    {"precision": "autocast-bf16", "attention": "eager"},
    {"checkpointing": "full", "optimizer": "sgd"},
    {"method": "lora", "dropout": 0.1},
    {"task": "inference", "new_tokens": 2},
)


class Rewriter(ast.NodeTransformer):
    """Names sub-expressions of scoped functions: those that are evaluated first in a statement, as
    many as chance says, so that the order of evaluation stays."""

    def __init__(self, seed: int) -> None:
        self.chance, self.count, self.changed = random.Random(seed), 0, 0

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.FunctionDef:
        if any(isinstance(one, ast.Name) and one.id == "scoped" for one in function.decorator_list):
            function.body = list(self.block(function.body))
        return function

    def block(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            if isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) and statement.value:
                found = list(calls(statement.value))
                named = found[: self.chance.randint(0, len(found))]
                names: dict[ast.expr, str] = {}
                for one in named:
                    self.count, self.changed = self.count + 1, self.changed + 1
                    name = f"_named_{self.count}"
                    yield assign(name, Replace(names).visit(one))
                    yield ast.parse(f"_KEPT.append({name})").body[0]
                    names[one] = name
                statement.value = Replace(names).visit(statement.value)
            for field in ("body", "orelse"):
                if isinstance(statement, ast.If):
                    setattr(statement, field, list(self.block(getattr(statement, field))))
            yield statement


class Replace(ast.NodeTransformer):
    def __init__(self, names: dict[ast.expr, str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:
        if node in self.names:
            return ast.Name(self.names[node], ast.Load())  # type: ignore[index]
        return super().visit(node)


def assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def calls(node: ast.expr) -> Iterator[ast.expr]:
    """Calls and last uses, in the order in which they are evaluated; none that may not be."""
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from calls(child)
        elif isinstance(child, ast.keyword):
            yield from calls(child.value)
    if isinstance(node, ast.Call) or (isinstance(node, ast.Attribute) and node.attr == "last"):
        yield node


class Loader(SourceFileLoader):
    seed = 0
    changed = 0

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        text = bytes(data).decode()
        tree = ast.parse(text)
        if "import Scope" in text or ", scoped" in text:
            rewriter = Rewriter(Loader.seed)
            rewriter.visit(tree)
            Loader.changed += rewriter.changed
            tree.body.insert(after(tree), ast.parse("from rewriting import KEPT as _KEPT").body[0])
            ast.fix_missing_locations(tree)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def after(tree: ast.Module) -> int:
    """Behind the docstring and `from __future__`."""
    return 1 + max(
        (
            place
            for place, one in enumerate(tree.body)
            if isinstance(one, ast.ImportFrom) and one.module == "__future__"
        ),
        default=-1,
    )


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(("memfit.lower", "memfit.libraries", "memfit.parallel")):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def digests() -> dict[str, str]:
    from memfit.job import Job
    from memfit.lower import lower
    from memfit.model.families import build, families

    found: dict[str, str] = {}
    for name in FAMILIES:
        for number, job in enumerate(JOBS):
            options = {"batch": 2, "seq": 32, **job}
            if name == "qwen":
                options |= {"reentrant": "checkpointing" in job, "attention": "sdpa"}
            model = build(families()[name].examples[0])
            text = repr(lower(model, Job(**options)).events)
            found[f"{name} {number}"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return found


if __name__ == "__main__":
    sys.modules["rewriting"] = sys.modules["__main__"]
    if len(sys.argv) > 1:
        Loader.seed = int(sys.argv[1])
        sys.meta_path.insert(0, Finder())
    sys.stdout.write(json.dumps([digests(), Loader.changed]))
