"""Run the commands of docs/gallery.md, which write the figures in docs/images.

    python docs/make_figures.py [WORD…]     only the commands that contain one of the words

These variables give the paths of the models: HEADSPAN_GPT2_DIR, HEADSPAN_SMOLLM2_GGUF, HEADSPAN_IGLM_DIR.
docs/make_screenshots.py takes the screenshots of pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
MODELS = {
    "openai-community/gpt2": "HEADSPAN_GPT2_DIR",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "HEADSPAN_SMOLLM2_GGUF",
    "IgLM": "HEADSPAN_IGLM_DIR",
}


def commands() -> list[list[str]]:
    """Every command of the page that makes a result or a figure, with the paths of its models."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "gallery.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("headspan ")]
    return [line for line in words if line[1] not in ("report", "site")]


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "docs").symlink_to(DOCS.resolve(), target_is_directory=True)
        for line in commands():
            makes_picture = any(word.startswith("docs/") for word in line)
            if makes_picture and wanted and not any(word in " ".join(line) for word in wanted):
                continue
            missing = [MODELS[word] for word in line if word in MODELS and not os.environ.get(MODELS[word])]
            if missing:
                print(f"left out, {missing[0]} is not set: {shlex.join(line)}")
                continue
            print(shlex.join(line), flush=True)
            found = [os.environ[MODELS[word]] if word in MODELS else word for word in line]
            subprocess.run([sys.executable, "-m", "headspan", *found[1:]], cwd=folder, check=True)


def tidy() -> None:
    """Remove figures that no page shows, since a command may draw more than the gallery needs."""
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    shown = {name for page in pages for name in re.findall(r"images/([^)\s]+)", page.read_text(encoding="utf-8"))}
    for picture in (DOCS / "images").rglob("*.png"):
        if picture.relative_to(DOCS / "images").as_posix() not in shown:
            picture.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
    tidy()
