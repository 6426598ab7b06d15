"""A LoRA adapter applied to its base, W + (α/r)·B·A, computed when a tensor is read and never written to disk.

The files that PEFT saves (``adapter_config.json`` next to ``adapter_model.safetensors`` or ``.bin``) are applied to
the named tensors of an opened checkpoint. Heads are then read as from any other checkpoint, so fused QKV tensors,
Conv1D, biases and replaced modules (``modules_to_save``) need no special case.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from headspan.checkpoints.base import TensorSource, canonical_json
from headspan.checkpoints.dtypes import row_range
from headspan.checkpoints.huggingface import STANDARD_FILES, LocalFiles, WeightFile, open_weight_file
from headspan.checkpoints.untrusted import read_json
from headspan.models.checkpoint import CheckpointWeights
from headspan.models.families.table import BODY_PREFIXES
from headspan.models.families.tensor_map import TensorMap
from headspan.models.folding import FoldedWeights
from headspan.models.opening import ModelLike, open
from headspan.models.weights import AttentionWeights
from headspan.system.arguments import checked
from headspan.system.deprecation import renamed
from headspan.system.inputs import is_directory
from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import Role

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# Options of a LoRA config that make it something other than W + scale·B·A, and what they do.
_OTHER_METHODS = {
    "use_dora": "DoRA: it rescales every row of the sum",
    "use_qalora": "QALoRA: it pools the inputs before B·A",
    "use_bdlora": "BD-LoRA: its factors are block-diagonal",
    "alora_invocation_tokens": "activated LoRA: it acts on some tokens only",
    "arrow_config": "Arrow: it routes each token to an adapter of its own",
    "kasa_config": "KaSA: it cuts the base weight as well",
    "monteclora_config": "MonteCLoRA: it draws its weights at random",
    "layer_replication": "layer replication: it repeats layers of the base",
    "trainable_token_indices": "trainable tokens: it replaces rows of the embedding",
}
# Initialisations that subtract B·A from the base, so that the saved factors are not a change of the original base.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LORA = re.compile(r"(.+)\.lora_(A|B)(?:\.[\w-]+)?\.(weight|bias)")
_LORA_EMBEDDING = re.compile(r"(.+)\.lora_embedding_(A|B)(?:\.[\w-]+)?")
_SAVED = re.compile(r"\.modules_to_save(?:\.[\w-]+)?(?=\.(?:weight|bias)$)|\.base_layer(?=\.(?:weight|bias)$)")


class Patch(NamedTuple):
    """scale·B·A for one tensor; ``turned``: the tensor is stored (in, out)."""

    first: str  # name of A, (r, in)
    second: str  # name of B, (out, r)
    scale: float
    turned: bool


def is_adapter(reference: Any) -> bool:
    """True for a directory with the config of a PEFT adapter."""
    if not isinstance(reference, (str, os.PathLike)):
        return False
    path = os.fspath(cast("str | os.PathLike[str]", reference))
    if not path.strip() or "\0" in path:
        return False
    try:
        return (Path(os.path.expanduser(path)) / CONFIG).is_file()
    except (OSError, ValueError):  # an invalid file name
        return False


@renamed(base="model")
@checked
def adapt(model: ModelLike, adapter: str | os.PathLike[str]) -> AttentionWeights:
    """The weights of a base with a LoRA adapter applied, read tensor by tensor.

    model: the base, an opened checkpoint (``headspan.open``) or its reference; folded weights give folded weights.
    adapter: the directory that PEFT wrote.
    """
    base = open(model)
    if isinstance(base, FoldedWeights):
        return FoldedWeights(adapt(base.inner, adapter))
    if not isinstance(base, CheckpointWeights):
        raise HeadspanError(
            f"an adapter changes named tensors of a checkpoint, but {base.reference} has none: open the model itself"
        )
    return AdaptedWeights(base, Adapter(Path(os.path.expanduser(os.fspath(adapter)))))


class AdaptedWeights(CheckpointWeights):
    """Attention weights of a base with an adapter on top."""

    def __init__(self, base: CheckpointWeights, adapter: Adapter) -> None:
        source = AdaptedSource(base, adapter)
        super().__init__(source)
        self.base = base
        self.changed = frozenset(source.patches) | frozenset(source.replaced)

    def changes(self, role: Role | str, layer: int) -> bool:
        """Whether the adapter changes a tensor that makes a role's weights in a layer."""
        return not self.changed.isdisjoint(self._map.tensors(Role.parse(role), layer))

    @property
    def reopenable(self) -> bool:
        return False  # its reference names both a base and an adapter


class Adapter:
    """A LoRA adapter directory: its checked config, and its tensors by the module that they change."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files = LocalFiles(directory)
        if not is_directory(directory):
            raise HeadspanError(f"{directory} is not an adapter: give the directory that PEFT wrote, with its {CONFIG}")
        present = files.names()
        if CONFIG not in present:
            raise HeadspanError(f"{directory} is not an adapter: it has no {CONFIG}")
        name = next((name for name in WEIGHTS if name in present), None)
        if name is None:
            raise HeadspanError(f"{directory} has {CONFIG} but neither {WEIGHTS[0]} nor {WEIGHTS[1]}: it is incomplete")
        both = next((name for name in STANDARD_FILES if name in present), None)
        if both is not None:
            raise HeadspanError(
                f"{directory} holds a model ({both}) and an adapter ({name}): give the path of {both}, or move one away"
            )
        self.config = read_json(files.path(CONFIG))
        self._check_method()
        self.file: WeightFile = open_weight_file(files.path(name))
        self.pairs: dict[str, dict[str, str]] = {}  # module -> {"A": tensor, "B": tensor, "bias": tensor}
        self.embeddings: dict[str, dict[str, str]] = {}
        self.saved: dict[str, str] = {}  # tensor of the base -> tensor that replaces it
        self._sort()

    def _check_method(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise HeadspanError(
                f"{self.directory} is an adapter of the kind {str(kind)[:40]!r}, but only LORA is supported:"
                " merge it into its base with PEFT and give the merged model"
            )
        wrong = [text for key, text in _OTHER_METHODS.items() if self.config.get(key)]
        init = self.config.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
            wrong.append(f"{init}: its start was subtracted from the base")
        if wrong:
            raise HeadspanError(
                f"{self.directory} is not a plain LoRA ({wrong[0][:80]}): merge it into its base with PEFT and give the"
                " merged model"
            )

    def _sort(self) -> None:
        """Sort the tensors of the file by purpose."""
        for name in sorted(self.file.names()):
            bare = name.removeprefix("base_model.model.")
            lora, embedding = _LORA.fullmatch(bare), _LORA_EMBEDDING.fullmatch(bare)
            if lora and (lora[2] == "B" or lora[3] == "weight"):
                key = "bias" if lora[3] == "bias" else lora[2]
                self.pairs.setdefault(lora[1], {})[key] = name
            elif embedding:
                self.embeddings.setdefault(embedding[1], {})[embedding[2]] = name
            elif ".lora_" in bare or ".token_adapter." in bare or not bare.endswith((".weight", ".bias")):
                raise HeadspanError(
                    f"{self.directory} holds a tensor {name[:120]!r}, which is not part of a plain LoRA"
                )
            else:
                self.saved[_SAVED.sub("", bare)] = name
        for module, pair in {**self.pairs, **self.embeddings}.items():
            if not {"A", "B"} <= set(pair):
                raise HeadspanError(
                    f"{self.directory} has only one of the two LoRA factors of {module[:120]}: it is incomplete"
                )
        if not self.pairs and not self.embeddings and not self.saved:
            raise HeadspanError(f"{self.directory} holds no tensors: it is an empty adapter")

    def scale(self, module: str, rank: int) -> float:
        """α/r, or α/√r if the config uses rank-stabilised LoRA."""
        alpha = self.config.get("lora_alpha", 8)
        patterns: Any = self.config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise HeadspanError(f"{self.directory / CONFIG} has an alpha_pattern that is not an object")
        for pattern, value in cast("dict[str, Any]", patterns).items():
            if self._fits(pattern, module):
                alpha = value
                break
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise HeadspanError(
                f"{self.directory / CONFIG} has α = {str(alpha)[:40]!r} for {module[:80]}: give a number"
            )
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _fits(self, pattern: str, module: str) -> bool:
        """Whether a pattern matches a module by PEFT's rules. Patterns that could take unbounded time are refused."""
        slow = re.search(r"\)\s*[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3 or len(pattern) > 500
        try:
            if not slow:
                return re.match(rf"(.*\.)?({pattern})$", module[:500]) is not None
        except (re.error, OverflowError, RecursionError):
            pass
        raise HeadspanError(
            f"{self.directory / CONFIG} has an alpha_pattern {pattern[:80]!r} that is not valid: give names of modules"
        )

    def factor(self, name: str) -> np.ndarray:
        """One matrix of the file, checked to be finite."""
        array = self.file.read(name)
        if array.ndim != 2 or not np.isfinite(array).all():
            raise HeadspanError(
                f"{name[:120]} of {self.directory} is not a matrix of finite numbers (shape {tuple(array.shape)})"
            )
        return array


def name_in(known: TensorMap, name: str) -> str | None:
    """The name that a model has for a tensor, if any; its body may have another prefix."""
    if name in known.names:
        return name
    for prefix in sorted(_prefixes(known), key=len, reverse=True):
        moved = known.prefix + name[len(prefix) :]
        if name.startswith(prefix) and moved in known.names:
            return moved
    return None


def _prefixes(known: TensorMap) -> set[str]:
    body = known.entry.body
    return {body, *BODY_PREFIXES, *(outer + body for outer in BODY_PREFIXES)}


class AdaptedSource(TensorSource):
    """The tensors of a base with an adapter's changes added."""

    def __init__(self, base: CheckpointWeights, adapter: Adapter) -> None:
        super().__init__(f"{base.reference} + {adapter.directory}", base.source.config)
        self.base, self.adapter = base.source, adapter
        self.reads_scales = base.source.reads_scales
        self._map = TensorMap(base.source)
        if self._map.entry.layout == "heads":
            raise HeadspanError(
                f"{base.reference} has TransformerLens tensors, but an adapter names modules of transformers: "
                "give the model in Hugging Face layout"
            )
        self._stamps = {**getattr(base.source, "_stamps", {}), adapter.file.path: adapter.file.stamp}
        self._unknown: list[str] = []
        self.replaced = dict(self._replacements())
        self.patches = {name: patch for module in adapter.pairs for name, patch in self._patch(module)}
        self.patches |= {name: patch for module in adapter.embeddings for name, patch in self._embedding(module)}
        self._check_some_fit()
        self.notes = [*base.source.notes, *self._make_notes(base)]

    # -- which tensor of the base ----------------------------------------------------------------------------

    def _find(self, name: str) -> str | None:
        """The base's name for a tensor; its body may have another prefix."""
        found = name_in(self._map, name)
        if found is not None:
            return found
        layers = re.escape(self._map.entry.layer).replace(r"\{\}", r"(\d{1,6})")
        layer = re.search(rf"(?:^|\.){layers}", name)
        if layer and int(layer[1]) >= self._map.n_layers and name.startswith(tuple(_prefixes(self._map) - {""})):
            raise HeadspanError(
                f"the adapter {self.adapter.directory} changes {name[:120]}, but {self.base.reference} has "
                f"{self._map.n_layers} layers: it was made for another base{self._said()}"
            )
        self._unknown.append(name)
        return None

    def _said(self) -> str:
        named = self.adapter.config.get("base_model_name_or_path")
        return f" (its config names {named[:120]!r})" if isinstance(named, str) and named else ""

    def _replacements(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for name, stored in self.adapter.saved.items():
            target = self._find(name)
            if target is not None:
                found.append((target, stored))
        return found

    def _patch(self, module: str) -> list[tuple[str, Patch]]:
        pair = self.adapter.pairs[module]
        found: list[tuple[str, Patch]] = []
        target = self._find(f"{module}.weight")
        if target is not None:
            start = self._map.prefix + self._map.entry.layer.partition("{")[0]
            patch = self._checked(target, module, pair, turned=self._map.entry.transposed and target.startswith(start))
            found.append((target, patch))
            bias = target.removesuffix("weight") + "bias"
            if "bias" in pair and bias in self._map.names:
                found.append((bias, patch._replace(first="", second=pair["bias"])))
        return found

    def _embedding(self, module: str) -> list[tuple[str, Patch]]:
        target = self._find(f"{module}.weight")
        return (
            [] if target is None else [(target, self._checked(target, module, self.adapter.embeddings[module], True))]
        )

    def _checked(self, target: str, module: str, pair: dict[str, str], turned: bool) -> Patch:
        """The change of one tensor, after checking the shapes of its factors."""
        shape_a, shape_b = (self.adapter.file.shape(pair[key]) for key in "AB")
        made = (shape_b[0], shape_a[1]) if len(shape_a) == len(shape_b) == 2 and shape_a[0] == shape_b[1] else None
        seen = self.shape(target)
        if made is None or min(shape_a) < 1 or (made[::-1] if turned else made) != seen:
            raise HeadspanError(
                f"the adapter {self.adapter.directory} does not fit {self.base.reference}: {module[:120]} has factors "
                f"of shapes {list(shape_b)} and {list(shape_a)}, the tensor is {list(seen)}{self._said()}"
            )
        return Patch(pair["A"], pair["B"], self.adapter.scale(module, shape_a[0]), turned)

    def _check_some_fit(self) -> None:
        if not self.patches and not self.replaced:
            raise HeadspanError(
                f"nothing that the adapter {self.adapter.directory} changes is in {self.base.reference}: it changes "
                f"for example {self._unknown[0][:120]!r}, so it was made for another base{self._said()}"
            )

    def _make_notes(self, base: CheckpointWeights) -> list[str]:
        notes: list[str] = []
        if self._unknown:
            notes.append(
                f"{len(self._unknown)} modules that the adapter changes are not in the base and were left out, "
                f"for example {self._unknown[0][:120]}"
            )
        if not {*self.patches, *self.replaced} & set(base.tensors()):
            notes.append("the adapter changes no attention weights, so the heads stay the same")
        named = self.adapter.config.get("base_model_name_or_path")
        if isinstance(named, str) and named and Path(named).name != Path(base.reference.partition("@")[0]).name:
            notes.append(f"the adapter's config names the base {named[:120]}, but it was applied to {base.reference}")
        return notes

    # -- tensors ---------------------------------------------------------------------------------------------

    def names(self) -> Collection[str]:
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.adapter.file.shape(self.replaced[name]) if name in self.replaced else self.base.shape(name)

    def dtype(self, name: str) -> str:
        return self.adapter.file.dtype(self.replaced[name]) if name in self.replaced else self.base.dtype(name)

    def nbytes(self, name: str) -> int:
        return self.adapter.file.nbytes(self.replaced[name]) if name in self.replaced else self.base.nbytes(name)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        file = self.adapter.file
        tensor = file.read(self.replaced[name], rows) if name in self.replaced else self.base.read(name, rows)
        patch = self.patches.get(name)
        if patch is None:
            return tensor
        first, last = row_range(rows, self.shape(name), name)
        with np.errstate(over="ignore", invalid="ignore"):  # reading the weight reports values that are not finite
            if not patch.first:
                return tensor + np.float32(patch.scale) * file.read(patch.second)[first:last]
            a, b = self.adapter.factor(patch.first), self.adapter.factor(patch.second)
            left, right = (a.T, b.T) if patch.turned else (b, a)
            return tensor + np.float32(patch.scale) * (left[first:last] @ right)

    def vocabulary(self) -> Any:
        return self.base.vocabulary()

    @property
    def in_memory(self) -> bool:  # type: ignore[override]
        return self.base.in_memory

    def _hash(self, name: str) -> bytes:
        file, patch = self.adapter.file, self.patches.get(name)
        own = file.hash(self.replaced[name]) if name in self.replaced else self.base._hash(name)
        if patch is None:
            return own
        factors = (file.hash(factor) for factor in (patch.first, patch.second) if factor)
        return hashlib.sha256(b"".join([own, canonical_json(patch), *factors])).digest()
