"""Journals whose hash chain is right, whatever their lines say."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_vouched(path: Path, bodies: Iterable[dict[str, Any]]) -> None:
    """bodies: what each line says besides `seq` and `chain`, which are given to it here."""
    chain, lines = "0" * 32, []
    for seq, body in enumerate(bodies):
        said = {"at": "2030-01-01T00:00:00+00:00", "attempt": 1, **body, "seq": seq}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        chain = hashlib.sha256((chain + text).encode("utf-8", "surrogatepass")).hexdigest()[:32]
        lines.append(json.dumps({**said, "chain": chain}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
