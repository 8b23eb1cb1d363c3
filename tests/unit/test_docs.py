"""What the documents name exists: commands, flags, files, tests, links; and the adoption diff is the real one."""

import difflib
import re
from pathlib import Path
from typing import get_args

import click
import pytest
import typer

import cli_reference
import guard_reference
from facts import FACTS
from rollback.cli import app
from rollback.errors import ExitCode
from rollback.supervisor.nodes.protocol import RunResult
from rollback.train.last_snapshot.agreement import Commitment, HostOffer, HostShards, JointPlan

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "launch").glob("**/*.md")])
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OTHERS = {
    "--help", "--version", "--nproc-per-node", "--most",
    "--now",  # systemctl
    "--kill-on-bad-exit", "--nodes", "--open-mode", "--requeue", "--signal", "--wait",  # Slurm
}  # fmt: skip


def options(command: click.Command) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*map(options, getattr(command, "commands", {}).values()))


def script_flags() -> set[str]:
    """Flags of our scripts: what they hand to argparse, or compare with."""
    scripts = [*(ROOT / "scripts").iterdir(), *(ROOT / "scripts" / "examples").glob("*.py")]
    sources = [path.read_text() for path in scripts if path.is_file()]
    return {flag for text in sources for flag in re.findall(r"--[a-z][a-z-]*[a-z]", text)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_flags_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    quoted = [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    (\S.*)$", text, re.MULTILINE)]
    for match in filter(None, (re.match(r"rollback ([a-z]+)(?: ([a-z]+))?", item) for item in quoted)):
        name, word = match.groups()
        assert name in COMMANDS, f"`rollback {name}` is not a command"
        assert word in getattr(COMMANDS[name], "commands", [word]), f"`rollback {name} {word}` is not a command"
    known = OTHERS | script_flags() | {flag for command in COMMANDS.values() for flag in options(command)}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text):
        assert flag in known, f"{flag} is not a flag of any command or script"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_directory_that_a_command_of_a_document_writes_into_is_made_first(document: Path) -> None:
    text = document.read_text()
    for command in re.findall(r"^    (rollback (?!launch).*)$", text, re.MULTILINE):
        for folder in re.findall(r" (?:-o|--output|--dcp|--plot) (\S+)/[^/\s]+", command):
            made, used = (text.find(line) for line in (f"    mkdir -p {folder}\n", command))
            assert 0 <= made < used, f"`{command}` is refused where there is no {folder}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    for name in re.findall(r"(?:scripts|tests|docs|rollback)/[\w./-]*\w", text):
        assert (ROOT / name).exists() or (ROOT / f"{name}.py").exists(), f"{name} does not exist"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), f"the link to {target} is dead"


def test_tests_that_a_document_names_exist() -> None:
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    } | {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for document in DOCUMENTS:
        for name in re.findall(r"\b(test_\w+)\b", document.read_text()):
            assert name in defined, f"{document.name} names {name}, which is not a test"


def test_the_readme_lists_the_exit_codes() -> None:
    table = (ROOT / "README.md").read_text().split("## Exit codes")[1].split("##")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == sorted(ExitCode)


def test_the_command_line_reference_is_what_help_prints() -> None:
    assert cli_reference.PAGE.read_text() == cli_reference.reference(), "run python scripts/cli_reference.py"


def test_the_guard_s_reference_is_what_its_docstrings_say() -> None:
    present = guard_reference.PAGE.read_text()
    assert present == guard_reference.page(present), "run python scripts/guard_reference.py"


def adoption_diff() -> str:
    plain, guarded = (
        (ROOT / "scripts" / name).read_text().splitlines() for name in ("train_gpt_plain.py", "train_gpt.py")
    )
    lines = difflib.unified_diff(plain, guarded, "train_gpt_plain.py", "train_gpt.py", lineterm="", n=1)
    return "\n".join(f"{line}" for line in lines)


def test_the_adoption_diff_in_the_readme_is_the_real_one_and_short() -> None:
    diff = adoption_diff()
    shown = (ROOT / "README.md").read_text().split("<!-- adoption:begin -->")[1].split("<!-- adoption:end -->")[0]
    assert shown == f"\n```diff\n{diff}\n```\n", "run `python tests/unit/test_docs.py` to bring README.md up to date"
    changed = [line for line in diff.splitlines()[2:] if line.startswith(("+", "-"))]
    assert len(changed) <= 6


def test_the_data_are_followed_through_code_that_is_there() -> None:
    page = (ROOT / "docs/follow-the-data.md").read_text()
    hops = re.findall(r"\[`([\w.]+)`\]\(\.\./(rollback/[\w/]+\.py)\)", page)
    assert hops
    for name, path in hops:
        for part in name.split("."):
            assert re.search(rf"(?:class|def) {part}\b", (ROOT / path).read_text()), f"{name} is not in {path}"


def glossary() -> list[tuple[str, str]]:
    """The terms of docs/glossary.md, with the module of each."""
    rows = re.findall(r"^\| (.*?) \| .* \| `(.*?)` \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    return [(term, module) for terms, module in rows for term in terms.split(" (")[0].split(", ")]


def test_each_term_of_the_glossary_lives_in_a_module_and_is_used() -> None:
    others = [path for path in DOCUMENTS if path.name != "glossary.md"]
    used = " ".join(path.read_text() for path in [*others, *(ROOT / "rollback").rglob("*.py")])
    words = " ".join(re.sub(r"[\W_]+|(?<=[a-z])(?=[A-Z])", " ", used).lower().split())
    assert len(glossary()) > 90
    for term, module in glossary():
        assert (ROOT / module).is_file(), f"the glossary's {term} lives in {module}, which does not exist"
        assert re.search(rf"\b{term.lower()}", words), f"nobody uses the glossary's {term}"


def test_a_term_of_the_glossary_is_explained_once() -> None:
    terms = re.findall(r"^\| (.*?) \| .* \| `.*?` \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert sorted(terms) == sorted(set(terms))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split("<!-- adoption:begin -->")
    after = rest.split("<!-- adoption:end -->")[1]
    readme.write_text(f"{before}<!-- adoption:begin -->\n```diff\n{adoption_diff()}\n```\n<!-- adoption:end -->{after}")


def test_what_hosts_tell_each_other_of_a_last_snapshot_is_named_in_the_format() -> None:
    page = (ROOT / "docs/format.md").read_text()
    for key, told in (("offer", HostOffer), ("plan", JointPlan), ("shards", HostShards), ("commitment", Commitment)):
        row = re.search(rf"^\| `N/{key}\b.*$", page, re.MULTILINE)
        assert row, key
        assert [name for name in told.model_fields if f"`{name}`" not in row[0]] == [], key


def test_the_result_that_the_leader_tells_is_named_in_the_format() -> None:
    row = re.search(r"^\| `result` .*$", (ROOT / "docs/format.md").read_text(), re.MULTILINE)
    assert row
    assert [name for name in RunResult.model_fields if f"`{name}`" not in row[0]] == []


def words_of(hint: object) -> list[str]:
    """The texts that a type with a Literal in it allows."""
    own = [word for word in get_args(hint) if isinstance(word, str)]
    return own + [word for part in get_args(hint) if part not in own for word in words_of(part)]


def test_each_word_that_a_fact_may_have_is_named_in_the_format() -> None:
    page = (ROOT / "docs/format.md").read_text()
    words = {word for kind in FACTS for field in kind.model_fields.values() for word in words_of(field.annotation)}
    assert "lost_peer" in words
    assert sorted(word for word in words if f"`{word}`" not in page) == []


def test_a_link_leads_to_a_heading_that_is_there() -> None:
    def anchors(page: Path) -> set[str]:
        lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}

    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", document.read_text()):
            page = document.parent / target if target else document
            assert anchor in anchors(page), f"{document.name} links to {target}#{anchor}, which is no heading"


def test_code_of_ours_that_a_docstring_names_is_there() -> None:
    for path in (ROOT / "rollback").rglob("*.py"):
        for name in re.findall(r"`(rollback(?:\.\w+)+)`", path.read_text()):
            *room, last = name.split(".")
            place = ROOT.joinpath(*room)
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            inside = (place / last).is_dir() or (place / f"{last}.py").is_file()
            there = inside or (module.is_file() and re.search(rf"\b{last}\b", module.read_text()))
            assert there, f"{path}: there is no {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_line_of_text_is_wider_than_the_code_s(document: Path) -> None:
    """Tables and code have lines of their own length."""
    in_code, wide = False, []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if not in_code and len(line) > 120 and not line.startswith(("|", "    ", "<!--")):
            wide.append(number)
    assert wide == []
