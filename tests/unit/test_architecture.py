"""The rules of the house: imports point one way, only the ranks' rooms know torch, no module is a maze."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "rollback").rglob("*.py"))


def test_the_name_of_a_class_or_a_type_means_one_thing() -> None:
    defined = Counter(
        name for path in MODULES for node in ast.parse(path.read_text()).body if (name := _type_defined_by(node))
    )
    assert [name for name, count in defined.items() if count > 1] == []


def _type_defined_by(node: ast.stmt) -> str | None:
    """The class or the alias of a type. Constants are in capitals, and a TypeVar is of its module alone."""
    if isinstance(node, ast.ClassDef):
        return node.name
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            is_variable = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "TypeVar"
            return name if re.match("[A-Z]", name) and not name.isupper() and not is_variable else None
    return None


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by that name alone."""
    counted = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counted.items() if count > 1] == []


def test_a_type_checker_reads_the_types_in_the_installed_package() -> None:
    """Without this file it takes `rollback.Guard` for Any (PEP 561), and a misspelt method is found at night."""
    assert (ROOT / "rollback/py.typed").is_file()


def test_the_map_in_the_design_is_the_tree() -> None:
    rows = re.findall(r"^\| `rollback/(.*?)/?` \| .* \| (.*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    tree: dict[str, list[str]] = {}
    for path in MODULES:
        if path.stem not in ("__init__", "__main__"):
            tree.setdefault(str(path.parent.relative_to(ROOT / "rollback")).removeprefix("."), []).append(path.stem)
    assert {room: sorted(modules.split(", ")) for room, modules in rows} == tree


def test_imports_point_one_way() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    found = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("rollback", cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    order.prepare()  # CycleError names the circle


def test_a_module_is_read_in_one_sitting() -> None:
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 400] == []


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"create_time\(|boot_time\(|btime", id="processes are told apart by the time of day"),
        pytest.param(r"^\s*(import|from) +c?pickle\b|torch\.(save|load)\(", id="something is pickled"),
    ],
)
def test_no_module_does_what_none_may(pattern: str) -> None:
    assert [path for path in MODULES if re.search(pattern, path.read_text(), re.MULTILINE)] == []


def test_trainers_go_by_what_a_guard_shows() -> None:
    """They stand on its public face, as scripts do."""
    guards = ("guard", "_guard")
    private = [
        (path, ast.unparse(node))
        for path in MODULES if "trainers" in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        and ast.unparse(node.value).rpartition(".")[2] in guards
    ]  # fmt: skip
    assert private == []
