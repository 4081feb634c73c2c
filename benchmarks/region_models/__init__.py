"""Small models in the styles of many code bases, for the table of regions. Each takes one batch.

audio      vocoders and speech
vision     convolutional networks
dense      U-Nets, detection and segmentation
sequence   recurrent, state space and transformer blocks of one's own
learning   towers: siamese, crops, targets without gradients; autoencoders, graphs
"""

from __future__ import annotations

from benchmarks.region_models import audio, dense, learning, sequence, vision
from benchmarks.region_models.parts import Made

OWN: dict[str, Made] = {
    **audio.MODELS,
    **vision.MODELS,
    **dense.MODELS,
    **sequence.MODELS,
    **learning.MODELS,
}
