"""``headspan observe``: run a model once and keep the statistics that influence is computed from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headspan.cli.behaviour import text_of
from headspan.cli.common import Bos, Dtype, Force, ModelRef, note, out_option, progress
from headspan.vocabulary.errors import HeadspanError


def register(app: typer.Typer) -> None:
    app.command("observe")(observe)


def observe(
    model: ModelRef,
    out: Annotated[Path, out_option("The file to write the statistics to (.safetensors).")],
    text: Annotated[list[Path] | None, typer.Option("--text", help="Run on this text file; may be repeated.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Run on random sequences repeated twice.")] = False,
    tokens: Annotated[
        Path | None,
        typer.Option(help="Run on these token ids: a .npy array or a .json list of sequences."),
    ] = None,
    sequences: Annotated[int | None, typer.Option(min=2, help="With --random: their number. [default: 16]")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="With --random: tokens before the repetition. [default: 42]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random sequences and of random signs.")] = 0,
    draws: Annotated[int, typer.Option(min=1, help="Random signs per attention pattern; more are more precise.")] = 8,
    bos: Bos = "auto",
    device: Annotated[str | None, typer.Option(help="Device to run on, for example cuda (default: cpu).")] = None,
    dtype: Dtype = "float32",
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run of the same command.")] = True,
    force: Force = False,
) -> None:
    """Run MODEL once and collect what influence needs: what heads compute, and what their attention depends on.

    It runs a built-in text unless you give other input. headspan score --metric influence --stats FILE then scores all
    pairs of heads. Influence is about this input: choose text like that you care about. Needs headspan[torch].

    \b
    Examples:
      headspan observe gpt2 --out stats.safetensors
      headspan observe model.gguf --text corpus.txt --out stats.safetensors
      headspan observe demo --random --out random.safetensors
    """
    from headspan.running.observe import observe as run
    from headspan.running.opening import check_dtype
    from headspan.system.outputs import check_output

    check_output(out, "statistics", inputs=[model, tokens, *(text or [])], force=force, ending=".safetensors")
    check_dtype(dtype)
    with progress("observing") as update:
        found = run(
            model,
            text=[text_of(path) for path in text] if text else None,
            random=random,
            tokens=None if tokens is None else ids_of(tokens),
            out=out,
            force=force,
            resume=resume,
            sequences=sequences,
            length=length,
            seed=seed,
            draws=draws,
            bos=bos,
            device=device,
            dtype=dtype,
            progress=update,
        )
    note(f"{out}: statistics of {len(found.ports.query)} heads on {found.input}")


def ids_of(path: Path) -> list[list[int]]:
    """Sequences of token ids from a file; raises if it holds anything else."""
    import json

    import numpy as np

    from headspan.system.inputs import input_file, read_text

    missing = f"there is no file {path}. --tokens takes a .npy or .json file"
    try:
        if path.suffix == ".npy":
            found: Any = np.load(input_file(path, missing), allow_pickle=False)
        else:
            found = json.loads(read_text(path, missing, "JSON"))
        ids = [np.asarray(row) for row in ([found] if np.ndim(found[0]) == 0 else found)]
    except (ValueError, TypeError, KeyError, IndexError, EOFError, RecursionError):
        ids = []
    if not ids or any(row.ndim != 1 or row.dtype.kind not in "iu" for row in ids):
        raise HeadspanError(f"{path} is not a list of sequences of token ids, such as [[5, 17, 3], [8, 2, 9]]")
    return [row.tolist() for row in ids]
