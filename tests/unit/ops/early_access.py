"""Memory that a compiled kernel accesses before it waits for the preceding kernel, by parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator

from triton.compiler import CompiledKernel

STATEMENT = re.compile(r"(?:[{}\s]|\$?\w+:\s)*(?:@!?%?\w+\s+)?([a-z][\w.:]*)\s+(.*)", re.DOTALL)
MEMORY = re.compile(r"(?:ld|st|atom|red|prefetch|cp|multimem)\b[\w.:]*\.global\b")
WAIT = "griddepcontrol.wait"
UNKNOWN = "an address that was read from memory"

CONSTANTS = {
    "dovetail.core.ops.kernels.norm:_rms_norm": {"weight_ptr", "after_ptr"},
    "dovetail.core.ops.kernels.wide_norm:_wide_qk_norm": {"weight_ptr"},
    "dovetail.core.ops.kernels.layernorm:_layer_norm": {"weight_ptr", "bias_ptr"},
    "dovetail.core.ops.kernels.matmul:_matmul": {"weight_ptr"},
    "dovetail.core.ops.kernels.matmul:_rescale": {"weight_scale_ptr", "bias_ptr"},
    "dovetail.core.ops.kernels.packed_matmul:_packed_matmul": {"codes_ptr"},
    "dovetail.core.ops.kernels.prefetch_matmul:matmul_prefetching": {"weight_source", "weight_ptr"},
    "dovetail.core.ops.kernels.specialized_matmul:matmul_specialized": {"weight_source"},
    "dovetail.core.ops.kernels.rounded_packed:packed_rounded": {"source", "scale_source", "zero_source"},
    "dovetail.core.ops.kernels.specialized_packed:packed_specialized": {"source", "scale_source", "zero_source"},
    # The second product's tiles: the first one waited for the kernel that wrote them.
    "dovetail.core.ops.kernels.specialized_experts:experts_specialized": {"source", "tiles_ptr"},
    # Addresses of mailboxes.
    "dovetail.plugins.collective.symm_mem.kernels:one_shot": {"weight_ptr", "peers_ptr"},
    "dovetail.plugins.collective.symm_mem.kernels:two_shot": {"weight_ptr", "peers_ptr"},
    "dovetail.plugins.collective.symm_mem.kernels:argmax_over_ranks": {"peers_ptr"},
    # Mapping of outputs to parts.
    "dovetail.plugins.adapter.lora.kernel:_expand": {"blocks_ptr"},
    # The plan: the product of queries and up-projections comes between. Weights.
    "dovetail.plugins.attention.triton.latent_kernel:attend_latents": {"items_ptr", "table_ptr"},
    "dovetail.plugins.attention.triton.latent_values:project_ranges": {"items_ptr", "value_ptr"},
    # The plan and keys of earlier steps, both older than the preceding kernel.
    "dovetail.plugins.attention.triton.hopper.decode:attend_decode": {
        *("items_ptr", "first_pages_ptr", "table_ptr", "k_ptr", "v_ptr", "k_scale", "v_scale"),
        *("rope_ptr", "q_weight_ptr", "k_weight_ptr"),
    },
}
"""Parameters that kernels may read before the preceding kernel has ended, since no running kernel writes them."""


def touched_before_waiting(kernel: CompiledKernel) -> set[str]:
    """Parameters through which global memory is read, or "written", before griddepcontrol.wait. A kernel launched with
    PDL must contain that instruction exactly once, and no path around it, since the next kernel waits for this one
    alone."""
    ptx = kernel.asm["ptx"]
    if not kernel.metadata.launch_pdl:
        assert "griddepcontrol" not in ptx
        return set()
    text = re.sub(r"//.*|^\s*\.loc.*", "", ptx[ptx.index(".entry") :], flags=re.M)
    before, *after = text.split(WAIT)
    assert len(after) == 1, f"waits {len(after)} times"
    around = set(re.findall(r"\bbra\S*\s+(\$\w+)", before)) - set(re.findall(r"(\$\w+):", before))
    # Specialized warps take different paths, of which one waits.
    assert not around or "setmaxnreg" in ptx, f"branches around the wait, to {around}"
    names = list(parameters(kernel.src.signature))
    pointers = {name for name, kind in kernel.src.signature.items() if kind.startswith(("*", "tensordesc"))}
    # Register -> the parameters that it was computed from.
    origin: dict[str, set[str]] = {}
    touched: set[str] = set()
    for statement in _leading_to_the_wait(text[text.index("{") :]):
        if not (found := STATEMENT.match(statement)):
            continue
        operation, operands = found.groups()
        registers = re.findall(r"%\w+", operands)
        if given := re.search(r"_param_(\d+)", operands):
            # Pointers to scratch memory follow the kernel's own parameters.
            origin[registers[0]] = set(names[int(given[1]) : int(given[1]) + 1]) & pointers
        elif MEMORY.match(operation):
            addresses = re.findall(r"\[\s*(%\w+)", operands)
            # The first operand of a copy is its destination in shared memory.
            address = addresses[operation.startswith("cp") and "shared" in operation]
            writes = operation.startswith(("st", "atom", "red"))
            touched |= {name + ", written" * writes for name in origin.get(address) or {UNKNOWN}}
        elif registers:
            origin.setdefault(registers[0], set()).update(*(origin.get(register, ()) for register in registers[1:]))
    return touched


def _leading_to_the_wait(text: str) -> Iterator[str]:
    """Yield the statements before the wait, in order, without blocks from which no path leads to it: those of other
    specialized warps, which begin after it but may be placed first."""
    blocks: list[tuple[list[str], list[str], set[str | None]]] = [([], [], set())]
    for statement in text.split(";"):
        *names, rest = re.split(r"(\$\w+):", statement)
        if names:
            blocks[-1][2].add(None)
            blocks.append((names[1::2], [], set()))
        _, statements, targets = blocks[-1]
        statements.append(rest)
        if jump := re.search(r"(@!?%\w+\s+)?\bbra\S*\s+(\$\w+)", rest):
            targets |= {jump[2], *([None] if jump[1] else [])}
            blocks.append(([], [], set()))
        elif re.match(r"\s*(ret|exit|trap|brx)\b", rest):
            blocks.append(([], [], set()))
    (last,) = (n for n, (_, statements, _) in enumerate(blocks) if any(WAIT in one for one in statements))
    leading, before = {last}, None
    while leading != before:
        before = set(leading)
        names_of = {name for n in leading for name in blocks[n][0]}
        leading |= {n for n, (_, _, to) in enumerate(blocks) if to & names_of or (None in to and n + 1 in leading)}
    for n in sorted(leading):
        for statement in blocks[n][1]:
            if WAIT in statement:
                break
            yield statement


def parameters(signature: dict[str, str]) -> Iterator[str]:
    """Kernel parameter of each PTX parameter. A tensor map is passed with its shape and strides."""
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):
            dims = kind[kind.index("[") + 1 : kind.index("]")].count(",") + 1
            yield from [name] * (1 + 2 * dims)
        elif kind != "constexpr":
            yield name
