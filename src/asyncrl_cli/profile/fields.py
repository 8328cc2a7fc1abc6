"""Types of a profile's values, and the base class of its sections.

Types are strict: "8" is not an integer, 1 is not a boolean. Eta is an exact decimal: 0.15 is 15/100.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from math import lcm
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from asyncrl_cli.base.paths import is_path


def _exact(value: object) -> object:
    """Turn an integer or a float into the decimal that it is written as. Validation refuses anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Decimal(str(value))
    return value


def _path(text: str) -> str:
    if not text:
        raise ValueError("it is empty; leave it out")
    if not is_path(text):
        raise ValueError("it is not a valid path on any file system")
    return text


def whole_ratios(ratios: object) -> object:
    """Fractions, as verl writes ratios, as the smallest whole numbers: [0.5, 0.25, 0.25] is [2, 1, 1]. Others
    are unchanged."""
    if not isinstance(ratios, list | tuple):
        return ratios
    if not all(isinstance(ratio, float) and 0 < ratio < 1 for ratio in ratios):
        return ratios
    exact = [Fraction(ratio).limit_denominator(MOST_DENOMINATOR) for ratio in ratios]
    unit = lcm(*(ratio.denominator for ratio in exact))
    return [int(ratio * unit) for ratio in exact]


MOST_DENOMINATOR = 64
"""Reads 0.333 as a third."""
LABEL = r"^!?(in\([\w.-]+(, ?[\w.-]+)*\)|[\w.-]+)$"
"""A value or `in(a, b)`; a leading `!` negates either."""
MOST, MOST_PROCESSES, MOST_DECIMALS = 10**9, 4096, 12
"""Upper limits, to catch typing errors: for steps, tokens, sizes and seconds; for processes; for decimal
places of eta."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
"""A number of workers, ranks or devices. They are planned one by one, so the limit is lower."""
PositiveFloat = Annotated[float, Field(gt=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST)]
AtLeastOne = Annotated[float, Field(ge=1, le=MOST)]
AboveOne = Annotated[float, Field(gt=1, le=MOST)]
Bytes = Annotated[float, Field(gt=0, le=10**18)]
PathText = Annotated[str, AfterValidator(_path), WithJsonSchema({"type": "string", "format": "path"})]
Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Eta = Annotated[
    Decimal,
    Field(ge=0, le=100, decimal_places=MOST_DECIMALS),
    BeforeValidator(_exact),
    WithJsonSchema({"type": "number", "minimum": 0, "maximum": 100, "multipleOf": f"1e-{MOST_DECIMALS}"}),
]
ARRAY = Field(strict=False)
"""For a tuple: accept a list, which is what TOML's arrays become."""
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], ARRAY]
"""Below 1: a mean that never takes in a gradient would stay what it is, and the bias correction divides by 1
- beta."""
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], ARRAY]
Params = dict[str, Any]
Labels = dict[str, Annotated[str, Field(pattern=LABEL)]]
"""Selects nodes by Ray labels."""


class Section(BaseModel):
    """Base class of every section: frozen, strict, no unknown keys. Field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
