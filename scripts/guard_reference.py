"""Write the reference in docs/guard.md: the docstrings of what a script uses, and the settings.

python scripts/guard_reference.py            write it
python scripts/guard_reference.py --check    exit 1 if it is not what would be written
"""

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

import rollback
from rollback.config import Settings
from rollback.train.state.kept_values import KeptValues

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guard.md"
_MARK = "<!-- made by scripts/guard_reference.py from the docstrings -->\n"
_OWN = {"__iter__": "iter(guard)", "__next__": "next(guard)", "__len__": "len(guard)"}
"""Special methods that scripts use, as they write them."""


def page(present: str) -> str:
    """What is written by hand in the present page, and behind it the reference."""
    by_hand = present.split(_MARK, maxsplit=1)[0]
    parts = [
        _section("`rollback.Guard(...)`", rollback.Guard),
        *_members(),
        _section("What `guard.keep` returns", KeptValues),
        _settings(),
    ]
    return by_hand + _MARK + "\n" + "\n".join(parts)


def _members() -> Iterator[str]:
    for name, member in sorted(_public(rollback.Guard).items(), key=lambda item: _place(item[1])):
        yield _section(f"`{_OWN.get(name) or f'guard.{name}{_arguments(member)}'}`", member)


def _public(kind: type) -> dict[str, Any]:
    found = {name: member for base in reversed(kind.__mro__[:-1]) for name, member in vars(base).items()}
    return {name: member for name, member in found.items() if not name.startswith("_") or name in _OWN}


def _place(member: Any) -> tuple[bool, int]:
    """In the order of the source; the guard's loop first."""
    getter: Any = member.fget if isinstance(member, property) else member
    function: Any = inspect.unwrap(getter)
    return not function.__qualname__.startswith("Guard."), function.__code__.co_firstlineno


def _arguments(member: Any) -> str:
    if isinstance(member, property):
        return ""
    known = list(inspect.signature(member).parameters.values())[1:]
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in known]
    return str(inspect.Signature(bare))


def _section(title: str, thing: Any) -> str:
    return f"### {title}\n\n{inspect.getdoc(thing)}\n"


def _settings() -> str:
    rows = [f"| `{name}` | {_default(field)} | {_meaning(field)} |" for name, field in Settings.model_fields.items()]
    return "\n".join([
        "### Settings",
        "",
        "Keyword arguments of `Guard`. Those of the command line (`rollback launch --snapshot-every 50`) win.",
        "",
        "| setting | default | |",
        "|---|---|---|",
        *rows,
        "",
    ])  # fmt: skip


def _meaning(field: FieldInfo) -> str:
    shown = f", such as `{field.examples[0]!r}`" if field.examples and field.examples[0] != field.default else ""
    return f"{field.description}{shown}"


def _default(field: FieldInfo) -> str:
    return f"`{field.default!r}`" if field.default not in (None, ()) else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the reference in docs/guard.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    present = PAGE.read_text()
    if not parser.parse_args().check:
        PAGE.write_text(page(present))
    elif present != page(present):
        sys.exit(f"{PAGE.name} is out of date: run python scripts/guard_reference.py")
