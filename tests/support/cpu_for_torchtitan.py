"""torchtitan on a machine without an accelerator: import it first, or `cpu_for_torchtitan.py SCRIPT ARGUMENTS`.

What stands in for what is not there:

- its kernels for expert parallelism, which are written in triton: nothing, they are not called;
- what it asks of an accelerator: a name, an amount of memory, statistics;
- flex attention, which has no backward on a CPU: torch's `scaled_dot_product_attention`;
- FSDP2's scaled sums, which gloo does not have: sums;
- `torch.distributed.set_timeout`, which releases of torch may not have yet: what it is made of.

A script that it is given trains in float32, too: with bfloat16 a CPU needs many times as long.
"""

import importlib
import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule


class _NoKernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Cpu(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _sum(self: FSDPModule, factor: float) -> None:
    self.set_force_sum_reduction_for_comms(True)
    _set_gradient_divide_factor(self, factor)


cpu: Any = _Cpu("cpu")
cpu.current_device = lambda: 0
cpu.get_device_name = lambda device: "cpu"
cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 34)
cpu.memory_stats = lambda device: {}
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None

sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = _NoKernels("kernels")
utils: Any = importlib.import_module("torchtitan.tools.utils")
utils.device_type, utils.device_module = "cpu", cpu
attention: Any = importlib.import_module("torchtitan.models.common.attention")
layers: Any = importlib.import_module("torchtitan.models.common.config_utils")
layers.get_attention_config = lambda backend: attention.ScaledDotProductAttention.Config()
_set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = _sum  # type: ignore[method-assign]
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _set_pg_timeout  # type: ignore[attr-defined]

if __name__ == "__main__":
    importlib.import_module("torchtitan.config").TORCH_DTYPE_MAP["bfloat16"] = torch.float32
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
