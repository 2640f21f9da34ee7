"""Compilation of kernels for a GPU on a machine without one, to find in CI what only the compiler detects.

Triton's interpreter runs a kernel as Python. It accepts a variable that changes its type, a loop that cannot be
unrolled, an instruction that the hardware lacks, and blocks larger than shared memory or registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """A GPU to compile for."""

    name: str
    processors: int
    """Number of SMs."""
    capability: tuple[int, int]
    shared_bytes: int
    """Maximum shared memory of one block."""


H200 = EmulatedGpu("NVIDIA H200", 132, (9, 0), 227 << 10)
GPUS = (
    EmulatedGpu("NVIDIA A100-SXM4-80GB", 108, (8, 0), 163 << 10),
    EmulatedGpu("NVIDIA A10", 72, (8, 6), 99 << 10),
    EmulatedGpu("NVIDIA L40S", 142, (8, 9), 99 << 10),
    H200,
    EmulatedGpu("NVIDIA B200", 148, (10, 0), 227 << 10),
)
"""One GPU of each architecture for which kernels must compile."""
SHARED_BYTES = H200.shared_bytes


@dataclass(slots=True)
class Compiled:
    """Kernels that were compiled."""

    launches: int = 0
    functions: set[str] = field(default_factory=set)
    """Every @triton.jit function that some launch contained, as "module:name"."""
    kernels: list[tuple[str, CompiledKernel]] = field(default_factory=list)
    """Name and compiled kernel of each launch; `asm` holds "ptx" and "cubin"."""
    variants: dict[tuple[str, str], None] = field(default_factory=dict)
    """Name and Triton's cache key (types, alignment, constants, options), in the order of the first launches."""


def compiled_for_hopper(machine_code: bool = True) -> AbstractContextManager[Compiled]:
    """`compiled_for` an H200."""
    return compiled_for(H200, machine_code)


@contextmanager
def compiled_for(gpu: EmulatedGpu, machine_code: bool = True, one_each: bool = False) -> Iterator[Compiled]:
    """Compile kernels for a GPU at their launch instead of running them. device="cuda" gives tensors without data.

    Compiler errors are raised at the launch. With machine_code=False nothing is compiled and only the variants are
    recorded, which takes milliseconds per launch. With one_each=True, the same is done for all variants of a kernel
    but its first. Call the functions that launch kernels, so that types, alignment, options and block sizes are the
    real ones. Code that reads a tensor's values fails.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    compiled = Compiled()
    run, inline, compile_variant = JITFunction.run, CodeGenerator.call_JitFunction, JITFunction._do_compile
    touched: set[JITFunction] = set()

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        touched.add(kernel)
        compiled.functions.add(_name(kernel))
        compiled.launches += 1
        found = run(kernel, *args, grid=grid, warmup=True, **options)
        if not isinstance(found, CompiledKernel):
            return found
        compiled.kernels.append((_name(kernel), found))
        if found.metadata.shared > gpu.shared_bytes:
            raise ValueError(
                f"{_name(kernel)} needs {found.metadata.shared} bytes of shared memory, but a block of {gpu.name} has "
                f"at most {gpu.shared_bytes}: use smaller blocks or fewer stages than {found.metadata.num_stages}"
            )
        return found

    def note(kernel: JITFunction, key: str, *how: Any) -> Any:
        known = any(name == _name(kernel) for name, _ in compiled.variants)
        compiled.variants[_name(kernel), key] = None
        if machine_code and not (one_each and known):
            return compile_variant(kernel, key, *how)
        in_memory = kernel.device_caches[DEVICE][0]
        in_memory[key] = key
        return key

    def call(self: CodeGenerator, fn: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.functions.add(_name(fn))
        return inline(self, fn, *args, **options)

    before = driver._active
    driver.set_active(_Driver(gpu.capability))
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(JITFunction, "run", compile_only))
            stack.enter_context(patch.object(JITFunction, "_do_compile", note))
            stack.enter_context(patch.object(CodeGenerator, "call_JitFunction", call))
            stack.enter_context(patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
            stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda device=None: gpu.capability))
            major, minor = gpu.capability
            properties = SimpleNamespace(
                name=gpu.name,
                multi_processor_count=gpu.processors,
                major=major,
                minor=minor,
                shared_memory_per_block=48 << 10,
                shared_memory_per_block_optin=gpu.shared_bytes,
            )
            stack.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device=None: properties))
            stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
            stack.enter_context(warnings.catch_warnings())
            # Triton reads the address to check its alignment; without data it is 0.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            stack.enter_context(FakeTensorMode())
            stack.enter_context(_IndexByDispatch())
            yield compiled
    finally:
        driver._active = before
        for kernel in touched:
            kernel.device_caches.pop(DEVICE, None)


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers and stack of one thread, the latter in bytes. A stack holds registers that were spilled."""

    registers: int
    stack: int


def resources(kernel: CompiledKernel) -> Resources:
    """Read a kernel's resources from its machine code with the disassembler that Triton brings."""
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "--dump-resource-usage", cubin.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", used)
    if found is None:
        raise ValueError(f"{tool} printed no resources: {used}")
    return Resources(int(found[1]), int(found[2]))


DEVICE = "emulated H200"
"""Key in Triton's in-memory caches, distinct from real devices, so that no real launch finds these kernels."""


class _Driver:
    """Minimal Triton driver for compilation."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        major, minor = self._capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> str:
        return DEVICE

    def get_current_stream(self, device: str) -> int:
        return 0


class _IndexByDispatch(TorchFunctionMode):
    """Replaces x[0], x[1:] and copy_ by dispatched functions: a CPU build of torch rejects indexing of a fake CUDA
    tensor, and copies to one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], int):
            return args[0].select(0, args[1])
        if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice(args[0], 0, args[1].start, args[1].stop, args[1].step or 1)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        return func(*args, **(kwargs or {}))


def _name(fn: JITFunction) -> str:
    return f"{fn.__module__}:{fn.__name__}"
