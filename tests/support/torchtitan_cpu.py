"""torchtitan on a machine without an accelerator: import it first. What stands in for what is not there:

- its kernels for expert parallelism, which are written in triton;
- what it asks of an accelerator: a name, an amount of memory, statistics;
- `torch.distributed.set_timeout`, which releases of torch that it runs with may not have yet.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


class _NoKernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Cpu(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = _NoKernels("kernels")

import torchtitan.tools.utils

cpu: Any = _Cpu("cpu")
cpu.current_device = lambda: 0
cpu.get_device_name = lambda device: "cpu"
cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 34)
cpu.memory_stats = lambda device: {}
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", cpu
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]
