"""Text to batches: sources (files) -> units -> corpus (tokens) -> rows (packing) -> order (shuffle, epochs, mixture) ->
dataset -> feeder."""

from MaxText.data.continuing import differences, notes
from MaxText.data.dataset import Dataset, Split, check_enough
from MaxText.data.feeder import Feeder
from MaxText.data.opening import open_split
from MaxText.data.recipe import has_eval
from MaxText.data.rows import Batch
from MaxText.data.stream import StreamDataset, open_train

__all__ = [
    "Batch",
    "Dataset",
    "Feeder",
    "Split",
    "StreamDataset",
    "Train",
    "check_enough",
    "differences",
    "has_eval",
    "notes",
    "open_split",
    "open_train",
]

Train = Dataset | StreamDataset
