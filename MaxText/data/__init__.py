"""Text to batches: sources (files, documents) -> rows (packing) -> order (shuffle, epochs) -> dataset -> feeder."""

from MaxText.data.dataset import Dataset, Split, check_enough, open_split
from MaxText.data.feeder import Feeder
from MaxText.data.rows import Batch

__all__ = ["Batch", "Dataset", "Feeder", "Split", "check_enough", "open_split"]
