"""Run a model and look at its attention: any reference, or a live model, with torch and transformers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headspan.checkpoints.huggingface import TORCH_SUFFIXES, CheckpointSource
from headspan.checkpoints.live_tokenizer import live_vocabulary, with_tokenizer
from headspan.checkpoints.plain_models import (
    GIVE,
    check_in_memory,
    check_runnable,
    evaluated,
    in_dtype,
    is_wrapped,
    plain_model,
    unwrapped,
)
from headspan.checkpoints.untrusted import reason
from headspan.models.weights import AttentionWeights
from headspan.running.fast_gguf import quick_gguf
from headspan.system.inputs import is_directory, mode_of
from headspan.vocabulary.errors import HeadspanError, missing_extra, refuse_ignored
from headspan.vocabulary.heads import Head

if TYPE_CHECKING:
    import torch

    from headspan.checkpoints.base import TensorSource
    from headspan.checkpoints.tokenizer import Vocabulary

DTYPES = ("float32", "bfloat16", "float16", "stored")
# Attention patterns do not depend on these weights, so a checkpoint may lack them.
_UNUSED = ("pooler", "lm_head", "classifier", "attn.bias", "attn.masked_bias", "rotary_emb.inv_freq", "position_ids")


@dataclass
class RunningModel:
    """A model ready to run, with its tokenizer and the names of its heads."""

    model: Any
    reference: str
    vocabulary: Vocabulary | None = None
    notes: list[str] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)  # provenance of its attention weights, if known

    def __post_init__(self) -> None:
        if self.model.config.is_encoder_decoder:
            raise HeadspanError(
                f"{self.reference} is an encoder-decoder model. Head scores are defined for one stack of layers only"
            )

    @property
    def config(self) -> Any:
        """The config of the text model (models with several parts nest it)."""
        found = self.model.config.get_text_config()
        return found if hasattr(found, "to_dict") else self.model.config  # an empty text_config does not count

    @property
    def dtype(self) -> str:
        """The type that it computes in, by name."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """Number of valid input ids: rows of the embedding that the tokenizer (if there is one) knows."""
        return self.embedded if self.vocabulary is None else min(self.embedded, self.vocabulary.size)

    @property
    def embedded(self) -> int:
        """Rows of the embedding of tokens."""
        try:
            return int(self.model.get_input_embeddings().weight.shape[0])
        except (AttributeError, NotImplementedError):
            raise HeadspanError(
                f"{self.reference} has no embedding of tokens, so it does not run on text. {GIVE}"
            ) from None

    @property
    def context(self) -> int | None:
        """The longest sequence that the model takes, if its config says so."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: those of the tokenizer, or those named in the config."""
        if self.vocabulary is not None:
            return self.vocabulary.special_ids
        found: set[int] = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self.config, name, None)
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        return frozenset(found)

    def start_token(self, bos: str = "auto") -> int | None:
        """The beginning-of-sequence token to prepend, or None.

        ``auto``: if the model's tokenizer prepends it, as in training; a model without tokenizer runs without it.
        """
        if bos not in ("auto", "yes", "no"):
            raise HeadspanError(f"unknown bos {bos!r}. Choose auto, yes or no")
        if bos == "no":
            return None
        found = self.vocabulary.start_id if self.vocabulary is not None else None
        if found is None and bos == "yes":
            named = getattr(self.config, "bos_token_id", None)
            found = named[0] if isinstance(named, list) and named else named
            if not isinstance(found, int):
                raise HeadspanError(f"{self.reference} has no beginning-of-sequence token. Run it with bos no")
        if found is not None and not 0 <= found < self.embedded:
            raise HeadspanError(f"the beginning-of-sequence token {found} of {self.reference} has no embedding")
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        if self.vocabulary is None:
            raise HeadspanError(
                f"{self.reference} has no tokenizer, so it cannot run on text. A model in memory can be given with "
                "one, as (model, tokenizer)"
            )
        ids = self.vocabulary.encode(text)
        if ids and max(ids) >= self.embedded:
            raise HeadspanError(
                f"the tokenizer is not that of {self.reference}: it gives the id {max(ids)}, and the model has "
                f"{self.embedded} tokens"
            )
        return ids

    def attentions(self, ids: torch.Tensor) -> dict[int, torch.Tensor]:
        """Attention weights (batch, heads, queries, keys) by layer number, for token ids (batch, tokens)."""
        import torch

        try:
            with torch.inference_mode():
                found = self.model(input_ids=ids.to(self.model.device), output_attentions=True, return_dict=True)
            patterns = getattr(found, "attentions", None)
        except MemoryError:
            raise
        except Exception as error:
            raise self._no_attention(reason(error)) from error
        patterns = [p for p in patterns or () if p is not None]
        layers = self._layers(len(patterns))
        return dict(zip(layers, patterns, strict=True))

    def _layers(self, found: int) -> list[int]:
        """Layer numbers of the attention maps; a hybrid model returns them for its attention layers only."""
        expected = int(self.config.num_hidden_layers)
        if found == expected:
            return list(range(expected))
        kinds = getattr(self.config, "layer_types", None) or getattr(self.config, "layers_block_type", None) or ()
        layers = [i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind]
        if not found or len(layers) != found:
            raise self._no_attention(f"{found} attention maps for {expected} layers")
        return layers

    def _no_attention(self, seen: str) -> HeadspanError:
        return HeadspanError(
            f"{self.reference} ({self.config.model_type}) does not return its attention weights ({seen}). "
            "Head scores need a transformers model that supports output_attentions with eager attention"
        )


def head_names(attentions: dict[int, torch.Tensor]) -> list[Head]:
    """The query heads of attention maps, in layer order."""
    return [Head(layer, i) for layer, pattern in attentions.items() for i in range(pattern.shape[1])]


@contextmanager
def running(
    ref: Any, *, device: str | None = None, dtype: str = "float32", logits: bool = False
) -> Iterator[RunningModel]:
    """Make a reference or live model ready to run; a live model stays as it is.

    Parameters
    ----------
    ref : a directory, a ``.gguf`` file, a hub id, ``"demo"``, opened weights of one of these, a transformers model, a
        PEFT model (its active adapters are merged in a copy), a TransformerLens bridge, ``(model, tokenizer)``, or a
        `RunningModel`.
    device : device for a model that is loaded here, for example ``"cuda"``.
    dtype : type to compute in, one of `DTYPES`; ``"stored"`` is the type of the weights. Half precision rounds away
        small differences of attention, so ``"float32"`` is the default (a live model in float64 stays in float64).
        A `RunningModel` is used unchanged.
    logits : with the output head of a causal language model; otherwise the body alone runs.
    """
    check_dtype(dtype)
    if isinstance(ref, AttentionWeights):
        ref = _reference_of(ref)
    if not isinstance(ref, (str, os.PathLike)):
        refuse_ignored("on a model that is loaded already", device=device)
    if isinstance(ref, RunningModel):
        yield ref
    elif isinstance(ref, (str, os.PathLike)):
        yield load(ref, device=device, dtype=dtype, logits=logits)
    else:
        given, tokenizer = with_tokenizer(ref)
        given, vocabulary = unwrapped(given), live_vocabulary(tokenizer)
        model, identity = _live(given, dtype)
        with evaluated(model):
            ran = model if logits else model.base_model
            yield RunningModel(ran, type(given).__name__, vocabulary, identity=identity)


def _reference_of(weights: AttentionWeights) -> str:
    """What to run: opened weights are run by the reference that they came from."""
    if weights.folding != "none" or not weights.reopenable:
        raise HeadspanError(
            f"{weights.reference} cannot be run (arrays, folded weights or weights of a live model). Give the model "
            "itself: its directory, file, hub id or live model"
        )
    return weights.reference


def _live(ref: Any, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The transformers model to run, and its identity: a copy that shares its tensors, so nothing of it changes."""
    check_runnable(ref)
    model = plain_model(ref)
    check_in_memory(model)
    # A function in place of a forward calls the modules of the model, never those of a copy.
    replaced = any(inspect.isfunction(vars(module).get("forward")) for module in model.modules())
    model = ref if replaced and not is_wrapped(ref) else model
    identity = identity_of(model)
    if identity:
        identity["reference"] = f"live {type(ref).__name__}"
    model = in_dtype(model, dtype)
    if replaced and model is not ref:
        raise HeadspanError(
            f"the forward of a module of this {type(ref).__name__} was replaced, so a copy would not run as it does. "
            "Give a plain transformers model in the type to run in"
        )
    return model, identity


def check_dtype(dtype: str) -> None:
    """Refuse an unknown type to compute in."""
    if dtype not in DTYPES:
        raise HeadspanError(f"unknown dtype {str(dtype)[:40]!r}. Choose {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


def load(
    ref: str | os.PathLike[str], *, device: str | None = None, dtype: str = "float32", logits: bool = False
) -> RunningModel:
    """Load a model to run (see `running`); missing weights are an error."""
    check_dtype(dtype)
    try:
        import torch
        from transformers import AutoModel, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise missing_extra("transformers", "torch", "running a model") from None
    from headspan.checkpoints.opening import open_source
    from headspan.models.opening import refuse_result

    refuse_result(ref)
    with open_source(ref, download=True) as source:
        reference, vocabulary, notes = source.reference, source.vocabulary(), list(source.notes)
        where = _where(ref, source)
        identity = identity_of(source)
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # missing weights are reported below, as one error
        try:
            with quick_gguf(), _no_gguf_bar(), _read_not_mapped() as unmapped:
                kind: Any = AutoModelForCausalLM if logits else AutoModel
                model, info = kind.from_pretrained(
                    **where,
                    dtype="auto" if dtype == "stored" else getattr(torch, dtype),
                    attn_implementation="eager",  # a config can name a hub kernel, which is code
                    output_loading_info=True,
                    trust_remote_code=False,  # None would prompt on the terminal
                    weights_only=True,
                    **(unmapped if any(file.suffix in TORCH_SUFFIXES for file in source.files()) else {}),
                )
        except MemoryError:
            raise
        except Exception as error:  # transformers can raise anything for an untrusted config
            if "trust_remote_code" in str(error):
                raise _brings_code(reference) from None
            raise HeadspanError(f"{reference} cannot be run by transformers: {reason(error)}") from error
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        source.check_unchanged()  # the model that runs is the one that was hashed
    _check_complete(reference, info, logits=logits)
    try:
        model = model.to(device or "cpu")
    except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
        raise HeadspanError(f"this machine cannot run a model on {device!r} ({reason(error)}). Use cpu") from None
    return RunningModel(model.eval(), reference, vocabulary, notes, identity)


@contextmanager
def _read_not_mapped() -> Iterator[dict[str, Any]]:
    """Make transformers read weight files instead of mapping them; yields the option that does so for PyTorch files.

    A mapped file that is truncated while the model runs kills the process, and an edited one changes the model.
    """
    from transformers import PreTrainedModel, modeling_utils

    mapped = modeling_utils.safe_open  # pyright: ignore[reportPrivateImportUsage]

    def unmapped(*args: Any, **options: Any) -> Any:
        try:
            return mapped(*args, **options | {"backend": "pread"})
        except TypeError:  # this version of safetensors can only map files
            return mapped(*args, **options)

    modeling_utils.safe_open = unmapped  # pyright: ignore[reportPrivateImportUsage]
    try:
        known = "disable_mmap" in inspect.signature(PreTrainedModel.from_pretrained).parameters
        yield {"disable_mmap": True} if known else {}
    finally:
        modeling_utils.safe_open = mapped  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Hide transformers' progress bar over GGUF tensors, which has no option."""
    try:
        from transformers import modeling_gguf_pytorch_utils as gguf
    except ImportError:
        yield
        return
    before = getattr(gguf, "tqdm", None)
    gguf.tqdm = lambda tensors, **options: tensors  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        gguf.tqdm = before  # pyright: ignore[reportPrivateImportUsage]


def identity_of(ref: Any) -> dict[str, Any]:
    """Provenance of the attention weights of a model, to compare with a result's; empty for unknown families."""
    from headspan.models.opening import open

    try:
        return open(ref).provenance
    except HeadspanError:
        return {}


def _brings_code(reference: str) -> HeadspanError:
    return HeadspanError(
        f"{reference} needs its own Python code to run (auto_map in its config), and headspan never runs code from "
        "a model. Give a model of a family that transformers includes"
    )


def _where(ref: str | os.PathLike[str], source: TensorSource) -> dict[str, Any]:
    """The arguments by which transformers loads a reference."""
    path = Path(ref).expanduser()
    if is_directory(path):
        if (path / "adapter_config.json").exists():  # transformers would load another model under it
            raise HeadspanError(f"{path} is an adapter (adapter_config.json). Merge it into its model to run it")
        return {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf" and mode_of(path) is not None:
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if mode_of(path) is not None:
        raise HeadspanError(f"{path} is a weight file without a config. To run the model, give its directory")
    if str(ref) == "demo":
        if not source.files():
            raise HeadspanError("the demo model is missing from this installation. Install headspan again")
        return {"pretrained_model_name_or_path": str(source.files()[0].parent)}
    # A hub model: headspan downloads the files itself, with its own checks; transformers never uses the network.
    if isinstance(source, CheckpointSource):
        return {"pretrained_model_name_or_path": str(source.whole_folder()), "local_files_only": True}
    first = source.files()[0]
    return {"pretrained_model_name_or_path": str(first.parent), "gguf_file": first.name, "local_files_only": True}


def _check_complete(reference: str, info: dict[str, Any], *, logits: bool) -> None:
    """Refuse a checkpoint with missing weights, which transformers would fill with random numbers."""
    unused = [part for part in _UNUSED if not (logits and part == "lm_head")]
    missing = [name for name in info["missing_keys"] if not any(part in name for part in unused)]
    missing.sort(key=lambda name: (name.count("."), name))  # the embedding first, then the layers
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise HeadspanError(f"{reference} cannot be run: its checkpoint lacks {shown}. Give the complete model")
