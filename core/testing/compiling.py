"""Kernels compiled for Hopper on a machine without a GPU: mistakes that only its compiler sees, found in CI.

Triton's interpreter runs a kernel as Python: a variable that changes its type, a loop that cannot be unrolled, an
instruction that the hardware does not have, or blocks larger than its shared memory all pass there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.compiler.code_generator import CodeGenerator
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

NAME, PROCESSORS, CAPABILITY = "NVIDIA H200", 132, (9, 0)
SHARED_BYTES = 227 * 1024
"""What one block may have of a Hopper multiprocessor's shared memory."""


@dataclass(slots=True)
class Compiled:
    """What was compiled."""

    launches: int = 0
    functions: set[str] = field(default_factory=set)
    """Every @triton.jit function that some launch contained, "module:name"."""
    kernels: list[tuple[str, CompiledKernel]] = field(default_factory=list)
    """What each launch compiled: its name, and Triton's result, whose `asm` holds "ptx" and "cubin"."""
    variants: dict[tuple[str, str], None] = field(default_factory=dict)
    """Name, and what Triton tells one compilation of it from another by: types, alignment, constants, options. In the
    order in which they were first launched."""


@contextmanager
def compiled_for_hopper(machine_code: bool = True) -> Iterator[Compiled]:
    """Within, device="cuda" gives tensors without data, and each kernel launch compiles the kernel for an H200, down to
    machine code, in place of running it. What the compiler refuses is raised at the launch. Without `machine_code`
    nothing is compiled, and the variants of kernels are noted alone: milliseconds a launch.

    Call the functions that launch kernels, so that what is compiled is what they would launch: types, alignment,
    options and block sizes. Whatever looks at a tensor's values fails.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET=1 makes kernels Python; compiling them needs a process without it")
    compiled = Compiled()
    run, inline, compile_variant = JITFunction.run, CodeGenerator.call_JitFunction, JITFunction._do_compile
    touched: set[JITFunction] = set()

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        touched.add(kernel)
        compiled.functions.add(_name(kernel))
        compiled.launches += 1
        found = run(kernel, *args, grid=grid, warmup=True, **options)
        if not machine_code:
            return found
        compiled.kernels.append((_name(kernel), found))
        if found.metadata.shared > SHARED_BYTES:
            raise ValueError(
                f"{_name(kernel)} takes {found.metadata.shared} bytes of shared memory and a block may have "
                f"{SHARED_BYTES}: smaller blocks or fewer stages ({found.metadata.num_stages} now)"
            )
        return found

    def note(kernel: JITFunction, key: str, *how: Any) -> Any:
        compiled.variants[_name(kernel), key] = None
        if machine_code:
            return compile_variant(kernel, key, *how)
        in_memory = kernel.device_caches[DEVICE][0]
        in_memory[key] = key
        return key

    def call(self: CodeGenerator, fn: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.functions.add(_name(fn))
        return inline(self, fn, *args, **options)

    before = driver._active
    driver.set_active(_Driver())
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(JITFunction, "run", compile_only))
            stack.enter_context(patch.object(JITFunction, "_do_compile", note))
            stack.enter_context(patch.object(CodeGenerator, "call_JitFunction", call))
            stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
            stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY))
            properties = SimpleNamespace(name=NAME, multi_processor_count=PROCESSORS, major=9, minor=0)
            stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device=None: properties))
            stack.enter_context(warnings.catch_warnings())
            # Triton asks for the address, to see whether it is aligned; without data it is 0.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            stack.enter_context(FakeTensorMode())
            stack.enter_context(_IndexByDispatch())
            yield compiled
    finally:
        driver._active = before
        for kernel in touched:
            kernel.device_caches.pop(DEVICE, None)


DEVICE = "an H200 that is not there"
"""The key of what is compiled here in Triton's caches in memory: no launch on a real device may find it."""


class _Driver:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> str:
        return DEVICE

    def get_current_stream(self, device: str) -> int:
        return 0


class _IndexByDispatch(TorchFunctionMode):
    """A CPU build of torch refuses x[0] and x[1:] of a CUDA tensor before it sees that the tensor is fake; select and
    slice it takes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice(args[0], 0, args[1].start, args[1].stop, args[1].step or 1)
        return func(*args, **(kwargs or {}))


def _name(fn: JITFunction) -> str:
    return f"{fn.__module__}:{fn.__name__}"
