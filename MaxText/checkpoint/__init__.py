"""Checkpoints that survive anything: atomic, verified, strict; they restore onto any mesh. Orbax underneath."""

from MaxText.checkpoint.local import Local
from MaxText.checkpoint.manifest import FORMAT, File, Manifest
from MaxText.checkpoint.store import Store
from MaxText.checkpoint.tiers import LOCAL_NOT_SAVED, Tiers
from MaxText.checkpoint.tree import Leaf, named_leaves

__all__ = ["FORMAT", "LOCAL_NOT_SAVED", "File", "Leaf", "Local", "Manifest", "Store", "Tiers", "named_leaves"]
