"""Components of a parameter decomposition (SPD of Goodfire): a weight as a sum of rank-one matrices V[:, c] U[c, :].

A file has the two factors of every decomposed module: V (d_in, C) and U (C, d_out), under the module's name with dashes
in place of dots, ``_components.h-3-attn-c_attn.V``, or with ``.components.V`` after the plain name. The component c of
a module that reads the stream (q, k, v, the input of an MLP, the unembedding) reads V[:, c]; that of one that writes to
it (o, the output of an MLP, the embedding) writes U[c, :]. Its other vector lies inside the block.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from headspan.models.mlp import checkpoint_of
from headspan.models.weights import AttentionWeights
from headspan.node_kinds.adapters import ModuleNodes, Modules
from headspan.node_kinds.files import VectorFile, gather, open_vectors
from headspan.node_kinds.neurons import joined, parse_indices
from headspan.node_kinds.node_sets import NodeSet, Numbered, check_name
from headspan.system.inputs import mode_of
from headspan.vocabulary.errors import HeadspanError, quoted
from headspan.vocabulary.heads import Role

_FORM = "FILE, FILE:MODULE or FILE:MODULE:0,5,10-20"
_FACTOR = re.compile(r"(?P<dashed>_components\.)?(?P<module>.+?)(?:\.components)?\.(?P<factor>[UV])")
_OUTER = re.compile(r"(?:target_model|patched_model)\.")
_LISTED = 4  # modules named in an error


def file_and_module(text: str) -> tuple[Path, str | None, str | None]:
    """The file, the module and the components of ``FILE[:MODULE[:indices]]``."""
    ends = [len(text), *(i for i in range(len(text) - 1, 0, -1) if text[i] == ":")]
    for end in ends if text.strip() and "\0" not in text else ():
        path = Path(os.path.expanduser(text[:end]))
        if mode_of(path) is not None:
            module, _, chosen = text[end + 1 :].partition(":")
            return path, module or None, chosen or None
    raise HeadspanError(f"{quoted(text)}: no such file. Give components as {_FORM}")


def component_sets(weights: AttentionWeights, text: str) -> list[NodeSet]:
    """The components of a file, one set per module."""
    checkpoint_of(weights, "the components of its weights")
    path, wanted, chosen = file_and_module(text)
    file = open_vectors(path)
    factors = _factors(file, path)
    where = Modules(weights)
    known = {module: where.tensor(module) for module in factors}
    if wanted is not None:
        named = {where.in_layer(tensor): module for module, tensor in known.items() if tensor}
        module = wanted if wanted in factors else named.get(f"{wanted}.weight")
        if module is None:
            raise HeadspanError(f"{path} has no module {quoted(wanted)}: it decomposes {_some(factors)}")
        factors = {module: factors[module]}
    sets: list[NodeSet] = []
    for module, names in factors.items():
        tensor = known[module]
        at = where.of(tensor) if tensor else None
        if tensor and at:
            sets.append(Components(weights, path, file, names, tensor, at, where, chosen))
    missing = [module for module in factors if known[module] is None]
    inside = [module for module in factors if known[module] and where.of(str(known[module])) is None]
    if not sets:
        why = "that reads or writes the residual stream" if inside else f"of {weights.reference}"
        raise HeadspanError(f"{path} has no components of a module {why}: it decomposes {_some(inside or missing)}")
    for left, why in ((missing, "are not in the model"), (inside, "do not read or write the stream")):
        if left:
            sets[0].notes.append(f"{len(left)} modules of {path.name} {why} and are left out: {_some(left)}")
    return sets


def _some(modules: object) -> str:
    names = sorted(map(str, modules))  # type: ignore[call-overload]
    return ", ".join(name[:80] for name in names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


def _factors(file: VectorFile, path: Path) -> dict[str, dict[str, str]]:
    """The tensors "U" and "V" of every decomposed module."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(map(str, file.names())):
        match = _FACTOR.fullmatch(name)
        if match:
            module = match["module"].replace("-", ".") if match["dashed"] else match["module"]
            found.setdefault(_OUTER.sub("", module, count=1), {})[match["factor"]] = name
    whole = {module: names for module, names in found.items() if len(names) == 2}
    if not whole:
        raise HeadspanError(
            f"{path} has no components: they are pairs of tensors like _components.h-3-attn-c_attn.V and .U"
        )
    return whole


class Components(Numbered, ModuleNodes):
    """The components of one module."""

    kind = "component"

    def __init__(
        self, weights: AttentionWeights, path: Path, file: VectorFile, names: dict[str, str], tensor: str,
        at: tuple[Role, str, int], where: Modules, chosen: str | None,
    ) -> None:  # fmt: skip
        super().__init__(weights, at, where)
        module = where.in_layer(tensor.removesuffix(".weight"))
        self.label = f"{path}:{module}"
        self._stem = check_name(f"{path.stem}/{module}"[-180:])
        self._file, self._names = file, names
        v, u = (file.shape(names[factor]) for factor in "VU")
        fits = len(v) == len(u) == 2 and v[1] == u[0] and sorted((v[0], u[1])) == sorted(where.shape(tensor))
        if not fits or (v[0] if self._role is Role.R else u[1]) != self.d_model:
            raise HeadspanError(
                f"V {v} and U {u} of {self.label} do not fit {tensor} {where.shape(tensor)}: they must be (inputs, "
                "components) and (components, outputs)"
            )
        self.population = u[0]
        self.ids = range(self.population) if chosen is None else joined(
            parse_indices(chosen, self.population, f"components of {self.label}")
        )  # fmt: skip

    def _read(self, role: Role, ids: np.ndarray) -> np.ndarray:
        def run(members: slice) -> np.ndarray:
            if role is Role.R:
                return self._file.read(self._names["V"], columns=members).T
            return self._file.read(self._names["U"], members)

        return self._through(gather(ids, run)[:, :, None])
