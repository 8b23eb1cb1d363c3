"""Accelerate's second version of FSDP on CPUs: by itself it looks at the plugin on an accelerator alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType


@contextmanager
def sharded_on_cpu() -> Iterator[None]:
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *given: Any, fsdp_plugin: Any = None, **others: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = begin_sharded
    try:
        yield
    finally:
        AcceleratorState.__init__ = begin
