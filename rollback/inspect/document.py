"""The documents of the reading commands: what each of their JSON schemas is made of.

Fields may be added within a version; a field that changes its meaning or goes away makes a new version.
Times are UTC, ISO 8601. `null` always means "not known from the record", never zero.
"""

import json
import re
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field
from pydantic_core import PydanticSerializationError

_Item = TypeVar("_Item", bound="ReportItem")
_NOT_PLAIN = re.compile("[\x7f-\U0010ffff]")  # others stand in texts only, where JSON has escapes


def fields_of(source: object | None, *names: str) -> dict[str, Any]:
    """These fields of a fact or record; null where there is none."""
    return {name: getattr(source, name, None) for name in names}


class ReportItem(BaseModel, frozen=True, extra="forbid", ser_json_inf_nan="strings"):
    """Base of everything in a report."""

    @classmethod
    def of(cls: type[_Item], source: BaseModel, **own: Any) -> _Item:
        """Made of the fields of a fact or record that have the same names, and of others."""
        return cls(**source.model_dump(include=cls.model_fields.keys() - own.keys()), **own)

    def to_json(self) -> str:
        """JSON in ASCII only, so that text from a journal cannot control a terminal."""
        try:
            text = self.model_dump_json(by_alias=True, indent=2)
        except PydanticSerializationError:  # a directory whose name is no UTF-8, which Python reads as surrogates
            text = json.dumps(self.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=False)
        if text.isascii() and "\x7f" not in text:  # nearly always
            return text
        return _NOT_PLAIN.sub(lambda found: json.dumps(found[0])[1:-1], text)


class Document(ReportItem):
    """Base of the JSON documents of commands, version 1 of their schemas."""

    schema_version: Literal[1] = Field(1, alias="schema")


class Point(ReportItem):
    step: int = Field(description="optimizer updates done before it")
    batch: int = Field(description="position in the data stream")
