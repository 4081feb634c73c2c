"""What configurations of transformers need beside the numbers that are made small by their names:
numbers that must agree with each other, and two layers of each kind, so that there are blocks.
"""

from __future__ import annotations

from typing import Any

_SAM = {
    "vision_config.global_attn_indexes": [1],
    "vision_config.window_size": 2,
    "vision_config.num_pos_feats": 16,
    "prompt_encoder_config.image_embedding_size": 4,
}

# A head of eight numbers has four pairs to turn: one for each axis, and one for the residue.
_FOLD = {
    **{
        f"{part}.{number}": 1
        for part in ("atom_encoder", "structure_head.diffusion_module.atom_encoder")
        for number in ("num_spatial_rope_pairs_per_axis", "num_uid_rope_pairs")
    },
    "esmc_config.num_key_value_heads": 4,
    "num_loops": 1,
    "atom_feature_dim": None,
    "single_inputs_size": 32 + 33 + 33 + 1,
}

# A model that guesses another's next words, and reads its keys and values in all of its layers.
_GEMMA = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 30,
}

CHANGES: dict[str, dict[str, Any]] = {
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "neomme": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "esm": {"mask_token_id": 90},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "unlimited_ocr": {"text_config.num_key_value_heads": 4},
    "moonshine": {"decoder_num_key_value_heads": 4, "encoder_num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]}
    },
    "swin2sr": {"num_heads": [4, 4], "depths": [2, 2], "embed_dim": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "vitpose_backbone": {"part_features": 8, "num_experts": 1},
    "hiera": {"patch_size": [7, 7]},
    "step3p5": {"sliding_window": 16},
    "step3p7": {"text_config.sliding_window": 16},
    "sapiens2": {"num_key_value_heads_per_layer": [4, 4]},
    "nemotron_asr_streaming_encoder": {"default_num_lookahead_tokens": 3},
    "nemotron_asr_streaming": {"encoder_config.default_num_lookahead_tokens": 3},
    "nemotron3_5_asr": {"encoder_config.default_num_lookahead_tokens": 3},
    "vitpose": {"backbone_config.part_features": 8, "backbone_config.num_experts": 1},
    "zoedepth": {"bottleneck_features": 32},
    "swin": {"patch_size": 2},
    "donut-swin": {"patch_size": 2},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "lilt": {"hidden_size": 48},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "vits": {
        "upsample_initial_channel": 32,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm5_next": {"text_config.qk_rope_head_dim": 0},
    "chameleon": {"vocabulary_map": {"<image>": 90}},
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 8},
    "mobilevitv2": {"image_size": 64},
    "xclip_vision_model": {"num_frames": 2},
    "clvp_encoder": {"use_rotary_embedding": False},
    "dots3_note": {"audio_config.adapter_input_size": 32},
    "blt": {"encoder_config.hidden_size_global": 32, "decoder_config.hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "blt_local_encoder": {"hidden_size_global": 32},
    "cohere_compass": {
        "text_config.rope_parameters": {
            "full_attention": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "mrope_section": [1, 1, 2],
            }
        }
    },
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [32, 32, 32],
        "merge_padding_value": 1,
    },
    "deepseek_ocr2_vision": {"sam_config.downsample_channels": [32, 32]},
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 64,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "mrope_section": [1, 1, 2],
        }
    },
    "esmfold2": _FOLD,
    "gemma4_assistant": {"text_config.num_kv_shared_layers": 2},
    "gemma4_unified_assistant": {"text_config.num_kv_shared_layers": 2},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config.hidden_size": 64,
        "qformer_config.num_attention_heads": 1,
    },
    "instructblipvideo": {"video_token_id": 90},
    "kimi_k25_vision": {"pos_emb_height": 32},
    "kosmos-2": {"latent_query_num": 4},
    "llama4_vision_model": {"intermediate_size": 128},
    "longcat_flash": {"qk_head_dim": 16},
    "lw_detr_vit": {"num_windows": 4, "window_block_indices": [0]},
    "mimi": {"codebook_dim": 32, "vector_quantization_hidden_dimension": 32},
    "molmo2_vision": {"num_position_embeddings": 16},
    "moshi_depth": {"input_size": 32},
    "sam": _SAM,
    "sam_hq": _SAM,
    "seggpt": {"image_size": [64, 32]},
    "tvp": {"max_img_size": 128, "visual_prompt_size": 4, "num_frames": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "conv_output_size": 128},
    "efficientloftr": {
        "hidden_size": 64,
        "num_key_value_heads": 4,
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_block_stride": [[2], [1], [2], [2]],
        "stage_block_out_channels": [[16], [16], [32], [64]],
        "stage_block_in_channels": [[1], [16], [16], [32]],
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "partial_rotary_factor": 2.0,
        },
    },
    "granite_speech5_ctc": {
        "encoder_config.context_size": 8,
        "encoder_config.num_key_value_heads": 4,
    },
    "granite_speech5_encoder": {"context_size": 8, "num_key_value_heads": 4},
    "idefics": {"alpha_initializer": "ones"},  # with zeros all but the gates have no gradient
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_audio": {
        "asr_config.num_key_value_heads": 4,
        "diarization_config.audio_config.num_key_value_heads": 4,
    },
    "nemotron3_diarization": {"audio_config.num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "neucodec": {"quantization_dim": 64, "num_key_value_heads": 4},
    "xcodec2": {"quantization_dim": 64, "num_key_value_heads": 4},
    "uvdoc": {
        "backbone_config.out_features": [f"stage{n}" for n in range(1, 7)],
        "backbone_config.out_indices": [*range(1, 7)],
    },
    "vitmatte": {
        "fusion_hidden_sizes": [32, 32, 16, 16],
        "backbone_config.patch_size": 16,
        "backbone_config.image_size": 64,
        "backbone_config.num_channels": 4,
    },
}

STARTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": _GEMMA},
}
"""Arguments of configurations whose defaults raise."""
