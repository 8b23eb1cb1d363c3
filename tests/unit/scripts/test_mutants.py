"""Mutation testing itself: which changes it makes, where, and that what stands does what the mutant would."""

import subprocess
import sys
from pathlib import Path

import pytest

import mutants
from mutants import MODULES, argued
from mutations import mutants_of
from rollback.checkpoints import retention

SOURCE = b'''"""Text, which decides nothing: 1 < 2."""

LIMIT = 7
MEMORY = 1 << 20

class Kind:
    field: int = 3

    @property
    def small(self) -> bool:
        return self.count < LIMIT and not self.done

def least(values, bound=2):
    assert values, "never 3"
    if not values:
        raise ValueError(f"{bound + 1} values")
    total = 0
    for value in values:
        if value:
            continue
        total += min(value, bound)
    say("told")
    del values[0]
    return total
'''


def test_each_change_is_of_one_place_and_is_told_by_function_and_line() -> None:
    found = {(mutant.function, mutant.before, mutant.after) for mutant in mutants_of("m", "m.py", SOURCE)}
    small, least = "return self.count < LIMIT and not self.done", "def least(values, bound=2):"
    assert found == {
        ("", "LIMIT = 7", "LIMIT = 8"), ("", "LIMIT = 7", "LIMIT = 6"),
        ("Kind.small", small, "return None"),
        ("Kind.small", small, small.replace("<", "<=")), ("Kind.small", small, small.replace("<", ">=")),
        ("Kind.small", small, small.replace("and", "or")), ("Kind.small", small, small.replace("not ", "")),
        ("least", least, least.replace("2", "3")), ("least", least, least.replace("2", "1")),
        ("least", "if not values:", "if values:"),
        ("least", 'raise ValueError(f"{bound + 1} values")', "pass"),
        ("least", "total = 0", "total = 1"),
        ("least", "if value:", "if not (value):"), ("least", "continue", "pass"),
        ("least", "total += min(value, bound)", "total -= min(value, bound)"),
        ("least", "total += min(value, bound)", "total += max(value, bound)"),
        ("least", "total += min(value, bound)", "pass"),
        ("least", "del values[0]", "pass"), ("least", "return total", "return None"),
    }  # fmt: skip


def test_lines_may_move_without_a_mutant_becoming_another_one() -> None:
    moved = SOURCE.replace(b"class Kind", b"# a comment\n\n\nclass Kind")
    keys = [[mutant.key for mutant in mutants_of("m", "m.py", source)] for source in (SOURCE, moved)]
    assert keys[0] == keys[1]


def test_what_stands_does_what_the_mutant_would_whoever_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: it stays so."""
    path = "checkpoints/retention.py"
    found = mutants_of("retention", path, Path(retention.__file__).read_bytes())
    place = next(n for n, mutant in enumerate(found) if mutant.after == "while len(staying) >= keep and (name := "
                 "_least_missed(staying, fixed)) is not None:")  # fmt: skip
    code = f"""
from pathlib import Path
from mutant_trials import put_in_place
from mutations import mutants_of
from rollback.checkpoints.retention import choose_evictions
names = ["c000000-s00000000", "c000001-s00000010", "c000002-s00000020"]
assert len(choose_evictions(names, names, (), 3)) == 0
put_in_place(mutants_of("retention", {path!r}, Path({retention.__file__!r}).read_bytes())[{place}])
assert len(choose_evictions(names, names, (), 3)) == 1
"""
    monkeypatch.setenv("PYTHONPATH", str(Path(mutants.__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tests_of_each_trial_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one trial removes the files of another one, whose tests fail then, whatever the mutant does."""
    tests, told = tmp_path / "test_folder.py", tmp_path / "told"
    tests.write_text(f"""
def test_folder(tmp_path_factory):
    with open({str(told)!r}, "a") as file:
        print(tmp_path_factory.getbasetemp(), file=file)
""")
    code = f"""
from pathlib import Path
from mutant_trials import try_mutants
from mutations import mutants_of
found = mutants_of("retention", "checkpoints/retention.py", Path({retention.__file__!r}).read_bytes())
ended = []
try_mutants(found[:4], [{str(tests)!r}], 2, lambda mutant, how: ended.append(how))
assert ended == ["survived"] * 4, ended
"""
    monkeypatch.setenv("PYTHONPATH", str(Path(mutants.__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folders = told.read_text().split()
    assert len(folders) == len({*folders}) == 5, "of four mutants, and of what stands"
    assert not any(Path(folder).exists() for folder in folders)


def test_each_module_has_its_tests_and_what_is_argued_is_argued_in_words() -> None:
    for module, (paths, _) in MODULES.items():
        assert all((mutants.ROOT / "rollback" / path).is_file() for path in paths), module
        assert all(Path(test).is_file() for test in mutants.tests_of(module)), module
    assert all(argued().values())
