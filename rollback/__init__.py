"""rollback: a PyTorch training run that survives going bad and going down.

`rollback.Guard` is what a training script holds, `rollback.protect` puts one into the loop of a library;
`rollback launch` starts and watches the job. Both are loaded on first use, so that `import rollback` (and with it the
command line) does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollback.train.guard import Guard
    from rollback.trainers.protect import protect

__all__ = ["Guard", "__version__", "protect"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Guard":
        from rollback.train.guard import Guard

        return Guard
    if name == "protect":
        from rollback.trainers.protect import protect

        return protect
    raise AttributeError(f"module 'rollback' has no attribute {name!r}")
