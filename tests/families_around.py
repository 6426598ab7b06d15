"""Text models inside vision and audio models: one small model of each, built with transformers' own classes.

The whole model is built, saved and run on text alone, so that the names of its files are tested as well.
"""

from __future__ import annotations

from typing import Any

from families import BASE, GEMMA4, GQA, MLA, MOE, ROUTED, SPARSE, WIDE, Family

SEEN: dict[str, Any] = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "out_hidden_size": 24, "image_size": 28, "patch_size": 14,
}  # fmt: skip
DEEP = SEEN | {"deepstack_visual_indexes": [0]}
HEARD = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "output_dim": 24, "downsample_hidden_size": 8,
}  # fmt: skip
SIGLIP = SEEN | {"model_type": "siglip_vision_model"}
SAM = SEEN | {"output_channels": 8, "num_pos_feats": 4, "global_attn_indexes": [0], "mlp_dim": 16, "window_size": 2,
              "downsample_channels": [8, 8]}  # fmt: skip
ENCODER = SEEN | {"num_key_value_heads": 2, "vocab_size": 10}
EXPERTS = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
           "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]}  # fmt: skip
PHI_HEARD = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_blocks": 1,
             "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8}  # fmt: skip
CODES = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
CODED = {"vq_config": CODES, "vocabulary_map": {"<image>": 3}}


def rope(*sections: int) -> dict[str, Any]:
    """How many of the rotary numbers are for time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


def around(
    outer: str, model_type: str, config: dict[str, Any], vision: dict[str, Any] | None = None, /,
    rest: dict[str, Any] | None = None, **more: Any,
) -> Family:  # fmt: skip
    parts = ({} if vision is None else {"vision_config": vision}) | (rest or {})
    return Family(model_type, config, around=(outer, parts), **more)


AROUND: dict[str, Family] = {
    "qwen2_vl": around("qwen2_vl", "qwen2_vl_text", GQA | rope(1, 1, 1), SEEN),
    "qwen2_5_vl": around("qwen2_5_vl", "qwen2_5_vl_text", GQA | rope(1, 1, 1), SEEN),
    "qwen2_5_omni": around(
        "qwen2_5_omni_thinker", "qwen2_5_omni_text", GQA | rope(1, 1, 1), SEEN, rest={"audio_config": HEARD}
    ),
    "qwen3_vl": around("qwen3_vl", "qwen3_vl_text", WIDE, DEEP, d_head=8),
    "qwen3_vl_moe": around("qwen3_vl_moe", "qwen3_vl_moe_text", WIDE | MOE, DEEP, d_head=8),
    "qwen3_omni_moe": around(
        "qwen3_omni_moe_thinker", "qwen3_omni_moe_text", WIDE | MOE, DEEP, rest={"audio_config": HEARD}, d_head=8
    ),
    "glm4v": around("glm4v", "glm4v_text", GQA | rope(1, 1, 1), SEEN, place="sandwich"),
    "glm46v": around("glm46v", "glm4v_text", GQA | rope(1, 1, 1), SEEN, place="sandwich"),
    "glm_ocr": around("glm_ocr", "glm_ocr_text", WIDE | rope(1, 1, 2), SEEN, d_head=8, place="sandwich"),
    "glm4v_moe": around(
        "glm4v_moe", "glm4v_moe_text", WIDE | ROUTED | rope(1, 1, 0) | {"attention_bias": True}, SEEN, d_head=8
    ),
    "ernie4_5_vl_moe": around(
        "ernie4_5_vl_moe", "ernie4_5_vl_moe_text",
        GQA | rope(1, 1, 1) | {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [16, 16]}, SEEN,
    ),
    "granite4_vision": around(
        "granite4_vision", "granite4_vision_text", GQA, SIGLIP | {"hidden_size": 64},
        rest={"deepstack_layer_map": [], "downsample_rate": "1/2"},
    ),
    "granite_docling": around("granite_docling", "granite_docling_text", GQA, SIGLIP),
    "hunyuan_vl": around("hunyuan_vl", "hunyuan_vl_text", WIDE | rope(1, 1, 2), SEEN, d_head=8),
    "paddleocr_vl": around("paddleocr_vl", "paddleocr_vl_text", WIDE | rope(1, 1, 2), SEEN, d_head=8),
    "emu3": around(
        "emu3", "emu3_text_model", GQA, rest={"vq_config": CODES, "vocabulary_map": {"<image>": 3}}
    ),
    "muse_glimmer": around("muse_glimmer", "muse_glimmer_text", WIDE, SEEN, d_head=8, place="sandwich"),
    "cosmos3_edge": around("cosmos3_edge", "cosmos3_edge_text", WIDE | rope(1, 1, 2), SEEN, d_head=8),
    "step3p7": around(
        "step3p7", "step3p5",
        WIDE | {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "share_expert_dim": 16,
                "num_sliding_attention_heads": 6, "layer_types": ["full_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse"], "sliding_window": 8},
        {key: SEEN[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size",
                                    "patch_size")},
        counts=((4, 2), (6, 2)), d_head=8,
    ),
    "deepseek_ocr2": around(
        "deepseek_ocr2", "deepseek_ocr2_text", GQA | EXPERTS, {"sam_config": SAM, "encoder_config": ENCODER},
    ),
    "unlimited_ocr": around(
        "unlimited_ocr", "unlimited_ocr_text", BASE | EXPERTS | {"num_key_value_heads": 4},
        {"sam_config": SAM, "encoder_config": SEEN}, n_kv_heads=4,
    ),
    "mllama": around(
        "mllama", "mllama_text_model", GQA | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        SEEN | {"num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0],
                "vision_output_dim": 32, "supported_aspect_ratios": [[1, 1]]}, layers=(0, 2),
    ),
    "got_ocr2": around("got_ocr2", "qwen2", GQA, SAM),
    "fuyu": around(
        "fuyu", "persimmon", BASE | {"hidden_size": 32, "qk_layernorm": False},
        rest={"image_size": 28, "patch_size": 14}, n_kv_heads=4, d_head=8,
    ),
    "gemma4_unified": around(
        "gemma4_unified", "gemma4_unified_text", GEMMA4 | {"attention_k_eq_v": False}, SEEN,
        counts=((4, 2),) * 3, sizes=((8, 8), (12, 12), (12, 12)), layers=(0, 1, 2), place="sandwich",
    ),
    "chameleon": Family("chameleon", GQA | CODED),
    "chameleon-swin": Family("chameleon", GQA | CODED | {"swin_norm": True}, place="output"),
    "phi4_multimodal": Family("phi4_multimodal", GQA | {"vision_config": SEEN, "audio_config": PHI_HEARD}),
    "git": Family("git", BASE | {"vision_config": SEEN}, 4, place="post"),
}  # fmt: skip

LATENT_AROUND: dict[str, Family] = {
    "glm5_next": around(
        "glm5_next", "glm5_next_text",
        {k: v for k, v in MLA.items() if k != "qk_rope_head_dim"} | SPARSE
        | {"index_topk": 48, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
           "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "attention_bias": True,
           "mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "num_hidden_layers": 4, "hc_mult": 3,
           "layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 2},
        SEEN, n_kv_heads=4, layers=(1, 3),
    ),
}  # fmt: skip
