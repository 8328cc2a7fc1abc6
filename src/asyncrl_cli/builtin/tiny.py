"""builtin:tiny before training: a small Qwen3, a tokenizer whose tokens are single characters, and the
lessons it learns from.

A lesson is a prompt of the training split with a response. A given share of the responses contains a mistake,
which leaves RL room to improve. A model taught without mistakes would start near the maximum reward, and an
untaught one at 0, where no reward tells a good response from a bad one.

It writes conversations with roles and tool calls around single characters, in as few tokens as possible:

    <user>47+83*65<model><call>calculate expression=83*65<eos><result>5395<model><call>answer value=5442<eos>

Each tag in angle brackets is one token, and so is each of the task's `words` (frequent texts). A call is
`<call>`, the tool's name, a space, and its arguments as `key=value`, separated by commas, so no argument may
contain a comma. `CHAT_TEMPLATE` writes this format and `RESPONSE_TEMPLATE` reads it, for transformers'
`apply_chat_template` and `parse_response`. Earlier messages are never rendered differently later, so the
tokens of a conversation only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.environment import Message
from asyncrl_cli.contracts.item import Item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

TAUGHT, UNTAUGHT = "builtin:tiny", "builtin:untaught"
"""Values of `model.path`. The second has random weights."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN)
"""Their ids are 0, 1, 2; the characters follow."""

MAX_POSITIONS = 2048
IGNORED = -100
"""Label of a token that is not part of the loss."""
Response = str | Sequence[Message]
"""The response to a prompt as text, or a whole conversation, including the prompt, as chat messages."""
Demonstrate = Callable[[Item, Random], Response]
Demonstration = Demonstrate | None

TINY: dict[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    # Untied: an engine with its own copy of a tied head would keep using the old copy after a weight load.
    "tie_word_embeddings": False,
}
"""Its sizes, under the names of a Qwen3's config.json."""


def tiny_tokenizer(
    characters: Iterable[str], *, special: Sequence[str] = SPECIAL_TOKENS, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, in the order given, after the `special` ones, and one for
    each of `words`. It adds no special tokens to a text; decoding gives the text back unchanged."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*special, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in special if token not in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def tiny_sizes(vocab_size: int) -> dict[str, object]:
    """Arguments of builtin:tiny's Qwen3Config; `vocab_size` is rounded up to a multiple of 64."""
    return {
        "vocab_size": -(-vocab_size // 64) * 64,
        **TINY,
        "max_position_embeddings": MAX_POSITIONS,
        # Texts are short: with the usual theta of 10,000, most of a head's dimensions would hardly rotate
        # within a text.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "dtype": "float32",
    }


def tiny_model(vocab_size: int, *, seed: int) -> Qwen3ForCausalLM:
    """0.75 M parameters at 64 tokens, random in float32 from `seed`; the caller's random state stays as it
    was."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**tiny_sizes(vocab_size))).float()


class Course(Protocol):
    """A task as a source of lessons: the prompts of both splits, and functions that write responses to them.

    `demonstration` writes a correct response to an item, `flawed_demonstration` one with a mistake; None if
    the task has none. If `words` is not None they write conversations, and each of these texts gets its own
    token.
    """

    @property
    def name(self) -> str: ...
    @property
    def train(self) -> Sequence[Item]: ...
    @property
    def eval(self) -> Sequence[Item]: ...
    @property
    def demonstration(self) -> Demonstration: ...
    @property
    def flawed_demonstration(self) -> Demonstration: ...
    @property
    def words(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyperparameters of the warm start; part of a built model's content hash."""

    steps: int
    batch_size: int = 32
    lr: float = 1e-2
    matrix_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    lr_warmup_steps: int = 20
    bucket_batches: int = 32
    """This many batches of lessons at a time are sorted by length, then cut into batches: else padding would
    triple the work."""


Taught = tuple[list[int], list[int]]
"""Token ids of a lesson, and its labels: the same ids where they are to be learned, `IGNORED` elsewhere."""


class Lesson(NamedTuple):
    prompt: str
    response: Response


def demonstrations_of(task: Course) -> tuple[Demonstrate, Demonstrate]:
    """The task's functions that write correct and flawed responses. Raises ConfigError if it has none."""
    if task.demonstration is None or task.flawed_demonstration is None:
        raise ConfigError(
            f'model.path = "builtin:tiny" learns from demonstrations, and {task.name} provides none',
            hint=f'set model.path = "{UNTAUGHT}" (random weights, for trying a task out), or the path of a '
            "pretrained model; "
            f"{TAUGHT} learns reasoning-gym:number_sorting, builtin:calculator and builtin:guess",
        )
    return task.demonstration, task.flawed_demonstration


def make_lessons(task: Course, *, num: int, label_noise: float, seed: int) -> list[Lesson]:
    """`num` lessons: passes over the training items, each in random order.

    Raises ConfigError if the task has no demonstrations.
    """
    right, flawed = demonstrations_of(task)
    rng = Random(f"lessons {seed}")
    items = list(task.train)
    lessons: list[Lesson] = []
    while len(lessons) < num:
        rng.shuffle(items)
        for item in items[: num - len(lessons)]:
            teach = flawed if rng.random() < label_noise else right
            lessons.append(Lesson(prompt=item["prompt"], response=teach(item, rng)))
    return lessons


USER, MODEL, CALL, RESULT = "<user>", "<model>", "<call>", "<result>"
CHAT_TOKENS = (*SPECIAL_TOKENS, USER, MODEL, CALL, RESULT)
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Error messages of tools may contain any of them."""

CHAT_TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {{- "<model>" -}}
        {%- generation -%}
            {{- message.content or "" -}}
            {%- for call in message.tool_calls or [] -%}
                {{- "<call>" + call.function.name + " " -}}
                {%- for key, value in call.function.arguments.items() -%}
                    {{- ("" if loop.first else ",") + key + "=" + value | string -}}
                {%- endfor -%}
            {%- endfor -%}
            {{- "<eos>" -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- ("<result>" if message.role == "tool" else "<user>") + message.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<model>" -}}
{%- endif -%}
"""

RESPONSE_TEMPLATE: dict[str, object] = {
    "start_anchor": MODEL,
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": EOS},
        "tool_calls": {
            "open_pattern": rf"{CALL}(?P<name>\w*) ?",
            "close_pattern": rf"{EOS}|(?={CALL})",
            "content": "kv-lines",
            "content_args": {"line_sep": ",", "kv_sep": "="},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def chat_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """builtin:tiny's tokenizer for conversations: every printable ASCII character, and each of `words`, is a
    token."""
    tokenizer = tiny_tokenizer(CHARACTERS, special=CHAT_TOKENS, words=words)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def taught_conversation(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]) -> Taught:
    """A conversation as a lesson: the assistant's messages are learned, everything else is only input."""
    written = tokenizer.apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = written["input_ids"], written["assistant_masks"]
    return tokens, [token if is_learned else IGNORED for token, is_learned in zip(tokens, mask, strict=True)]
