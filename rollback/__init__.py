"""rollback: a PyTorch training run that survives going bad and going down.

`rollback.Guard` is what a training script holds; `rollback launch` starts and watches the job. The guard is loaded on
first use, so that `import rollback` (and with it the command line) does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollback.train.guard import Guard

__all__ = ["Guard", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Guard":
        from rollback.train.guard import Guard

        return Guard
    raise AttributeError(f"module 'rollback' has no attribute {name!r}")
