"""Types of a profile's values, and the base of its sections.

Types are strict: "8" is not an integer, 1 is not a boolean. TOML floats arrive as decimals, so that eta is exact; here all
others become floats.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from asyncrl_cli.paths import is_path


def _plain(value: Any) -> Any:
    """Decimals become floats, also inside tables and arrays such as `task.params`."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _plain_tuple(value: Any) -> Any:
    return tuple(_plain(value)) if isinstance(value, list) else value


def _exact(value: Any) -> Any:
    """Integers and floats become the decimal that they are written as; validation refuses anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Decimal(str(value))
    return value


def _path(text: str) -> str:
    if not is_path(text):
        raise ValueError("no file system takes this as a path")
    return text


LABEL = r"^!?(in\([\w.-]+(, ?[\w.-]+)*\)|[\w.-]+)$"
"""A value, or `in(a, b)`, and `!` before either for none of them."""
MOST, MOST_PROCESSES, MOST_DECIMALS = 10**9, 4096, 12
"""Upper limits, to catch typing errors: of steps, tokens, sizes and seconds; of processes; of decimal places of eta."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
"""Workers, ranks or devices: each of them is planned one by one, so the limit is lower."""
PositiveFloat = Annotated[float, Field(gt=0, le=MOST), BeforeValidator(_plain)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST), BeforeValidator(_plain)]
AtLeastOne = Annotated[float, Field(ge=1, le=MOST), BeforeValidator(_plain)]
AboveOne = Annotated[float, Field(gt=1, le=MOST), BeforeValidator(_plain)]
Bytes = Annotated[float, Field(gt=0, le=10**18), BeforeValidator(_plain)]
PathText = Annotated[str, AfterValidator(_path), WithJsonSchema({"type": "string", "format": "path"})]
Ratio = Annotated[float, Field(ge=0, le=1), BeforeValidator(_plain)]
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(_plain)]
Eta = Annotated[
    Decimal,
    Field(ge=0, le=100, decimal_places=MOST_DECIMALS),
    BeforeValidator(_exact),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 100, "multipleOf": f"1e-{MOST_DECIMALS}"}),
]
Betas = Annotated[tuple[Ratio, Ratio], BeforeValidator(_plain_tuple)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_plain_tuple)]
Params = Annotated[dict[str, Any], BeforeValidator(_plain)]
Labels = dict[str, Annotated[str, Field(pattern=LABEL)]]
"""Selectors of nodes by Ray's labels."""
Sources = dict[str, PathText]
"""Files by name."""


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
