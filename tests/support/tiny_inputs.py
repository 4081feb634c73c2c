"""What a small model of transformers may be called with, made of the parameters of its forward, of
its `main_input_name` and of the sizes in its configuration.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny_by_hand import by_hand
from tests.support.tiny_configs import IMAGE, PATCH, SAMPLES, TOKENS, WIDTH, is_config

ROWS = 2
FRAMES = 128
GRID = IMAGE // PATCH  # patches on a side of a picture

# What a picture's, a sound's and a text's main input may look like.
_PICTURES = ("image", "images", "frames", "patches", "packed patches", "tiles")
_SOUNDS = ("bins first", "bins last", "one channel", "packed")
_TEXTS = ("ids", "codes in rows", "codes last", "codes first")


def candidates(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Arguments of the model's forward: the main input, what must be given, and pictures beside a
    text. A name does not say all of a shape, so there are several; the fullest come first. Those
    that were written by hand are the only ones of their family.
    """
    if (given := by_hand(config.model_type)) is not None:
        yield given
        return
    maker = Maker(type(model), config)
    takes = maker.takes
    must = [n for n, p in takes.items() if p.default is p.empty]
    names = list(dict.fromkeys([maker.main, *must]))
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        names.append("decoder_input_ids")
    names += [n for n in ("bbox",) if n in takes and n not in names]
    sets = [names]
    if "encoder_hidden_states" in takes:
        sets.append([*names, "encoder_hidden_states"])
    if "inputs_embeds" in takes and "input_ids" in names:
        sets.append(["inputs_embeds" if n == "input_ids" else n for n in names])
    if {"pixel_values", "input_ids"} <= takes.keys():
        sets.insert(0, list(dict.fromkeys([*names, "pixel_values", "input_ids"])))
    choices = itertools.product(sets, _PICTURES, _SOUNDS, _TEXTS, (True, False))
    for chosen, picture, sound, text, described in choices:
        has_picture = any("pixel" in n or n == "hidden_states" for n in chosen)
        if picture != _PICTURES[0] and not has_picture:
            continue
        if sound != _SOUNDS[0] and not {"input_features", "input_values", "inputs"} & set(chosen):
            continue
        if text != _TEXTS[0] and not (
            maker.find("num_codebooks", 0) and {"input_ids", "decoder_input_ids"} & set(chosen)
        ):
            continue
        maker.generator.manual_seed(1)
        maker.picture, maker.sound, maker.text = picture, sound, text
        try:
            inputs = {name: maker.made(name) for name in chosen}
            more = maker.beside(inputs)
            if not described and not more:
                continue  # as before
            inputs |= more if described else {}
            if {"pixel_values", "input_ids"} <= inputs.keys():
                inputs = maker.marked(inputs, model)
            elif "input_ids" in inputs and "mm_token_type_ids" in takes:
                inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        except Exception:  # not what it calls a picture
            continue
        yield inputs


class Maker:
    def __init__(self, make_class: Any, config: Any) -> None:
        self.config = config
        parameters = inspect.signature(make_class.forward).parameters
        self.takes = {
            n: p
            for n, p in parameters.items()
            if n != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        named = make_class.main_input_name
        self.main = named if named in self.takes else next(iter(self.takes), named)
        self.generator = torch.Generator().manual_seed(1)
        self.picture, self.sound, self.text = _PICTURES[0], _SOUNDS[0], _TEXTS[0]

    def made(self, name: str) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            **{n: self.ids for n in (*self.takes, name) if n.endswith("input_ids")},
            "bbox": lambda: torch.arange(4).expand(ROWS, TOKENS, 4) + 1,
            "attention_mask": lambda: torch.ones(ROWS, TOKENS, dtype=torch.long),
            "input_values": self.samples,
            "inputs": self.samples,  # of a composite of two models, the first for sounds
            **{n: lambda: self.past(1) for n in ("past_values", "past_observed_mask")},
            "past_time_features": lambda: self.past(0),
            "future_time_features": lambda: self.randn(
                ROWS, self.find("prediction_length", 1), self.find("num_time_features", 1)
            ),
            "future_values": lambda: self.randn(ROWS, self.find("prediction_length", 1)),
            "input_features": self.features,
            "flattened_patches": lambda: self.randn(ROWS, TOKENS, self.patch_numbers() + 2),
            **{n: self.pixels for n in ("pixel_values", "pixel_values_videos", "images")},
            **dict.fromkeys(_BESIDE, lambda: _BESIDE[name]()),
        }
        if name in makers:
            return makers[name]()
        if name == "hidden_states" and "grid_thw" in self.takes:
            return self.pixels()
        return self.randn(ROWS, TOKENS, self.find("hidden_size", WIDTH))

    def beside(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What describes pictures and sounds that are given."""
        pictures = any("pixel" in n or n == "hidden_states" for n in inputs)
        sounds = "input_features" in inputs
        return {
            n: make()
            for n, make in _BESIDE.items()
            if n in self.takes and n not in inputs and (sounds if "feature" in n else pictures)
        }

    def ids(self) -> Tensor:
        codes = self.find("num_codebooks", 1)
        shape = {
            "ids": (ROWS, TOKENS),
            "codes in rows": (ROWS * codes, TOKENS),
            "codes last": (ROWS, TOKENS, codes),
            "codes first": (ROWS, codes, TOKENS),
        }[self.text]
        return torch.randint(3, 80, shape, generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def samples(self) -> Tensor:
        if self.sound == "bins last":
            return self.randn(ROWS, self.find("max_length", FRAMES), self.find("num_mel_bins", 16))
        return self.randn(*((ROWS, 1, SAMPLES) if self.sound == "one channel" else (ROWS, SAMPLES)))

    def past(self, has_values: int) -> Tensor:
        """Of a time series: what goes in front of the part to be predicted."""
        length = self.find("context_length", 1) + max(self.find("lags_sequence", [0]))
        if has_values:
            return self.randn(ROWS, length)
        return self.randn(ROWS, length, self.find("num_time_features", 1))

    def features(self) -> Tensor:
        names = (
            "num_mel_bins",
            "feature_size",
            "input_dim",
            "input_feat_size",
            "input_feat_per_channel",
        )
        bins = next((b for b in (self.find(n, None) for n in names) if b is not None), 16)
        shape = {
            "bins first": (ROWS, bins, FRAMES),
            "bins last": (ROWS, FRAMES, bins),
            "one channel": (ROWS, 1, FRAMES, bins),
            "packed": (bins, ROWS * FRAMES),
        }[self.sound]
        return self.randn(*shape)

    def pixels(self) -> Tensor:
        channels = self.find("num_channels", 3)
        frames = self.find("num_frames", 0) or self.find("frames_per_clip", 2)
        size = self.find("image_size", IMAGE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        patch = self.patch_numbers()
        shape = {
            "image": (ROWS, channels, height, width),
            "images": (ROWS, 1, channels, height, width),
            "frames": (ROWS, frames, channels, height, width),
            "tiles": (ROWS, 1, self.find("max_num_tiles", 1), channels, height, width),
            "patches": (ROWS, GRID**2, patch),
            "packed patches": (ROWS * GRID**2, patch),
        }[self.picture]
        return self.randn(*shape)

    def patch_numbers(self) -> int:
        channels = self.find("in_channels", None) or self.find("num_channels", 3)
        size = self.find("patch_size", PATCH)
        area = size**2 if isinstance(size, int) else math.prod(size)
        return int(channels * self.find("temporal_patch_size", 1) * area)

    def marked(self, inputs: dict[str, Any], model: Any) -> dict[str, Any]:
        """With as many tokens of a picture in each row as the model makes of it, if it has such."""
        token = next((t for t in (self.find(n, None) for n in _TOKENS) if isinstance(t, int)), None)
        if token is None or not hasattr(model, "get_image_features"):
            return inputs
        takes = inspect.signature(model.get_image_features).parameters
        given = {n: v for n, v in inputs.items() if n in takes}
        with torch.no_grad():
            found = model.get_image_features(**given)
        found = getattr(found, "pooler_output", found)
        rows = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
        tokens = rows.numel() // rows.shape[-1] // ROWS
        ids = inputs["input_ids"]
        marks = torch.full((ROWS, tokens), token)
        ids = torch.cat([ids[:, :4], marks, ids[:, 4:]], 1)
        more: dict[str, Any] = {"input_ids": ids}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.takes:
                more[name] = (ids == token).long()
        return {**inputs, **more}

    def find(self, name: str, default: Any) -> Any:
        return next((v for v in _all(self.config, name) if v is not None), default)


_TOKENS = ("image_token_id", "image_token_index", "im_patch_token_id")

_BESIDE: dict[str, Callable[[], Any]] = {
    "grid_thw": lambda: torch.tensor([[1, GRID, GRID]] * ROWS),
    "image_grid_thw": lambda: torch.tensor([[1, GRID, GRID]] * ROWS),
    "image_grid_hw": lambda: torch.tensor([[GRID, GRID]] * ROWS),
    "spatial_shapes": lambda: torch.tensor([[GRID, GRID]] * ROWS),
    "target_sizes": lambda: torch.tensor([[GRID, GRID]] * ROWS),
    "image_sizes": lambda: torch.tensor([[IMAGE, IMAGE]] * ROWS),
    "merge_sizes": lambda: torch.ones(ROWS, dtype=torch.long),
    "image_merge_sizes": lambda: torch.ones(ROWS, dtype=torch.long),
    "input_features_mask": lambda: torch.ones(ROWS, FRAMES, dtype=torch.long),
    "feature_lens": lambda: torch.tensor([FRAMES] * ROWS),
}


def _all(config: Any, name: str) -> Iterator[Any]:
    yield getattr(config, name, None)
    for part in vars(config).values():
        if is_config(part):
            yield from _all(part, name)
