"""The comparison of what two trees of tests promise."""

import subprocess
from pathlib import Path

import pytest

import sentences
from sentences import comparison, sentences_of

OLD = {
    "test_one.py": "def test_it_stays(): ...\ndef test_it_goes(): ...\ndef test_it_is_said_twice(): ...\n",
    "test_two.py": "class TestIt:\n    def test_it_moves(self): ...\ndef test_it_is_said_twice(): ...\ndef help(): ...",
}
NEW = {
    "test_one.py": "def test_it_stays(): ...\ndef test_it_moves(): ...\ndef test_it_is_said_twice(): ...\n",
    "test_two.py": "import pytest\n@pytest.mark.soak\ndef test_it_comes(): ...\n",
}


def tree(root: Path, files: dict[str, str]) -> str:
    (root / "tests" / "unit").mkdir(parents=True)
    for name, text in files.items():
        (root / "tests" / "unit" / name).write_text(text)
    return str(root)


def test_what_is_gone_new_moved_or_said_less_often_is_told_by_sentence(tmp_path: Path) -> None:
    old, new = sentences_of(tree(tmp_path / "old", OLD)), sentences_of(tree(tmp_path / "new", NEW))
    assert old.keys() == {"it stays", "it goes", "it is said twice", "it moves"}
    one, two = "tests/unit/test_one.py", "tests/unit/test_two.py"
    assert comparison(old, new) == {
        "gone": [f"it goes: {one}"],
        "new": [f"it comes: {two}"],
        "moved": [f"it moves: {two} -> {one}"],
        "fewer": [f"it is said twice: {one}, {two} -> {one}"],
    }
    assert comparison(old, old) == {"gone": [], "new": [], "moved": [], "fewer": []}


def test_a_revision_is_read_as_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree(tmp_path, OLD)
    git = ["git", "-C", folder, "-c", "user.name=ann", "-c", "user.email=ann@site"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "tests"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    assert sentences_of("HEAD") == sentences_of(folder)
    with pytest.raises(SystemExit, match="neither a folder nor a git revision"):
        sentences_of("no-such-tree")
