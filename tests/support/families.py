"""The families of transformers that have gradient checkpointing, by their `model_type`: those that
`tests.support.tiny_transformers.tiny` makes and calls, and those that it does not, by the reason.
"""

from __future__ import annotations

import re

FAMILIES = re.findall(
    r"\S+",
    """
    afmoe aimv2 aimv2_text_model aimv2_vision_model align_text_model altclip altclip_text_model
    altclip_vision_model apertus arcee aria aria_text audio-spectrogram-transformer audioflamingo3
    audioflamingo3_encoder autoformer axk1 axk2 aya_vision bailing_hybrid bamba bart beam beit bert
    bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blip-2
    blip_2_qformer blip_2_vision_model blip_vision_model bloom blt blt_global_transformer
    blt_local_decoder blt_local_encoder blt_patcher camembert canary canary_decoder canine chameleon
    chinese_clip chinese_clip_text_model chinese_clip_vision_model chmv2 clip clip_text_model
    clip_vision_model clipseg clipseg_text_model clipseg_vision_model codegen cohere cohere2
    cohere2_moe cohere2_vision cohere_asr cohere_compass cohere_compass_text cohere_compass_vision
    conditional_detr convbert cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni csm
    csm_depth_decoder_model cwm data2vec-audio data2vec-text data2vec-vision dbrx deberta deberta-v2
    decision_transformer deepseek_ocr2 deepseek_ocr2_encoder deepseek_ocr2_sam_vision_model
    deepseek_ocr2_text deepseek_ocr2_vision deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    deepseek_vl deepseek_vl_hybrid deformable_detr deit depth_anything depth_pro detr dia
    dia_decoder dia_encoder diffllama diffusion_gemma dinov2 dinov2_with_registers dinov3_vit
    distilbert doge donut-swin dots1 dots3_note dots3_note_audio_encoder dots3_note_text
    dots3_note_vision_encoder dpt efficientloftr electra embedding_gemma2 embedding_gemma2_text emu3
    emu3_text_model encoder-decoder ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe ernie4_5_vl_moe_text
    ernie4_5_vl_moe_vision esm esmc esmfold2 eurobert evolla exaone4 exaone4_5 exaone4_5_vision
    exaone_moe falcon falcon_h1 falcon_mamba flava flava_image_model flava_multimodal_model
    flava_text_model flex_olmo flint florence2 fnet focalnet fun_asr_nano fun_asr_nano_encoder fuyu
    gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text gemma4_vision git git_vision_model glm glm4 glm46v glm4_moe glm4_moe_lite
    glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision glm4v_text glm4v_vision glm5_next glm5_next_text
    glm5_next_vision glm_image glm_image_text glm_image_vision glm_moe_dsa glm_ocr glm_ocr_text
    glm_ocr_vision glmasr glmasr_encoder glmga got_ocr2 got_ocr2_vision gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_oss gptj gradium_phonon_tts granite granite4_vision granite4_vision_text
    granite_docling granite_docling_text granite_docling_vision granite_speech5_ctc
    granite_speech5_encoder granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    groupvit groupvit_text_model groupvit_vision_model gte helium hiera higgs_audio_v2 hrm_text
    hubert hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hunyuan_vl_vision hy_v3 hy_v4
    hyperclovax hyperclovax_vision_v2 idefics idefics2 idefics2_vision idefics3 idefics3_vision
    ijepa imagegpt informer inkling2 inkling2_text inkling2_vision inkling_text instructblip
    instructblip_qformer instructblip_vision_model instructblipvideo instructblipvideo_qformer
    instructblipvideo_vision_model internlm3 internvl internvl_vision iquestcoder jais2 jamba janus
    janus_vision_model jina_embeddings_v3 kimi_k25 kimi_k25_vision kimi_linear kolibri1 kosmos-2
    kosmos-2.5 kosmos_2_5_text_model kosmos_2_5_vision_model kosmos_2_text_model
    kosmos_2_vision_model kyutai_speech_to_text laguna lasr_ctc lasr_encoder layoutlm led lfm2
    lfm2_moe lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lighton_ocr lilt llama llama4 llama4_text
    llama4_vision_model llava llava_next llava_next_video llava_onevision longcat_flash longformer
    longt5 luke lw_detr_vit m2m_100 mamba mamba2 marian maskformer-swin mbart megatron-bert mellum
    metaclip_2 metaclip_2_text_model metaclip_2_vision_model mimi mimi_decoder mimi_encoder
    mimo_v2_flash minicpm3 minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_6_vision minicpmv4_7
    minicpmv4_7_vision minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text minimax_m3_vl_vision
    ministral ministral3 mistral mistral3 mistral4 mistral_large4 mistral_large4_text mixtral
    mlcd_vision_model mllama mllama_text_model mobilebert mobilevit mobilevitv2 modernbert
    modernbert-decoder modernvbert molmo2 molmo2_text molmo2_vision moonshine moonshine_streaming
    moonshine_streaming_encoder moshi moshi_depth moss_transcribe_diarize
    moss_transcribe_diarize_audio mpt mra mt5 muse_glimmer muse_glimmer_assistant muse_glimmer_text
    muse_glimmer_vision muse_spark muse_spark_text muse_spark_vision musicflamingo musicgen
    musicgen_decoder musicgen_melody musicgen_melody_decoder mvp nanochat nemo_speechlm nemotron
    nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio
    nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h nemotron_h_omni neomme neucodec
    nllb-moe nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter opt
    ovis2 ovis2_vision owlv2 owlv2_text_model owlv2_vision_model owlvit owlvit_text_model
    owlvit_vision_model paddleocr_vl paddleocr_vl_text paddleocr_vl_vision paligemma parakeet_ctc
    parakeet_encoder parakeet_rnnt parakeet_tdt pe_audio pe_audio_encoder pegasus pegasus_x
    persimmon phi phi3 phi4_multimodal phi4_multimodal_vision phimoe pix2struct_text_model
    pix2struct_vision_model pixio pixtral plbart pocket_tts pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pop2piano pp_formulanet
    pp_formulanet_text pp_formulanet_vision pp_lcnet pp_lcnet_v3 pp_ocrv5_mobile_rec
    prompt_depth_anything prophetnet pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2
    qwen2_5_omni_audio_encoder qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_omni_thinker
    qwen2_5_omni_vision_encoder qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio
    qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen2_vl_vision qwen3 qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_asr qwen3_asr_encoder
    qwen3_moe qwen3_next qwen3_omni_moe_audio_encoder qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_omni_moe_thinker
    qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision
    qwen3_vl_text qwen3_vl_vision qwen4_exp qwen4_exp_text qwen4_exp_vision radio recurrent_gemma
    rembert rf_detr_dinov2 roberta roberta-prelayernorm roc_bert roformer rwkv sam sam3_lite_text
    sam_hq sam_hq_vision_model sam_vision_model sapiens2 seamless_m4t seamless_m4t_v2 seed_oss
    segformer seggpt sew sew-d siglip siglip2 siglip2_text_model siglip2_vision_model
    siglip_text_model siglip_vision_model slanext slanext_vision smollm3 smolvlm smolvlm_vision
    solar_open speech-encoder-decoder speech_to_text speecht5 splinter stablelm starcoder2 step3p5
    step3p5_vision step3p7 swiftformer swin swin2sr swinv2 switch_transformers t5 t5gemma t5gemma2
    t5gemma2_decoder t5gemma2_encoder t5gemma2_text tapas time_series_transformer timesformer tipsv2
    tipsv2_dpt tipsv2_text_model tipsv2_vision_model trocr tvp udop ultrabert ultravbert umt5
    unispeech unispeech-sat unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_text
    unlimited_ocr_vision unlimited_ocr_vision_encoder uvdoc uvdoc_backbone vaultgemma vibevoice
    vibevoice_asr video_llama_3 video_llama_3_vision video_llava videomae videoprism
    videoprism_text_model videoprism_vision_model vilt vipllava vision-encoder-decoder visual_bert
    vit vit_mae vit_msn vitdet vitmatte vitpose vitpose_backbone vits vivit vjepa2 voxtral
    voxtral_encoder voxtral_realtime voxtral_realtime_encoder voxtral_realtime_text wav2vec2
    wav2vec2-bert wav2vec2-conformer wavlm whisper xclip xclip_text_model xclip_vision_model xcodec2
    xglm xlm-roberta xlm-roberta-xl xlstm xmod yolos yoso youtu zamba zamba2 zaya zoedepth
    """,
)

# One of each kind: a decoder, an encoder, one for images, one for sound, two towers, experts, and a
# text with a picture in it.
QUICK = ("llama", "bert", "vit", "wav2vec2", "t5", "mixtral", "qwen2_vl")

LARGE = 50_000_000
"""Parameters, past which a model is too large for a test."""

NO_LAYERS = "transformers checkpoints none of its layers"
NO_FORWARD = "its base class has no forward"
TOO_LARGE = "its sizes are constants in its code, and too large for a test"
NO_KEYS = "all of its layers read keys that none of them makes: transformers refuses to make it"
NEEDS_CACHE = "reads a cache that gradient checkpointing switches off: transformers' own raises"

LEFT_OUT = {
    name: reason
    for reason, names in {
        NO_LAYERS: """
            clvp clvp_decoder clvp_encoder diffusion_gemma_text gemma3n_audio gemma4_audio
            idefics2_perceiver inkling_audio janus_vqgan mllama_vision_model molmo2_adapter
            muse_spark_audio phi4_multimodal_audio pp_lcnet_v4 pp_ocrv5_server_rec
            pp_ocrv6_small_rec qwen2_5_omni_dit sam3_lite_text_detr_decoder
            sam3_lite_text_detr_encoder sam3_lite_text_mask_decoder sam3_lite_text_text_model slanet
        """,
        NO_FORWARD: """
            chameleon_vqgan glm_image_vqmodel qwen2_5_omni qwen3_omni_moe
        """,
        "needs timm": """
            fast_vlm gemma3n pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder
            perception_lm
        """,
        "needs torchaudio": """
            higgs_audio_v2_tokenizer
        """,
        "needs scipy": """
            inkling_mm_model inkling_vision
        """,
        TOO_LARGE: """
            align qwen2_5_omni_bigvgan qwen2_5_omni_token2wav
        """,
        NO_KEYS: """
            gemma4_assistant gemma4_unified_assistant
        """,
        NEEDS_CACHE: """
            pi0
        """,
    }.items()
    for name in names.split()
}
