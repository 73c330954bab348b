"""Which keys a query sees."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

from MaxText.architecture import Reach


class Places(NamedTuple):
    """Of tokens: the place in their row, the position in their document, and the number of the document (0: padding).
    The three agree on order within a document, whatever the order of the slots."""

    index_BS: Int[Array, "B S"]
    position_BS: Int[Array, "B S"]
    document_BS: Int[Array, "B S"]


def visible(reach: Reach, q: Places, k: Places) -> Bool[Array, "B S T"]:
    """A query sees keys of its own document, none after itself, within reach. Padding sees padding."""
    mask = q.document_BS[:, :, None] == k.document_BS[:, None, :]
    mask &= k.index_BS[:, None, :] <= q.index_BS[:, :, None]
    match reach.kind:
        case "local_sliding":
            return mask & (q.position_BS[:, :, None] - k.position_BS[:, None, :] < reach.size)
        case "chunk":
            return mask & (q.position_BS[:, :, None] // reach.size == k.position_BS[:, None, :] // reach.size)
    return mask
