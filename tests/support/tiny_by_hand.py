"""The inputs of models of transformers that the names of their arguments do not tell: by the family
the arguments of its model, for the sizes of `tests.support.tiny_configs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny_configs import HEAD, PATCH, TOKENS, WIDTH, WORDS

ROWS, SIDE = 2, 4
PATCHES = ROWS * SIDE**2
PIXELS = 3 * PATCH * PATCH  # numbers of a patch
FRAMES, BINS = 64, 16


class Values:
    """Makes tensors, each different, the same in each run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def whole(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def words(self, *shape: int) -> Tensor:
        """Tokens of a vocabulary without its first three and last ones, which mean other things."""
        return 3 + self.whole(WORDS - 16, *shape)

    def text(self) -> Tensor:
        return self.words(ROWS, TOKENS)

    def hidden(self, width: int = WIDTH) -> Tensor:
        return self(ROWS, TOKENS, width)

    def image(self, *leading: int, channels: int = 3, side: int = 32) -> Tensor:
        return self(ROWS, *leading, channels, side, side)

    def features(self, bins: int = BINS, frames: int = FRAMES) -> Tensor:
        """A sound's spectrum: one row for each frame."""
        return self(ROWS, frames, bins)


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def grid(height: int = SIDE, width: int = SIDE) -> Tensor:
    """Of each picture its frames, and its patches downwards and across."""
    return torch.tensor([[1, height, width]] * ROWS)


def packed(v: Values, *patch: int) -> dict[str, Any]:
    """The patches of all pictures in one row of them."""
    return {"pixel_values": v(PATCHES, *patch), "grid_thw": grid()}


def in_stripe(v: Values) -> dict[str, Any]:
    """The patches of all pictures side by side in one picture."""
    sizes = torch.tensor([[SIDE, SIDE]] * ROWS)
    return {"pixel_values": v(1, 3, PATCH, PATCH * PATCHES), "target_sizes": sizes}


def placed(v: Values) -> dict[str, Any]:
    """Patches that begin with their row and column."""
    return {"flattened_patches": torch.cat([v.whole(SIDE, ROWS, TOKENS, 2), v.hidden()], -1)}


def prompted(v: Values) -> dict[str, Any]:
    """A picture with two points in each of its regions."""
    return {"pixel_values": v.image(), "input_points": v.whole(32, ROWS, 1, 2, 2).float()}


def sound_and_features(v: Values) -> dict[str, Any]:
    return {"input_values": v(ROWS, 1, 1600), "input_features": v(ROWS, 5, WIDTH)}


def folded(v: Values) -> dict[str, Any]:
    """A chain of eight residues with two atoms each."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    tokens, atoms = 8, 16
    order = torch.arange(tokens).expand(ROWS, -1)
    owner = torch.arange(atoms).expand(ROWS, -1) // 2
    zero = 0 * ones(ROWS, tokens)
    return {
        "token_index": order,
        "residue_index": order,
        **dict.fromkeys(("asym_id", "sym_id", "entity_id", "mol_type"), zero),
        "res_type": v.whole(20, ROWS, tokens),
        "token_bonds": torch.zeros(ROWS, tokens, tokens, 1),
        "attention_mask": ones(ROWS, tokens),
        "atom_inputs": EsmFold2AtomInputs(
            ref_pos=v(ROWS, atoms, 3),
            ref_charge=torch.zeros(ROWS, atoms),
            atom_attention_mask=ones(ROWS, atoms).bool(),
            ref_element=v.whole(20, ROWS, atoms),
            ref_atom_name_chars=v.whole(20, ROWS, atoms, 4),
            ref_space_uid=owner,
            atom_to_token=owner,
        ),
    }


def drafted(v: Values) -> dict[str, Any]:
    """What a model that guesses another's next words reads: its hidden states, keys and values."""
    kinds = ("sliding_attention", "full_attention")
    states = {kind: (v(ROWS, 2, TOKENS, HEAD), v(ROWS, 2, TOKENS, HEAD)) for kind in kinds}
    position = torch.full((ROWS, 1), TOKENS)
    return {
        "inputs_embeds": v(ROWS, 1, 2 * WIDTH),
        "shared_kv_states": states,
        "position_ids": position,
    }


_SOUNDS: dict[str, Callable[[Values], dict[str, Any]]] = {
    "dia": lambda v: {"input_ids": v.text(), "decoder_input_ids": v.words(ROWS, TOKENS, 9)},
    "dia_decoder": lambda v: {
        "input_ids": v.words(ROWS, TOKENS, 9),
        "position_ids": torch.arange(TOKENS)[None],
        "encoder_hidden_states": v.hidden(),
    },
    "dots3_note_audio_encoder": lambda v: {
        "input_features": v(ROWS, WIDTH, FRAMES),
        "chunk_sample_lengths": 160 * FRAMES * ones(ROWS),
    },
    "fun_asr_nano_encoder": lambda v: {
        "input_features": v.features(112, TOKENS),
        "input_features_mask": ones(ROWS, TOKENS),
    },
    **dict.fromkeys(
        ("granite_speech5_ctc", "granite_speech5_encoder"),
        lambda v: {"input_features": v.features(64)},
    ),
    "mimi": lambda v: {"input_values": v(ROWS, 1, 1920)},
    "moshi_depth": lambda v: {
        "input_ids": v.words(ROWS, 8),
        "last_hidden_state": v(ROWS, 8, WIDTH),
    },
    **dict.fromkeys(
        (
            "nemotron3_5_transcribe_asr_audio",
            "nemotron3_5_transcribe_audio",
            "nemotron3_diarization",
            "nemotron3_diarization_audio",
        ),
        lambda v: {"input_features": v.features()},
    ),
    **dict.fromkeys(("neucodec", "xcodec2"), sound_and_features),
    "pe_audio": lambda v: {"input_ids": v.text(), "input_values": v(ROWS, 1, 8000)},
    "pe_audio_encoder": lambda v: {"input_values": v(ROWS, 1, 8000)},
    **dict.fromkeys(
        ("mimi_decoder", "pocket_tts_audio_tokenizer_decoder"),
        lambda v: {"latents": v(ROWS, WIDTH, TOKENS)},
    ),
    "qwen3_asr_encoder": lambda v: {
        "input_features": v(ROWS, BINS, 200),
        "input_features_mask": ones(ROWS, 200),
    },
    "speecht5": lambda v: {"input_values": v.hidden(), "decoder_input_values": v.hidden()},
    "voxtral_realtime": lambda v: {
        "input_ids": v.text(),
        "input_features": v(ROWS, BINS, 8 * TOKENS),
    },
    "voxtral_realtime_text": lambda v: {"input_ids": v.text(), "t_cond": v(1, 1, WIDTH)},
}

_PICTURES: dict[str, Callable[[Values], dict[str, Any]]] = {
    "deepseek_ocr2_encoder": lambda v: {"inputs_embeds": v.hidden(), "num_patches": TOKENS},
    "deepseek_ocr2_vision": lambda v: {"pixel_values": v.image()},
    "depth_pro": lambda v: {"pixel_values": v.image(side=128)},
    "efficientloftr": lambda v: {"pixel_values": v.image(2, side=64)},
    "gemma4_vision": lambda v: {
        "pixel_values": v.hidden(PIXELS),
        "pixel_position_ids": v.whole(SIDE, ROWS, TOKENS, 2),
    },
    "idefics": lambda v: {
        "input_ids": v.text(),
        "pixel_values": v.image(1),
        "image_attention_mask": ones(ROWS, TOKENS, 1),
    },
    "inkling2_vision": lambda v: {
        "pixel_values": v(ROWS, 2 * PATCH, 2 * PATCH, 3),
        "image_grid_thw": grid(1, 1),
    },
    "instructblipvideo": lambda v: {
        "pixel_values": v.image(4),
        "qformer_input_ids": v.text(),
        "input_ids": v.text(),
    },
    "kimi_k25_vision": lambda v: packed(v, 3, PATCH, PATCH),
    "kosmos-2": lambda v: {
        "pixel_values": v.image(),
        "input_ids": v.text(),
        "image_embeds_position_mask": (torch.arange(TOKENS) < 4).expand(ROWS, -1),
    },
    **dict.fromkeys(("kosmos_2_5_vision_model", "pix2struct_vision_model"), placed),
    "llama4_vision_model": lambda v: {"pixel_values": v.image()},
    "lw_detr_vit": lambda v: {"hidden_states": v(4 * ROWS, SIDE, WIDTH)},
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), in_stripe),
    "molmo2_vision": lambda v: {"pixel_values": v.hidden(PIXELS)},
    **dict.fromkeys(("muse_glimmer_vision", "muse_spark_vision"), lambda v: packed(v, 2 * PIXELS)),
    "paddleocr_vl_vision": lambda v: {
        "pixel_values": v(1, PATCHES, 3, PATCH, PATCH),
        "grid_thw": grid(),
    },
    "pi0": lambda v: {
        "action_embeds": v.hidden(),
        "input_ids": torch.cat([torch.full((ROWS, TOKENS), WORDS - 1), v.text()], 1),
        "pixel_values": v.image(1),
        "pixel_attention_mask": ones(ROWS, 1).bool(),
        "attention_mask": ones(ROWS, 2 * TOKENS),
    },
    "pp_ocrv5_mobile_rec": lambda v: {"pixel_values": v.image(side=96)},
    **dict.fromkeys(("sam", "sam_hq"), prompted),
    "seggpt": lambda v: {
        n: v.image() for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    },
    "slanext": lambda v: {"hidden_states": v.image()},
    "tvp": lambda v: {"input_ids": v.words(1, TOKENS), "pixel_values": v(1, 2, 3, 128, 128)},
    "uvdoc": lambda v: {"pixel_values": v.image(side=128)},
    "unlimited_ocr_vision_encoder": lambda v: {"patch_embeds": v(ROWS, WIDTH, SIDE, SIDE)},
    "vitmatte": lambda v: {"pixel_values": v.image(channels=4, side=64)},
}

_TEXTS: dict[str, Callable[[Values], dict[str, Any]]] = {
    "blt_local_decoder": lambda v: {
        "inputs_embeds": v.hidden(),
        "patch_embeds": v(ROWS, SIDE, WIDTH),
    },
    "blt_local_encoder": lambda v: {
        "input_ids": v.text(),
        "num_patches": SIDE,
        "patch_ids": torch.arange(TOKENS).expand(ROWS, -1) // SIDE,
    },
    "ernie4_5_vl_moe": lambda v: {
        "input_ids": v.text(),
        "mm_token_type_ids": 0 * ones(ROWS, TOKENS),
        "moe_mm_token_type_ids": 0 * ones(ROWS, TOKENS),
    },
    "esmfold2": folded,
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), drafted),
    "muse_glimmer_assistant": lambda v: {
        "noise_embeds": v.hidden(),
        "context_hidden_states": v(ROWS, 8, 2 * WIDTH),
        "attention_mask": ones(ROWS, 8 + TOKENS),
    },
}

_OF_FAMILY = {**_SOUNDS, **_PICTURES, **_TEXTS}


def by_hand(family: str) -> dict[str, Any] | None:
    """Arguments of a family's model by their names; None where those that names tell are enough."""
    make = _OF_FAMILY.get(family)
    return None if make is None else make(Values())
