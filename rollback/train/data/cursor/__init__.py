"""Cursors: where a run is in its data, and how it gets to another place there.

| loader | kind | goes to batch b by | skip reads data |
|---|---|---|---|
| map-style `DataLoader`, also torchdata's, any sampler, any workers | map-style | index | no |
| has `state_dict` and `load_state_dict` (a streaming data set) | stateful | its own state | yes |
| callable without arguments, or iterator, that draws what it returns | drawn | its random state | yes |
| iterable anew from the start (list, `DataLoader` of an `IterableDataset`) | re-iterated | reading b batches | yes |
"""

from rollback.train.data.cursor.base import Cursor
from rollback.train.data.cursor.choose import cursor_for

__all__ = ["Cursor", "cursor_for"]
