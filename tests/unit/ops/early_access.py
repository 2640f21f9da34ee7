"""What a compiled kernel reaches before it waits for the kernel in front, by parameters that addresses come from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from triton.compiler import CompiledKernel

STATEMENT = re.compile(r"(?:[{}\s]|\$?\w+:\s)*(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s+(.*)", re.DOTALL)
MEMORY = re.compile(r"(?:ld|st|atom|red|prefetch|cp|multimem)\b[\w.:]*\.global\b")
UNKNOWN = "an address that was read from memory"


def touched_before_waiting(kernel: CompiledKernel) -> set[str]:
    """Parameters through which global memory is read, or "written", ahead of griddepcontrol.wait, which a kernel that
    is launched early has once."""
    ptx = kernel.asm["ptx"]
    if not kernel.metadata.launch_pdl:
        assert "griddepcontrol" not in ptx
        return set()
    before, *after = re.sub(r"//.*|^\s*\.loc.*", "", ptx[ptx.index(".entry") :], flags=re.M).split(
        "griddepcontrol.wait"
    )
    assert len(after) == 1, f"waits {len(after)} times"
    names = list(parameters(kernel.src.signature))
    pointers = {name for name, kind in kernel.src.signature.items() if kind.startswith(("*", "tensordesc"))}
    # Register -> the parameters that it was computed from.
    origin: dict[str, set[str]] = {}
    touched: set[str] = set()
    for statement in before[before.index("{") :].split(";"):
        if not (found := STATEMENT.match(statement)):
            continue
        operation, operands = found.groups()
        registers = re.findall(r"%\w+", operands)
        if given := re.search(r"_param_(\d+)", operands):
            # Behind the kernel's own come pointers to scratch memory.
            origin[registers[0]] = set(names[int(given[1]) : int(given[1]) + 1]) & pointers
        elif MEMORY.match(operation):
            addresses = re.findall(r"\[\s*(%\w+)", operands)
            # A copy names where it goes to in shared memory first.
            address = addresses[operation.startswith("cp") and "shared" in operation]
            writes = operation.startswith(("st", "atom", "red"))
            touched |= {name + ", written" * writes for name in origin.get(address) or {UNKNOWN}}
        elif registers:
            origin.setdefault(registers[0], set()).update(*(origin.get(register, ()) for register in registers[1:]))
    return touched


def parameters(signature: dict[str, str]) -> Iterator[str]:
    """Of each of the machine's parameters the kernel's: a tensor map comes with its shape and strides."""
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):
            dims = kind[kind.index("[") + 1 : kind.index("]")].count(",") + 1
            yield from [name] * (1 + 2 * dims)
        elif kind != "constexpr":
            yield name
