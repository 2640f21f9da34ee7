"""Commands and code blocks of the README and the pages, and how tests run them. Every exception is in a table here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

SUBSTITUTIONS = {
    **dict.fromkeys(("/models/Llama-3.1-8B", "/models/Llama-3-8B"), "pkg://dovetail.plugins.model.bundled/tiny"),
    "model.path=out/tiny-gptq quant=auto": "model.path=pkg://dovetail.plugins.model.bundled/tiny quant=w4a8",
    "benchmarks/": f"{ROOT}/benchmarks/",
    "docs/img/": f"{ROOT}/docs/img/",
    "examples/ablations": f"{ROOT}/examples/ablations",
    "--text README.md": f"--text {ROOT}/README.md",
}
"""Placeholder of the pages -> path of the tests."""

COMPOSED_ONLY = {
    "+preset=h200": "needs a GPU",
    "attention=triton": "needs a GPU",
    "attention=flashinfer": "needs a GPU",
    "collective=symm_mem": "needs GPUs",
    "collective.shard_rows": "needs GPUs",
    "+preset=ladder": "takes minutes, or a GPU",
    "app=ladder": "takes minutes, or GPUs",
    "spec_decode:[none,ngram]}": "takes minutes",
    "+preset=h200_bf16_tp1 app=": "needs a GPU",
    "ablate.out=schedulers": "takes minutes; the page has a smaller one",
    "ablate.out=agents_cache": "takes minutes; the page has a smaller one",
    "ablate.out=drafters": "takes minutes, or a GPU; the page has a smaller one",
    "workload=code workload.sampling": "takes a minute",
    "agents_cache_small": "takes half a minute; tests/unit/app/test_ablate.py runs a small one",
    "schedulers_small": "starts processes; the page runs another study",
    "drafters_small": "starts processes; the page runs another study",
    "one_at_a_time": "takes a minute",
    "ablate.gate": "takes minutes; tests/unit/app/test_ablate.py has fake processes",
    "ablate.quality.prompts=2": "starts processes; tests/unit/app/test_ablate.py runs a small one",
    "engine.record=/dev/null": "takes minutes",
    "engine.dp=2": "starts processes; tests/invariance/test_two_replicas.py compares their outputs with those of one",
    "model=small_moe": "starts processes; tests/tp/test_experts.py runs placements",
    "check.rounds=5": "takes a minute; docs/first-plugin.md has one without a benchmark",
    "check.component=scheduler/lottery": "takes a minute; the nightly script has one in tests/third_party/test_new.py",
    "scheduler:[lottery]": "starts processes; tests/unit/app/test_ablate.py runs a small one",
    "quantize.samples=32": "takes 10 s; the page has a smaller one",
    "tree_shape=ranks.json": "needs a file of the page; tests/unit/benchmarks/test_draft_ranks.py makes and uses one",
    "app=quality": "takes minutes; tests/unit/app/test_quality.py runs a small one",
}
"""Commands with these words are only composed and checked (`--cfg job`), except those of `app=plan`."""

NOT_RUN = {
    "pip install -e": "changes the environment; .ci/run does it first of all",
    "pip install 'torch": "changes the environment",
    "pip install 'dovetail[": "changes the environment",
    "pip install .": "done once for every page, without an index (see `installed` in test_pages)",
    "python benchmarks/compare.py vllm": "needs vLLM and a GPU",
    "python benchmarks/compare.py transformers": "tests/unit/benchmarks/test_compare.py runs it",
    "python run.py app=bench bench.url": "needs a server; tests/unit/app/test_bench_server.py has one",
    "python run.py app=serve": "runs until it is stopped; tests/server has one",
    "curl ": "needs a server; tests/server/test_openai.py has one",
    "printf ": "makes a key; tests/server/test_limits.py has one",
    "python benchmarks/profile_step.py": "needs a GPU",
    "python benchmarks/distinct_experts.py": "tests/unit/benchmarks/test_distinct_experts.py runs it",
    "python benchmarks/curve.py": "needs a GPU; tests/unit/benchmarks/test_curve.py runs it without",
    "python benchmarks/kernels.py": "needs a GPU",
    "python benchmarks/attention.py --decode": "needs a GPU",
    "python benchmarks/attention.py --tune": "needs a GPU",
    "python benchmarks/packed.py": "needs a GPU",
    "python benchmarks/startup_kernels.py": "needs a GPU, or compiles for minutes",
    "python benchmarks/matmul.py": "needs a GPU",
    "python benchmarks/layer.py": "needs two GPUs; tests/unit/benchmarks/test_layer.py runs its search without",
    "python benchmarks/allreduce.py": "needs GPUs",
    "python benchmarks/fit_tiles.py": "needs timings of a GPU; tests/unit/tuning/test_model.py has some",
    "python -m pytest tests/gpu/": "needs GPUs",
    "python benchmarks/compare.py table": "needs vLLM and GPUs; tests/unit/benchmarks/test_table.py runs it without",
    "python benchmarks/cpu_step.py --plan": "starts processes; tests/unit/benchmarks/test_cpu_step.py runs it",
    "python benchmarks/layouts.py": "needs GPUs; tests/unit/benchmarks/test_layouts.py runs it without",
    "python benchmarks/simulator_error.py": "needs a GPU; tests/unit/benchmarks/test_simulator_error.py does not",
    "DOVETAIL_NIGHTLY=1 DOVETAIL_WINDOWS=96 pytest": "takes an hour; the nightly script measures fewer windows",
    "python tests/api/surface.py": "changes the checkout; tests/api/test_surface.py tests what it demands",
    "docker ": "needs Docker",
    "sudoedit ": "needs an administrator",
    "GRAFANA_PASSWORD=... ": "needs Docker",
    "kubectl ": "needs a cluster",
    "sudo ": "changes the machine",
    "python -m venv /opt/dovetail": "changes the machine",
    "/opt/dovetail/bin/pip": "changes the machine",
}
"""First words of commands that are not run -> the reason."""

FEW_TOKENS = "generate.max_tokens=4"
"""Added to commands that do not set the length of outputs."""
FEW_PAGES = "engine.kv_pages=512"
"""Added to commands that are run, because a large KV cache would dominate their time. Scripts use the default."""
FEW_WARMUPS = "ablate.warmup=1"
"""Added to ablations that are run: the default would take more requests than the measurement."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """Path in the first line of a block that the reader stores as a file."""
        named = re.match(r"# ([\w./-]+\.(?:py|toml|yaml))\n", self.text)
        return named[1] if named else None


@dataclass(frozen=True)
class Command:
    page: str
    line: str

    @property
    def exit_code(self) -> int:
        stated = re.search(r"# exit code (\d+)$", self.line)
        return int(stated[1]) if stated else 0

    @property
    def why_not_run(self) -> str | None:
        return next((why for start, why in NOT_RUN.items() if self.line.startswith(start)), None)

    @property
    def is_pytest(self) -> bool:
        return self.line.startswith("pytest ")

    @property
    def is_shell(self) -> bool:
        """Whether it is anything but one call of Dovetail's command line."""
        return "|" in self.line or self.line.startswith(("python benchmarks/", "python docs/"))

    @property
    def generates(self) -> bool:
        """Whether it prints generated text and its statistics."""
        return any(word.startswith("generate.max_tokens") for word in self.argv) and "--cfg" not in self.argv

    @property
    def shell(self) -> str:
        text = self.line
        for theirs, ours in SUBSTITUTIONS.items():
            text = text.replace(theirs, ours)
        return text.replace("python run.py", f"python {ROOT}/run.py")

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self._words() if re.match(r"[A-Z_]+=", word))

    @property
    def argv(self) -> list[str]:
        """Return the arguments after `python run.py` or `dovetail`, as the tests pass them."""
        words = [word for word in self._words() if not re.match(r"[A-Z_]+=", word)]
        start = words[2:] if words[:2] == ["python", "run.py"] else words[1:] if words[0] == "dovetail" else None
        assert start is not None, f"{self.page}: no rule for `{self.line}`; add one to tests/docs/commands.py"
        cut = start.index("--") if "--" in start else len(start)
        before, after = start[:cut], start[cut:]
        app = next((word for word in before if word.startswith("app=")), "app=generate")
        app = next((f"app={word.partition('=')[2]}" for word in before if word.startswith("+preset=ladder")), app)
        app = "app=ablate" if "examples/ablations" in self.line else app
        measures = app in ("app=bench", "app=ablate", "app=quality", "app=check") or "ladder" in app
        if (app == "app=generate" or measures) and "--cfg" not in before and not {"--help", "-h"} & set(before):
            limited = app != "app=generate" or any(word.startswith("generate.max_tokens") for word in before)
            before += [] if limited else [FEW_TOKENS]
            before += ["--cfg", "job"] if any(words in " ".join(before) for words in COMPOSED_ONLY) else [FEW_PAGES]
        if app == "app=ablate" and "ablate.warmup" not in self.line and "--cfg" not in before:
            before += [FEW_WARMUPS]
        if app in ("app=serve", "app=tune") and "--cfg" not in before:
            before += ["--cfg", "job"]  # A server would run until it is stopped, and tuning needs a GPU.
        return before + after

    def _words(self) -> list[str]:
        words = shlex.split(self.line, comments=True)
        for theirs, ours in SUBSTITUTIONS.items():
            words = [word.replace(theirs, ours) for word in words]
        return words


def pages() -> dict[str, str]:
    """Return the written pages by path. Generated pages have no commands except those of the registry."""
    return {str(file.relative_to(DOCS)): file.read_text(encoding="utf-8") for file in sorted(DOCS.rglob("*.md"))}


def with_blocks() -> dict[str, str]:
    """Return the README and the written pages by path."""
    return {"README.md": (ROOT / "README.md").read_text(encoding="utf-8"), **pages()}


def blocks(language: str | None = None) -> Iterator[Block]:
    for page, text in with_blocks().items():
        # Generated tables quote the commands that made recorded results.
        text = re.sub(r"<!-- dovetail: .*?<!-- /dovetail -->", "", text, flags=re.S)
        for found, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
            if language in (None, found):
                yield Block(page, found, body)


def commands() -> list[Command]:
    """Return each command once. Equal lines count as one command, except on pages with files."""
    with_files = {block.page for block in blocks() if block.file}
    found: dict[tuple[str, str], Command] = {}
    for block in blocks("bash"):
        assert not block.text.endswith("\\\n"), f"{block.page}: one command a line"
        for line in block.text.splitlines():
            for part in line.split(" && "):
                if part.strip() and not part.startswith("#"):
                    where = block.page if block.page in with_files else ""
                    found.setdefault((where, part), Command(block.page, part.strip()))
    return list(found.values())


def scripts() -> list[Block]:
    """Return the Python blocks that run unchanged."""
    return [block for block in blocks("python") if not block.file]
