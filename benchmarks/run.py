"""Compare headspan with TransformerLens and with the speed of matrix products on this machine.

    python benchmarks/run.py                 all parts, a table on the terminal
    python benchmarks/run.py --only a,c      some of them
    python benchmarks/run.py --write         keep the table in benchmarks/RESULTS.md, whose other sections stay

Every number is a ratio of two things measured in one run, because the machine may be busy. Each is run several times,
and the best time counts. Peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_models import complete_gpt2, random_llama

from headspan.results.scores import Scores

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"


def child(code: str, *arguments: str) -> dict[str, Any]:
    """Run Python code in a separate process; return its wall seconds, CPU seconds and peak memory in MB."""
    probe = (
        "import json, resource, sys, time; started = time.time()\n"
        f"{code}\n"
        "use = resource.getrusage(resource.RUSAGE_SELF)\n"
        # VmHWM, because ru_maxrss starts with the size of the parent process
        "peak = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(json.dumps({'peak_mb': peak / 1024, 'cpu': use.ru_utime + use.ru_stime}))"
    )
    started = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-c", probe, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    wall = time.perf_counter() - started
    if run.returncode != 0:
        raise RuntimeError(f"a benchmark process failed:\n{run.stderr[-2000:]}")
    return {"wall": wall, "stderr": run.stderr, **json.loads(run.stdout.strip().splitlines()[-1])}


def best(code: str, *arguments: str, times: int = 3) -> dict[str, float]:
    runs = [child(code, *arguments) for _ in range(times)]
    return {key: min(run[key] for run in runs) for key in ("wall", "peak_mb", "cpu")}


def sgemm_rate(size: int = 3000, times: int = 5) -> float:
    """Floating-point operations per second of one large float32 product on all cores."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(size, size)).astype(np.float32) for _ in range(2))
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)


# ------------------------------------------------------------------------------------------------ children

OURS = """
import headspan as hs
hs.score(hs.open(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], out=sys.argv[4], memory=sys.argv[5])
"""
SCREEN = """
import headspan as hs
hs.score(hs.open(sys.argv[1]), "pk", sys.argv[2], screen=int(sys.argv[3]), out=sys.argv[4], memory=sys.argv[5])
"""
SEEDED = """
import headspan as hs
from bench_models import Seeded
scores = hs.score(Seeded(*map(int, sys.argv[1].split(","))), "pk", "flow", screen=int(sys.argv[2]), memory=sys.argv[3])
print(json.dumps(scores.provenance["screen"]), file=sys.stderr)
"""
LENS = """
import numpy as np
from transformer_lens.model_bridge import TransformerBridge
model = TransformerBridge.boot_transformers(sys.argv[1])
results = {}
"""
LENS_PK = (
    LENS
    + """
from transformer_lens.tools.analysis.projection_kernel import attention_head_subspace_affinity
for role in "QKV":
    results[role] = attention_head_subspace_affinity(model, target_role=role).scores.detach().numpy()
np.savez(sys.argv[2], **results)
"""
)
LENS_CS = (
    LENS
    + """
for role in "QKV":
    results[role] = model.all_composition_scores(role).scores.detach().numpy()
np.savez(sys.argv[2], **results)
"""
)


# ------------------------------------------------------------------------------------------------ parts


def part_a_b(folder: Path) -> list[tuple[str, ...]]:
    gpt2 = str(complete_gpt2(folder / "gpt2"))
    out = str(folder / "r.safetensors")
    ours_pk = best(OURS, gpt2, "pk", "flow", out, "2GB")
    ours_cs = best(OURS, gpt2, "cs", "flow", out, "2GB")
    ours_all = best(OURS, gpt2, "pk,cs,simple_cs,linear_cka", "all", out, "2GB")
    lens_pk = best(LENS_PK, gpt2, str(folder / "pk.npz"), times=2)
    lens_cs = best(LENS_CS, gpt2, str(folder / "cs.npz"), times=1)

    def row(name: str, ours: dict[str, float], lens: dict[str, float], target: str) -> tuple[str, ...]:
        return (
            name,
            f"{ours['wall']:.2f} s, {ours['peak_mb']:.0f} MB",
            f"{lens['wall']:.1f} s, {lens['peak_mb']:.0f} MB",
            f"{lens['wall'] / ours['wall']:.1f}× the speed, {ours['peak_mb'] / lens['peak_mb']:.2f}× the memory",
            target,
        )

    return [
        row("(a) GPT-2 small, files to result, OQ+OK+OV, PK", ours_pk, lens_pk, "≥ 14× the speed"),
        row("(a) GPT-2 small, files to result, OQ+OK+OV, CS", ours_cs, lens_cs, "≥ 40× the speed"),
        row("(b) 16 pairings of PK, CS, Simple-CS, CKA, against their 3 of PK", ours_all, lens_pk, "> 1×"),
    ]


def part_c(folder: Path) -> list[tuple[str, ...]]:
    """The contraction alone, on given factors: GPT-2-sized and 7B-sized. Only needed pairs count."""
    from headspan.scoring.arrangement import Job
    from headspan.scoring.contraction import contract

    rows = []
    for name, n, p, q in (("d=768, m=64, 576 weights", 576, 768, 64), ("d=2048, m=128, 512 weights", 512, 2048, 128)):
        rng = np.random.default_rng(0)
        factors = {"all": rng.standard_normal((n, q, p), dtype=np.float32).transpose(0, 2, 1)}  # memory layout of a run
        job = Job("all", "all", np.triu(np.ones((n, n), dtype=bool), 1))
        operations = (n * q + np.count_nonzero(job.needed)) * p**2
        seconds, rate = [], sgemm_rate()
        for _ in range(3):
            started = time.perf_counter()
            contract(factors, [job], route="gram")
            seconds.append(time.perf_counter() - started)
            rate = max(rate, sgemm_rate(times=2))
        reached = operations / min(seconds)
        rows.append(
            (
                f"(c) contraction, {name}",
                f"{reached / 1e9:.0f} GFLOP/s",
                f"sgemm {rate / 1e9:.0f} GFLOP/s",
                f"{reached / rate:.0%}",
                "≥ 70%",
            )
        )
    return rows


def part_d_f(folder: Path) -> list[tuple[str, ...]]:
    """All pairs of a 7B shape against the time of the bare operations, and screening against all pairs."""
    layers, heads, d, m = 32, 32, 4096, 128
    model = str(random_llama(folder / "7b", layers, heads, d, m, "bfloat16"))
    rate = sgemm_rate(4000)
    exact = child(OURS, model, "pk", "flow", str(folder / "7b.safetensors"), "9GB")
    rate = max(rate, sgemm_rate(4000))
    screened = child(SCREEN, model, "flow", "100", str(folder / "7b-screened.safetensors"), "9GB")
    n = layers * heads
    pairs = 3 * heads**2 * layers * (layers - 1) // 2
    operations = pairs * d**2 + 4 * n * m * d**2  # all pairs, and each Gram matrix computed once
    ideal = operations / rate
    return [
        (
            "(d) 7B shape (32×32 heads, d=4096, m=128, sharded bf16), OQ+OK+OV, 9 GB given",
            f"{exact['wall']:.0f} s, {exact['peak_mb'] / 1000:.1f} GB",
            f"{ideal:.0f} s for {operations / 1e12:.0f} TFLOP at {rate / 1e9:.0f} GFLOP/s",
            f"{exact['wall'] / ideal:.2f}× the time",
            "≤ 1.5×",
        ),
        (
            "(f) 7B shape, --screen 100, OQ+OK+OV",
            f"{screened['wall']:.0f} s, {screened['peak_mb'] / 1000:.1f} GB",
            f"exact {exact['wall']:.0f} s",
            f"{exact['wall'] / screened['wall']:.1f}× the speed",
            "≥ 8×",
        ),
    ]


def part_g(folder: Path) -> list[tuple[str, ...]]:
    """A 70B shape with ten planted edges, whose weights are generated on the fly."""
    run = child(SEEDED, "80,64,8,8192,128", "20", "12GB")
    about = json.loads(str(run["stderr"]).strip().splitlines()[-1])
    certified = ", ".join(f"{p} {about[p]['certified']} of {about[p]['found']}" for p in ("OQ", "OK", "OV"))
    return [
        (
            "(g) 70B GQA shape (80 layers, 64/8 heads, d=8192, m=128), --screen 20, OQ+OK+OV",
            f"{run['wall']:.0f} s, {run['peak_mb'] / 1000:.1f} GB",
            "",
            f"certified: {certified}",
            "",
        )
    ]


def part_e(folder: Path) -> list[tuple[str, ...]]:
    """Time per pair from 12×12 to 48×25 heads (grids of GPT-2 small to XL with the same d and m)."""
    rows, first = [], None
    for layers, heads in ((12, 12), (24, 16), (36, 20), (48, 25)):
        model = random_llama(folder / f"{layers}x{heads}", layers, heads, 768, 64, "float32")
        run = best(OURS, str(model), "pk", "flow", str(folder / "e.safetensors"), "6GB", times=2)
        pairs = 3 * heads**2 * layers * (layers - 1) // 2
        each = run["wall"] / pairs * 1e6
        first = first or each
        rows.append(
            (
                f"(e) {layers}×{heads} heads, d=768, m=64",
                f"{run['wall']:.2f} s",
                f"{pairs:,} pairs",
                f"{each:.2f} µs per pair, {each / first:.2f}× that of the smallest",
                "≤ 1×",
            )
        )
    return rows


def part_h(folder: Path) -> list[tuple[str, ...]]:
    """Procrustes for all pairings against its unavoidable part: eigenvalues of an m×m matrix per pair, on all cores."""
    from headspan.system.threads import cores, parallel_map

    rows = []
    for name, variable in (("GPT-2 small", "HEADSPAN_GPT2_DIR"), ("SmolLM2-135M", "HEADSPAN_SMOLLM2_GGUF")):
        model = os.environ.get(variable)
        if not model:
            print(f"(h) {name} is left out: {variable} is not set")
            continue
        out = folder / "h.safetensors"
        ours = best(OURS, model, "procrustes", "all", str(out), "4GB", times=2)
        scores = Scores.load(out)
        pairs = sum(int(np.count_nonzero(~np.isnan(values))) for values in scores.arrays.values())
        m = scores.provenance["d_head"]["Q"]
        wide = np.random.default_rng(0).standard_normal((500, m, m))
        grams, started = wide @ wide.transpose(0, 2, 1), time.perf_counter()
        for _ in parallel_map(np.linalg.eigvalsh, [grams] * (2 * cores())):
            pass
        bare = (time.perf_counter() - started) / (500 * 2 * cores()) * pairs
        rows.append(
            (
                f"(h) Procrustes, 16 pairings of {name}",
                f"{ours['wall']:.1f} s, {ours['cpu'] / pairs * 1e6:.0f} µs of a core per pair",
                f"{bare:.1f} s for the eigenvalues of {pairs:,} matrices of {m}×{m}",
                f"{ours['wall'] / bare:.2f}× the time",
                "3× the speed of 0.3",
            )
        )
    return rows


PARTS = {
    "a": part_a_b, "b": part_a_b, "c": part_c, "d": part_d_f, "e": part_e, "f": part_d_f, "g": part_g, "h": part_h,
}  # fmt: skip


def chosen(text: str) -> list[Callable[[Path], list[tuple[str, ...]]]]:
    """The measurements named by a list of letters, without repeats; a and b are measured together, as are d and f."""
    letters = [letter.strip() for letter in text.split(",")]
    unknown = [letter for letter in letters if letter not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a part: choose from {','.join(PARTS)}")
    return list(dict.fromkeys(PARTS[letter] for letter in letters))


def table(rows: list[tuple[str, ...]]) -> str:
    head = ("what", "headspan", "against", "ratio", "target")
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=chosen, default=",".join(PARTS), help="parts, like a,c (a and b run together, as do d and f)"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.only:
            rows += part(Path(folder))
            print(table(rows[-4:]), flush=True)
    text = table(rows)
    if options.write:
        load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
        facts = f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores, load {load}"
        _, *others = RESULTS.read_text(encoding="utf-8").split("\n## ")
        made = (
            f"# Benchmark results\n\nMade by `python benchmarks/run.py --write`: {facts}.\n"
            f"Best of several runs; ratios within one run.\n\n{text}\n"
        )
        RESULTS.write_text("\n## ".join([made, *others]), encoding="utf-8")


if __name__ == "__main__":
    main()
