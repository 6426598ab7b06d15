"""Layers without their own keys and values, which use those of an earlier layer (Gemma 3n, Gemma 4 E2B and E4B).

Their query heads and output weights are their own. Their key/value heads are listed once, in the earlier layer,
with query heads of several layers in their group.
"""

from __future__ import annotations

from typing import Any

from headspan.models.families.entry import Config
from headspan.vocabulary.errors import HeadspanError


def kv_layers(config: Config, n_layers: int, where: Any) -> dict[int, int]:
    """For each layer without its own keys and values, the layer that provides them: the last of its kind with its own.

    >>> kinds = ["sliding_attention", "full_attention"] * 3
    >>> kv_layers({"num_kv_shared_layers": 2, "layer_types": kinds}, 6, "a model")
    {4: 2, 5: 3}
    """
    count, kinds = config.get("num_kv_shared_layers") or 0, config.get("layer_types")
    if type(count) is not int or not 0 <= count < n_layers:
        raise HeadspanError(
            f"the config of {where} has num_kv_shared_layers = {repr(count)[:40]}: a number of layers below its "
            f"{n_layers} is needed"
        )
    if not count:
        return {}
    if not isinstance(kinds, (list, tuple)) or len(kinds) != n_layers or not all(isinstance(k, str) for k in kinds):
        raise HeadspanError(
            f"the last {count} layers of {where} use the keys and values of earlier layers of their kind "
            f"(num_kv_shared_layers), but its config does not list the kinds of its {n_layers} layers (layer_types)"
        )
    lenders = {kind: layer for layer, kind in enumerate(kinds[: n_layers - count])}
    borrowers = range(n_layers - count, n_layers)
    alone = next((layer for layer in borrowers if kinds[layer] not in lenders), None)
    if alone is not None:
        raise HeadspanError(
            f"layer {alone} of {where} uses the keys and values of an earlier layer of the kind "
            f"{kinds[alone][:40]!r} (num_kv_shared_layers), but there is none: check its config"
        )
    return {layer: lenders[kinds[layer]] for layer in borrowers}
