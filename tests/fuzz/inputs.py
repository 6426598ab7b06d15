"""Changed files of vectors, autoencoders, LoRA adapters, circuits and labels: an answer or one sentence, in Python.

Wrong answers are findings: the share of a direction is that of the numbers which numpy or the safetensors package read
from the changed file, by a QR here; an adapter whose tensors were changed gives W + (α/r)·BA of them.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from mutations import Case, input_case
from place import Finding, check_sentence
from safetensors.numpy import load_file
from seeds import write_extras, write_seeds

import headspan as hs

ROOM = 2e-4  # shares are computed in float32


class Inputs:
    cpu_seconds, memory = 15.0, 1 << 30

    def __init__(self, folder: Path) -> None:
        self.seed, self.work = folder / "seed", folder / "work"
        write_seeds(self.seed)
        write_extras(self.seed)
        shutil.copytree(self.seed, self.work)
        self.model = hs.open(self.work / "gpt2")
        self.scores = hs.load(self.work / "used.safetensors")

    def case(self, chance: random.Random) -> Case:
        return input_case(self.seed, chance)

    def run(self, case: Case) -> list[str]:
        """The sentences with which steps of this case were refused; anything else that happens is raised."""
        path = self.work / case.target
        path.write_bytes(case.content)
        steps = {"lora": self._adapter, "sae": self._sae, "circuit.json": self._circuit, "labels.csv": self._labels}
        refusals: list[str] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                for step in steps.get(case.target.partition("/")[0], self._vectors)(path):
                    try:
                        step()
                    except hs.HeadspanError as error:
                        refusals.append(check_sentence(str(error)))
        finally:
            shutil.copyfile(self.seed / case.target, path)
        return refusals

    def _vectors(self, path: Path) -> Any:
        yield lambda: self._check_shares(hs.nodes(self.model, f"{path}@1", k=3), path)
        yield lambda: hs.nodes(self.model, path, fold=True, k=1)
        yield lambda: hs.score(self.model, "pk", "nodes", nodes=f"{path}@1")

    def _sae(self, path: Path) -> Any:
        yield lambda: self._check_numbers(hs.nodes(self.model, sae=path.parent, k=2))
        yield lambda: hs.nodes(self.model, sae=f"{path.parent}:0,2-3", fold=True, k=1)

    def _adapter(self, path: Path) -> Any:
        yield lambda: self._check_numbers(hs.nodes(self.model, adapter=path.parent, k=2))
        yield lambda: self._check_adapted(path.parent)

    def _circuit(self, path: Path) -> Any:
        yield lambda: hs.Circuit.load(path).save(path.with_name("again.json"), force=True)
        yield lambda: hs.wiring(self.scores, circuit=path).rows()
        yield lambda: hs.wiring(self.scores, circuit=path).to_graphml(path.with_name("again.graphml"), force=True)

    def _labels(self, path: Path) -> Any:
        yield lambda: hs.wiring(self.scores, labels=path).to_csv(path.with_name("again.csv"), force=True)
        yield lambda: hs.top(self.scores, k=3, labels=path)
        yield lambda: hs.evaluate(self.scores, labels=path, bootstrap=2)

    def _check_numbers(self, report: Any) -> list[dict[str, Any]]:
        rows = report.rows()
        for row in rows:
            if not 0 <= row["share"] <= 1 or (row["p"] is not None and not 0 <= row["p"] <= 1):
                raise Finding(f"no share: {row}")
        return rows

    def _check_shares(self, report: Any, path: Path) -> None:
        """Directions against the numbers that other packages read."""
        rows = self._check_numbers(report)
        held = _arrays(path)
        for row in rows[:6]:
            name, _, number = row["node"].partition("[")
            found = [array for key, array in held.items() if (key or path.stem) == name]
            if len(found) != 1 or found[0].ndim > 2 or row["partner"].rpartition(".")[2] in "RW":
                continue
            d = self.model.d_model
            array = found[0].astype(np.float64)
            vectors = array.reshape(1, d) if array.ndim == 1 else array if array.shape[1] == d else array.T
            vector = vectors[int(number[:-1]) if number else 0]
            vector = vector / np.abs(vector).max()
            basis = np.linalg.qr(self.model.read_head(row["partner"]).astype(np.float64))[0]
            expected = np.square(basis.T @ vector).sum() / np.square(vector).sum()
            if abs(expected - row["share"]) > ROOM:
                raise Finding(f"the share of {row['node'][:40]} in {row['partner']} is {row['share']}, not {expected}")

    def _check_adapted(self, folder: Path) -> None:
        with hs.adapt(self.work / "gpt2", folder) as weights:
            read = {layer: weights.read("O", layer) for layer in weights.layers}
        try:
            about = json.loads((folder / "adapter_config.json").read_bytes())
            tensors = load_file(folder / "adapter_model.safetensors")
            scale, r = float(about["lora_alpha"]), tensors["base_model.model.transformer.h.0.attn.c_proj.lora_A.weight"]
        except Exception:
            return  # what other packages do not read is judged by its refusal alone
        if set(about) != {*json.loads((self.seed / "lora" / "adapter_config.json").read_bytes())}:
            return
        if about["use_rslora"] or about["target_modules"] != ["c_attn", "c_proj"] or about["r"] != len(r):
            return
        for layer, ours in read.items():
            stem = f"base_model.model.transformer.h.{layer}.attn.c_proj.lora_"
            if not {f"{stem}A.weight", f"{stem}B.weight"} <= tensors.keys():
                return
            a, b = (tensors[f"{stem}{side}.weight"].astype(np.float64) for side in "AB")
            whole = self.model.read("O", layer).transpose(1, 0, 2).reshape(self.model.d_model, -1)
            expected = whole + scale / about["r"] * (b @ a)
            found = ours.transpose(1, 0, 2).reshape(expected.shape)
            if not np.allclose(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, float(np.abs(expected).max()))):
                raise Finding(f"O of layer {layer} with the adapter differs from W + (α/r)·BA")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = np.load(path, allow_pickle=False)
        return {"": found} if isinstance(found, np.ndarray) else {name: found[name] for name in found.files}
    except Exception:
        return {}  # what numpy does not read is judged by its refusal alone
