"""Draw which folder of the package imports which, and list what each module is for: writes docs/architecture.md.

python docs/make_module_graph.py            # write
python docs/make_module_graph.py --check    # fail when the page is not current
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "headspan"
ORDER = ["system", "sources", "models", "scoring", "analysis", "figures", "explorer", "cli"]
HEAD = """# Architecture

Made by `docs/make_module_graph.py` from the sources; `tests/test_layout.py` checks that imports go one way, from right
to left. Everything may use the vocabulary (the modules at the top) and `system`, which are not in the drawing.
One arrow goes the other way: a notebook asks a wiring to draw itself, and what draws is loaded only then.
"""


def modules() -> dict[str, Path]:
    """Every module by its dotted name below the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts and parts != ["__main__"]:
            found[".".join(parts)] = path
    return found


def imports(tree: ast.Module) -> set[str]:
    """Folders (or modules at the top) that a module imports."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[1] for name in names if name.startswith("headspan.")}


def page() -> str:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
    edges = {(name.split(".")[0], other) for name, tree in trees.items() for other in imports(tree)}
    shown = ORDER[1:]
    lines = [HEAD, "```mermaid", "graph RL"]
    lines += [f"  {a} --> {b}" for a in shown for b in shown if a != b and (a, b) in edges]
    lines += ["```", ""]
    for home in ["", *ORDER]:
        lines += [f"## {home or 'The vocabulary'}", "", "| module | what it is for |", "|---|---|"]
        for name, tree in trees.items():
            top, _, rest = name.partition(".")
            if (top == home and rest) or (not home and top not in ORDER):
                summary = (ast.get_docstring(tree) or "").splitlines()[0]
                lines.append(f"| `{rest or name}` | {summary.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    target = DOCS / "architecture.md"
    if "--check" in sys.argv:
        if not target.is_file() or target.read_text(encoding="utf-8") != page():
            sys.exit("docs/architecture.md is not current: run make docs")
    else:
        target.write_text(page(), encoding="utf-8")
