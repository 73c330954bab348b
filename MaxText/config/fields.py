"""What keys are declared with: `key`, the types that several of them share, and `Group`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

INT_LIMIT = 2**31 - 1  # step counters and token ids are int32 on the device


def key(default: object, meaning: str, **bounds: Any) -> Any:
    """A key with its default, its one line of meaning, and pydantic's bounds (`ge`, `gt`, `le`, `lt`, `min_length`)."""
    return Field(default, description=meaning, **bounds)


def minus_one_or_positive(value: int) -> int:
    """at least 1, or -1"""
    if value != -1 and value < 1:
        raise PydanticCustomError("minus_one_or_positive", "at least 1, or -1")
    return value


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
SizeOrMinusOne = Annotated[int, AfterValidator(minus_one_or_positive)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
DType = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["default", "high", "highest", "bfloat16", "float32"]
Activations = Annotated[
    tuple[Literal["silu", "gelu", "relu", "sigmoid", "linear"], ...], Field(min_length=1, max_length=2)
]
AttentionType = Literal["global", "local_sliding", "chunk", "mla"]
Pattern = tuple[Literal["global", "local_sliding", "chunk"], ...]
Share = Annotated[float, Field(gt=0, le=1)]
Files = tuple[str, ...]
Texts = tuple[str, ...]
Place = Literal["remat", "device", "offload"]
RematPolicy = Literal[
    "none",
    "minimal",
    "minimal_with_context",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "full",
    "custom",
]


class Group(BaseModel):
    """Keys that are printed together, under the class's `title`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )
    title: ClassVar[str]
