"""What the tests promise: their names as sentences, of one tree or of two that are compared.

    python scripts/sentences.py                        every sentence of the working tree, and its file
    python scripts/sentences.py 1b9ceec                the same of a git revision (a folder does as well)
    python scripts/sentences.py 1b9ceec a70e836        what is gone, new and moved between two trees

A test is known by its sentence, without file, class and parameters: one that moves to another file is the same. It is
moved where its files differ, and said twice where a tree has it in several. Read from the sources, so that a tree need
not run, nor import. Exit code 1: a sentence is gone, or fewer tests have it.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests"

Sentences = dict[str, list[str]]
"""The files of each sentence, in order; a file is named once for each test of that name in it."""


def sources(tree: str) -> Iterator[tuple[str, bytes]]:
    """Path and text of each file of tests, of a folder or a git revision. Exits where it is neither."""
    if Path(tree).is_dir():
        for path in sorted(Path(tree, TESTS).rglob("test_*.py")):
            yield str(path.relative_to(tree)), path.read_bytes()
        return
    done = subprocess.run(["git", "archive", tree, TESTS], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{tree} is neither a folder nor a git revision with {TESTS}/: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in sorted(archive, key=lambda member: member.name):
            file = archive.extractfile(member)
            if file is not None and Path(member.name).match("test_*.py"):
                yield member.name, file.read()


def sentences_of(tree: str) -> Sentences:
    """Raises SyntaxError naming the file that cannot be read."""
    found: Sentences = defaultdict(list)
    for path, text in sources(tree):
        for name in _tests(ast.parse(text, path)):
            found[name.removeprefix("test_").replace("_", " ")].append(path)
    return dict(found)


def _tests(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Names of what pytest collects: functions, and methods of classes that are called Test."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test_"):
            yield child.name
        elif isinstance(child, ast.ClassDef) and child.name.startswith("Test"):
            yield from _tests(child)


def comparison(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Lines of what is `gone`, `new`, `moved`, and `fewer`: tests of a name that several had."""
    both = sorted(old.keys() & new.keys())
    return {
        "gone": [f"{sentence}: {', '.join(old[sentence])}" for sentence in sorted(old.keys() - new.keys())],
        "new": [f"{sentence}: {', '.join(new[sentence])}" for sentence in sorted(new.keys() - old.keys())],
        "moved": [
            f"{sentence}: {', '.join(old[sentence])} -> {', '.join(new[sentence])}"
            for sentence in both
            if old[sentence] != new[sentence] and len(old[sentence]) == len(new[sentence])
        ],
        "fewer": [
            f"{sentence}: {', '.join(old[sentence])} -> {', '.join(new[sentence])}"
            for sentence in both
            if len(old[sentence]) > len(new[sentence])
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [TREE [OTHER]]"
    )
    parser.add_argument("tree", nargs="?", default=str(ROOT), help="a folder or a git revision (default: this tree)")
    parser.add_argument("other", nargs="?", help="another one, to compare it with")
    arguments = parser.parse_args()
    old = sentences_of(arguments.tree)
    if arguments.other is None:
        for sentence, files in sorted(old.items()):
            print(f"{sentence}: {', '.join(files)}")
        return 0
    new = sentences_of(arguments.other)
    compared = comparison(old, new)
    for title, lines in compared.items():
        print(f"{title}: {len(lines)}")
        for line in lines:
            print(f"    {line}")
    print(f"{len(old)} sentences in {arguments.tree}, {len(new)} in {arguments.other}")
    return int(bool(compared["gone"] or compared["fewer"]))


if __name__ == "__main__":
    sys.exit(main())
