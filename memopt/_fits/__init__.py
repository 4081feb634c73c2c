"""`memopt.fits`: whether a training step fits into a device's memory."""

from memopt._fits.api import fits
from memopt._fits.report import Fits

__all__ = ["Fits", "fits"]
