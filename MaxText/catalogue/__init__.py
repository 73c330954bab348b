"""The chips that exist and the slices that people make of them: what a plan without devices stands on.

slice_of("v5p-512")        256 chips in a torus of 4x8x8: the number counts TensorCores
slice_of("v6e-256")        256 chips, 16x16: the number counts chips
slice_of("tpu7x-4x4x8")    128 chips, 256 JAX devices
slice_of("h100-64")        eight nodes of 8: the network between nodes counts as the one between slices
"""

from MaxText.catalogue.chip import Chip, chip, chips
from MaxText.catalogue.slices import PLATFORMS, Slice, is_slice, of_devices, slice_of

__all__ = ["PLATFORMS", "Chip", "Slice", "chip", "chips", "is_slice", "of_devices", "slice_of"]
