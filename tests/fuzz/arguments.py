"""Good and odd words for every argument and option of every command.

The commands and their options come from the program itself. A command without an entry in ``POSITIONAL``, or an option
that takes a value and has none in ``GOOD``, fails a test.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

from seeds import NOT_TEXT

MODELS = ["gpt2", "llama", "llama.gguf", "gpt2/model.safetensors", "gpt2/../llama", "one", "tuned", "demo", NOT_TEXT]
PARTNERS = {
    "gpt2": "tuned",
    "gpt2/model.safetensors": "tuned",
    "tuned": "gpt2",
    "llama": "gpt2/../llama",
    NOT_TEXT: "tuned",
}
RESULTS = ["result.safetensors", "used.safetensors", "empty.safetensors", "hard.safetensors"]
HEADS = ["L0H1", "L1H3", "L1KV0", "L0H0.O", "L1H2.K", "l0h1.q"]
PORTS = ["L0H1.O", "L1H3.K", "L1KV0.V", "L0H0.Q", "l1h0.o", "L1H1.V"]
# Positional arguments of each command; a word in capitals is one of a list below.
POSITIONAL: dict[str, list[str]] = {
    "info": ["MODEL"], "score": ["MODEL"], "top": ["EITHER"], "compare": ["EITHER", "EITHER"],
    "diff": ["MODEL", "MODEL"], "track": ["MODEL", "MODEL"], "hubs": ["EITHER"], "baseline": ["EITHER"],
    "evaluate": ["EITHER"], "reproduce": ["MODEL"], "tokens": ["MODEL", "HEAD"], "pair": ["MODEL", "PORT", "PORT"],
    "behaviour": ["MODEL"], "effects": ["MODEL", "RESULT"], "observe": ["MODEL"], "wiring": ["EITHER"],
    "figures": ["EITHER"], "report": ["EITHER"], "paths": ["EITHER"], "nodes": ["MODEL"],
    "site": ["SITE", "EITHER", "EITHER"], "cache": ["RESULT"], "skill": [],
    "task": ["MODEL", "TASK"], "links": ["MODEL", "GRAPH"],
}  # fmt: skip
SITES = ["made", "nowhere/made", "gallery"]
WORDS = {
    "SITE": SITES,
    "TASK": ["induction", "ioi", "prompts.jsonl", "text.txt", "labels.csv"],
    "GRAPH": ["graph.json", "circuit.json"],
    "MODEL": MODELS,
    "RESULT": RESULTS,
    "EITHER": RESULTS * 2 + MODELS,
    "HEAD": HEADS,
    "PORT": PORTS,
}
GOOD: dict[str, list[str]] = {
    "metric": ["pk", "cs", "simple_cs", "linear_cka", "procrustes", "all", "pk,cs", "influence"],
    "pairing": ["OK", "OQ", "KO", "KK", "OR", "WK", "nodes", "flow", "all"],
    "pairs": ["default", "forward", "same-type", "all"],
    "labels": ["labels.csv", "behaviour", "gpt2", "gpt2-ioi"], "label": ["copy", "induction"], "head": HEADS,
    "layer": ["0", "1"], "k": ["0", "1", "3", "20"], "screen": ["1", "5", "100000"], "delta": ["0.01", "0.5", "1e-300"],
    "memory": ["300MB", "1GB"], "device": ["cpu"],
    "route": ["gram", "direct"], "null": ["random", "reversed", "within"], "q": ["0.05", "1"], "minimum": ["0.5"],
    "rule": ["top", "top-per-target", "significance", "threshold"], "format": ["png", "svg", "pdf"],
    "only": ["wiring", "grid", "two-layer", "scatter", "effects", "identity", "head-scores", "kl", "norms",
             "unembedding", "random", "folded-wiring", "mse"],
    "dpi": ["20", "40"], "text": ["text.txt", "a b c"], "prompt": ["a b a b", "c"], "sequences": ["1", "2"],
    "length": ["2", "5"], "seed": ["0", "7"], "bos": ["auto", "yes", "no"],
    "dtype": ["float32", "stored"], "best": ["1", "9"], "threshold": ["0.3"],
    "model": MODELS, "behaviour": ["behaviour.json"], "tokens": ["0", "3"],
    "preprocess": ["centre-normalise", "centre", "normalise", "identity"], "role": ["Q", "K", "V", "O"],
    "ablate": ["resample", "mean", "zero"], "shared": ["1", "2"], "batch": ["1"], "bootstrap": ["0", "5"],
    "table": ["drift", "edge", "hub", "all", "trajectory", "head"], "steps": ["0,1", "0"], "last": ["1"],
    "to": HEADS, "from_": HEADS, "depth": ["1", "2", "4"], "title": ["t"],
    "circuit": ["circuit.json", "3", "auto"], "method": ["eap", "ig"], "prompts": ["1", "3"],
    "objective": ["logit-difference", "log-probability", "kl"], "scores": RESULTS,
     "nodes": ["probe.npy", "probe.npy@1", "probes.npz:a@0", "vectors.safetensors:v@1"],
    "sae": ["sae", "sae:0,2-3"],
    "floor": ["0", "0.1"], "draws": ["1", "3"],
    "stats": ["stats.safetensors", "result.safetensors"], "task": ["task.safetensors", "result.safetensors"],
    "adapter": ["lora"], "transcoders": ["tc{}.npz"], "strongest": ["1", "5"],
    "hook": ["hook_mlp_in", "ln2.hook_normalized"],
    "components": ["components.safetensors", "components.safetensors:h.0.attn.c_attn:0,2-3"],
    "neurons": ["L0:1", "L1:*", "*"],
}  # fmt: skip
# Where each command may write without being refused.
FITTING: dict[str, list[str]] = {
    "score": ["new.safetensors", "used.safetensors"], "figures": ["made", "nowhere/made"], "report": ["new.html"],
    "wiring": ["new.png", "new.pdf", "new.svg", "new.json", "new.csv", "new.graphml"], "reproduce": ["made"],
    "diff": ["new.html", "new.png", "new.safetensors"], "track": ["new.safetensors", "new.html", "new.png"],
    "behaviour": ["new.json"], "into": ["result.safetensors", "used.safetensors"], "labels_out": ["new.csv"],
    "paths": ["new.json", "circuit.json"], "observe": ["new.safetensors"], "task": ["new.safetensors"],
    "circuit_out": ["new.json"], "graph_out": ["new.json"],
}  # fmt: skip
OUTPUTS = [
    "new.safetensors", "new.html", "new.png", "new.pdf", "new.svg", "new.json", "new.csv", "new.graphml", "made",
    "result.safetensors", "hard.safetensors", "used.safetensors", "gpt2/model.safetensors", "gpt2/config.json",
    "./gpt2/../gpt2/model.safetensors", "llama.gguf", "labels.csv", "behaviour.json", "text.txt", "link.safetensors",
    "dangling.safetensors", "folder.safetensors", "pipe.safetensors", "pipe.html", "notes.txt", "theirs.safetensors",
    "theirs.html", "gpt2", ".", "gpt2/new.safetensors", "gpt2/tokenizer.json", "nowhere/new.safetensors", "/dev/null",
    "/dev/full", "new.safetensors/", "é\u202e.safetensors", "a\x1b[31m.html", "x" * 300 + ".safetensors", "", "-",
    "RESULT.safetensors", "new.unknown", "\udcff.safetensors",
]  # fmt: skip
ODD = [
    "", " ", "nan", "-1", "0", "1e400", "-inf", "9" * 400, "1_000", str(2**62), str(10**30), "\x1b[31mred", "é\u202e",
    "a\nb", "\udcff", "../../x", "x" * 5000, "L99H99", "L0H0.X", "/", "-", "None", "[]", "{}", "%s", "*", "0x10", "½",
    "١", "/dev/zero", "pipe.safetensors", "gpt2/config.json", "org/name", "org/name@step*", "http://x/y", "~", ",",
    ",,pk", "1e5", "a b " * 1500,
]  # fmt: skip
WRITES = ("out", "into", "labels_out", "circuit_out", "graph_out")
NEVER = {"--help", "--open", "--dask", "--version"}  # a browser; processes, which `OnDask` starts
WAITS = "mcp"  # for requests; tests/test_agent.py sends it hostile ones
RARE = ("run", "effects", "observe", "task")  # they run a model

# What is added where it was not chosen, so that a case takes little time; OUT stands for a word that is drawn.
QUICK: dict[str, dict[str, str]] = {
    "behaviour": {"sequences": "1", "length": "4"}, "observe": {"draws": "1", "out": "OUT"},
    "effects": {"sequences": "2", "length": "4", "random": ""}, "task": {"prompts": "2", "k": "2", "method": "eap"},
    "evaluate": {"bootstrap": "5", "labels": "labels.csv"}, "track": {"out": "OUT"}, "score": {"out": "OUT"},
    "figures": {"only": "OUT", "dpi": "20", "out": "OUT"}, "wiring": {"dpi": "20"}, "report": {"out": "OUT"},
    "links": {"transcoders": "OUT"},
}  # fmt: skip


class Option(NamedTuple):
    name: str
    spelling: str
    flag: bool


def commands() -> dict[str, list[Option]]:
    """Every command of the program with its options."""
    import typer.main

    from headspan.cli import app

    group: Any = typer.main.get_command(app)
    return {
        name: [
            Option(str(p.name), max(p.opts, key=len), bool(getattr(p, "is_flag", False)))
            for p in command.params
            if p.param_type_name == "option" and not {*p.opts} & NEVER
        ]
        for name, command in group.commands.items()
        if name != WAITS
    }


class Drawer:
    """Draws words; half of the command lines have no odd one."""

    def __init__(self, command: str, chance: random.Random) -> None:
        self.command, self.chance = command, chance
        self.oddity = chance.choice([0.0, 0.0, 0.2, 0.5])

    def odd(self, share: float = 1.0) -> bool:
        return self.chance.random() < self.oddity * share

    def value(self, name: str) -> str:
        """A word for an option."""
        if name in WRITES:
            fitting = FITTING.get(name) or FITTING.get(self.command, OUTPUTS)
            return self.chance.choice(OUTPUTS if self.odd(1.5) else fitting)
        return self.chance.choice(ODD if self.odd() else GOOD.get(name, ODD))

    def positional(self, given: dict[str, str]) -> list[str]:
        """``given`` fixes the file that was damaged (MODEL or RESULT)."""
        words: list[str] = []
        for kind in POSITIONAL[self.command]:
            if kind == "RESULT" and "RESULT" not in given and self.chance.random() < 0.5:
                continue
            fixed = given.get(kind) or (given.get("RESULT") or given.get("MODEL") if kind == "EITHER" else None)
            word = fixed or self.chance.choice(ODD if self.odd(0.3) else WORDS[kind])
            if words and kind in ("MODEL", "EITHER") and not self.odd():
                word = PARTNERS.get(words[0], words[0])  # of one shape
            words.append(word)
        return words


def line(command: str, options: list[Option], chance: random.Random, given: dict[str, str]) -> list[str]:
    """A command line; ``given`` fixes the file that was damaged (MODEL, RESULT, labels, behaviour or text)."""
    draw = Drawer(command, chance)
    words = [command, *draw.positional(given)]
    weights = [0.15 if option.name in RARE else 1.0 for option in options]
    drawn = chance.choices(options, weights, k=chance.choice([0, 1, 1, 2, 3])) if options else []
    chosen = {option.name for option in drawn}
    chosen |= {option.name for option in options if option.name in given}
    quick = QUICK.get(command, {})
    for option in options:
        if option.name not in chosen and option.name not in quick:
            continue
        if option.flag:
            words.append(option.spelling)
            continue
        value = given.get(option.name) or quick.get(option.name, "OUT")
        words += _with(
            option, draw.value(option.name) if option.name in chosen - set(given) or value == "OUT" else value
        )
    return words


def _with(option: Option, value: str) -> list[str]:
    """The option and its value; with = where the value would be taken for an option."""
    return [f"{option.spelling}={value}"] if value.startswith("-") else [option.spelling, value]


def outputs_of(words: list[str], options: list[Option]) -> list[str]:
    """The values of all options that write; a gallery's folder has none."""
    folder = words[1:2] if words[0] == "site" else []
    spellings = {option.spelling for option in options if option.name in WRITES}
    found = [value for name, value in pairwise(words) if name in spellings]
    return folder + found + [w.partition("=")[2] for w in words if w.partition("=")[0] in spellings and "=" in w]
