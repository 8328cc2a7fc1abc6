"""The schema of a sample: every field that travels with a trajectory, declared once. Joining, batching,
checkpoints, dumps, pages and stores work from these declarations; no room names a field that it does not use.

    ENTROPY = Field(name="entropy", per="sampled", by="trainer", in_samples=True, shown="colour",
                    doc="entropy of the distribution that the token was sampled from, in nats")

A field of one's own takes two places: its declaration (`task.fields = "module:FIELDS"`, or an entry point of
the group `asyncrl.fields`, both a sequence of fields), and its producer:

    engine        `Completion.fields`: a value for every token of the completion
    environment   `Turn.fields` and `End.fields`: a value for every token of the answer that it was given; in
                  `End` also a value of the trajectory
    reward        {"reward": 1.0, "<field>": value}: a value of the trajectory
    scorer        a class that `task.scorers` names, with `score(groups, items)`
    trainer       `LossBatch.write(name, values_N)`, called by a loss

A field that nobody writes takes no room. Readers of an absent value see `fill`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

import numpy as np

from asyncrl_cli.base.errors import ConfigError, first_line
from asyncrl_cli.base.named_code import UserCode, describe, is_user_code
from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.profile.arithmetic import CRITIC, PROX, REF, TEACHER
from asyncrl_cli.profile.schema import Profile

Per = Literal["token", "sampled", "segment", "trajectory", "group"]
Writer = Literal["engine", "environment", "reward", "scorer", "trainer"]
GROUP = "asyncrl.fields"
RESERVED = (
    *("penalties", "advantages", "returns", "finished", "trainer_logprobs"),
    *("train", "trainer", "rollout", "rollouter", "feed"),
)
"""Names that no field may have: columns of a train step or of a dump that are no fields, and what logs and
metrics call the executors. A scorer's executor is called by the name of its field, so the two would mix."""
HINT = 'it names a sequence of asyncrl_cli.data.sample_fields.Field, for example "my_fields:FIELDS"'
NOT_SAMPLED = -1
"""Version of a token that no policy sampled (prompt, tool output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One declared column.

    `per`: what has a value. Those per token or per sampled token are arrays, all segments of a trajectory end
    to end: (tokens, *shape) or (sampled tokens, *shape). Others are values that JSON can hold: one of a
    trajectory or of its group, or a list with one for each segment.
    `dtype`: numpy's name of an array's type; unused for others. `shape`: of a token's value; (-1,) is a
    vector of any length, the same for all tokens.
    `is_ragged`: a sampled token has any number of int32 values, `fill` is none of them (a `Ragged`).
    `fill`: the value of a token that nobody gave one.
    `in_losses`: losses find it in `LossBatch.columns`, as float32 or int64 per sampled token.
    `in_samples`: dumps of samples have it. `shown`: how the page of samples shows it: as a scale of colours
    on the tokens, as a number of the trajectory, or not at all.
    """

    name: str
    per: Per
    by: Writer
    doc: str = ""
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    is_ragged: bool = False
    fill: float = 0
    in_checkpoints: bool = True
    in_samples: bool = False
    in_losses: bool = False
    shown: Literal["colour", "number", ""] = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"field {self.name!r}: its name is not an identifier")
        for key, literal in (("per", Per), ("by", Writer)):
            if getattr(self, key) not in get_args(literal):
                known = ", ".join(get_args(literal))
                raise ValueError(f"field {self.name}: {key} = {getattr(self, key)!r} is not one of {known}")
        if self.is_array:
            try:
                is_number = np.dtype(self.dtype).kind in "biuf"
            except TypeError:
                is_number = False
            if not is_number:
                raise ValueError(f"field {self.name}: dtype {self.dtype!r} is no number of numpy's")
        if self.by in ("trainer", "scorer") and (self.per != "sampled" or self.shape):
            raise ValueError(f"field {self.name}: the {self.by} writes one number per sampled token")
        if not self.is_array and (self.in_losses or self.shape or self.shown == "colour"):
            raise ValueError(f"field {self.name}: only a field per token has a shape, a colour or a loss")
        if self.in_losses and self.shape:
            raise ValueError(f"field {self.name}: losses take one number per token")
        if self.by == "reward" and self.is_array:
            raise ValueError(f"field {self.name}: the reward writes values of the trajectory")
        if self.is_ragged and (
            (self.per, self.dtype, self.shape) != ("sampled", "int32", ())
            or self.by not in ("engine", "environment")
            or self.in_losses
            or self.shown
        ):
            why = "a ragged field has int32 values per sampled token, by the engine or the environment"
            raise ValueError(f"field {self.name}: {why}; neither losses nor pages take it")

    @property
    def is_array(self) -> bool:
        return self.per in ("token", "sampled")

    @property
    def column(self) -> str:
        """Its name among the columns of a store (`trajectories.packed`)."""
        return f"{'ragged' if self.is_ragged else self.per}/{self.name}"

    def filled(self, count: int, like: Any = None) -> Any:
        """`like`: an array of this field, with a vector's length."""
        if self.is_ragged:
            return Ragged(np.zeros(0, np.int32), np.zeros(count + 1, np.int64))
        shape = self.shape if like is None else like.shape[1:]
        return np.full((count, *(max(size, 0) for size in shape)), self.fill, dtype=self.dtype)

    def fits(self, array: Any) -> bool:
        """Whether an array is as declared."""
        is_shape = array.ndim == 2 if self.shape == (-1,) else array.shape[1:] == self.shape
        return bool(array.dtype == np.dtype(self.dtype) and array.ndim and is_shape)

    def array_of(self, values: Any, count: int) -> Any:
        """Somebody's values of `count` tokens. Raises ValueError if they are not of this field."""
        if self.is_ragged:
            try:
                rows = values if isinstance(values, Ragged) else Ragged.of(values)
            except (TypeError, ValueError):
                raise ValueError(f"field {self.name}: its values are not lists of integers") from None
            if len(rows) != count:
                why = f"has {len(rows)} values for an answer of {count} tokens"
                raise ValueError(f"field {self.name} {why}")
            return rows
        given, dtype = np.asarray(values), np.dtype(self.dtype)
        if given.shape[:1] != (count,):
            number = len(given) if given.shape else "no"
            raise ValueError(f"field {self.name} has {number} values for an answer of {count} tokens")
        if given.size == 0 and self.filled(count).size == 0:
            given = self.filled(count)
        taken = given.astype(dtype) if given.dtype.kind in "biuf" else given
        # Rounding to float32 is fine; an integer that changes is not.
        is_same = dtype.kind == "f" or (given.dtype.kind != "f" and bool((taken == given).all()))
        if not self.fits(taken) or not is_same:
            shape = f" of shape {self.shape}" if self.shape else ""
            raise ValueError(f"field {self.name}: its values are not {self.dtype}{shape}")
        return taken


class Schema(Mapping[str, Field]):
    """All fields of a run, by name."""

    def __init__(self, fields: Iterable[Field]) -> None:
        self._fields: dict[str, Field] = {}
        for field in fields:
            if self._fields.setdefault(field.name, field) != field:
                raise ValueError(f"field {field.name} is declared twice")

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    @cached_property
    def arrays(self) -> tuple[Field, ...]:
        return tuple(field for field in self.values() if field.is_array)

    @cached_property
    def in_losses(self) -> tuple[Field, ...]:
        return tuple(field for field in self.values() if field.in_losses)


TOKENS, LOGPROBS, VERSIONS, MASK = "tokens", "logprobs", "versions", "mask"
REWARD, FINISH_REASON, TURN_REWARDS, FACTS = "reward", "finish_reason", "turn_rewards", "facts"
TEACHER_NAME = "teacher_name"
KEPT_TOKENS, ROUTED_EXPERTS = "kept_tokens", "routed_experts"
REQUIRED = (TOKENS, LOGPROBS, VERSIONS, MASK)
"""What every engine returns."""
OPTIONAL = {KEPT_TOKENS, ROUTED_EXPERTS}
"""Built-in fields that an engine writes as it does those of users."""

FIELDS = (
    Field(name=TOKENS, per="token", by="engine", dtype="int32", in_samples=True, doc="token ids"),
    Field(
        name=LOGPROBS,
        per="token",
        by="engine",
        in_samples=True,
        shown="colour",
        doc="of the temperature-scaled distribution, among `kept_tokens` if there are any; 0 where mask is 0",
    ),
    Field(
        name=VERSIONS,
        per="token",
        by="engine",
        dtype="int32",
        fill=NOT_SAMPLED,
        in_samples=True,
        shown="colour",
        doc="the version of the weights that sampled the token; -1 where mask is 0",
    ),
    Field(name=MASK, per="token", by="engine", dtype="bool", in_samples=True, doc="whether it was sampled"),
    Field(
        name=KEPT_TOKENS,
        per="sampled",
        by="engine",
        dtype="int32",
        is_ragged=True,
        doc="ids of the tokens that top_p, top_k and min_p kept; none: all (exactness.md)",
    ),
    Field(
        name=ROUTED_EXPERTS,
        per="token",
        by="engine",
        dtype="int16",
        shape=(-1,),
        fill=-1,
        doc="the experts that it was given to, layer by layer; -1: unknown (exactness.md)",
    ),
    Field(name=REWARD, per="trajectory", by="reward", in_samples=True, shown="number"),
    Field(name=FINISH_REASON, per="trajectory", by="engine", in_samples=True),
    Field(
        name=TURN_REWARDS,
        per="trajectory",
        by="environment",
        in_samples=True,
        doc="the parts of the reward, if the environment gives them",
    ),
    Field(name=FACTS, per="trajectory", by="environment", doc="the environment's own figures, by name"),
    Field(name=TEACHER_NAME, per="trajectory", by="environment", doc="of several teachers: the prompt's"),
    *(
        Field(name=name, per="sampled", by="scorer", in_checkpoints=False, doc=doc)
        for name, doc in (
            (PROX, "logprob under the weights at the window's start"),
            (REF, "logprob under the reference"),
            (TEACHER, "logprob under the teacher"),
            (CRITIC, "the critic's value of the state in which the token was sampled"),
        )
    ),
)
"""The built-in fields."""

BUILT_IN = Schema(FIELDS)


def schema_of(profile: Profile) -> Schema:
    """The built-in fields, those of installed packages, and those that `task.fields` names. Raises
    ConfigError."""
    named = [(f"the entry point {point.name} of {GROUP}", point.load) for point in entry_points(group=GROUP)]
    if profile.task.fields:
        code = UserCode(name=profile.task.fields, import_path=profile.task.import_path or "")
        named.append((f'task.fields = "{code.name}"', code.load))
        if not is_user_code(code.name):
            raise ConfigError(f'task.fields = "{code.name}" is not of the form module:name', hint=HINT)
    fields = list(FIELDS)
    for where, load in named:
        try:
            for field in load():
                if not isinstance(field, Field):
                    raise ValueError(f"{field!r:.80} is not a Field")
                if field.name in RESERVED:
                    raise ValueError(f"field {field.name}: the name is taken")
                fields.append(field)
            Schema(fields)
        except Exception as error:  # a user's module may raise anything
            why = describe(error) if not isinstance(error, ValueError) else first_line(error)
            raise ConfigError(f"{where} cannot be used: {why}", hint=HINT) from error
    schema = Schema(fields)
    for name, code_name in profile.task.scorers.items():
        if not is_user_code(code_name):
            why = f'task.scorers: {name} = "{code_name}" is not of the form module:Class'
            raise ConfigError(why, hint=f'for example {{{name} = "my_scorers:Scorer"}}')
        if name in BUILT_IN or name not in schema or schema[name].by != "scorer":
            why = f'task.scorers names "{name}", but no field of yours has this name and by="scorer"'
            hint = f'task.fields = "module:FIELDS" with Field(name="{name}", per="sampled", by="scorer")'
            raise ConfigError(why, hint=hint)
    return schema
