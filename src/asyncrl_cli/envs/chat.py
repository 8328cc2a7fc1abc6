"""Chat templates and tokenizer: turns messages into ids and ids into messages, and continues existing ids
with new messages.

    render   messages ─────────────────────────────> the ids of a first prompt
    parse    sampled ids ──────────────────────────> Answer (answers.py)
    bridge   ids so far, and new messages ─────────> the ids that these add; None if the template rewrites

A bridge is tested, not assumed. The template writes the conversation with the new messages, with a mark in
place of the last answer:

    before   <user>2+2?<model>                                         the prompt of the answer
    after    <user>2+2?<model> MARK <eos> <user>and 3+3?<model>        must begin with `before`, have the mark
                                    ----- -----------------
                                    close what is added                tokenized from `close`, a special token

If `after` does not begin with `before`, the template has rewritten what the model has seen: it moved tools or
dropped thinking. If the answer's thinking is missing from `after`, the template drops it. In both cases there
is no bridge, and the caller renders all messages as a new prompt. How the template writes the answer itself
does not matter: the sampled ids are kept.

Why not the package `renderers` (0.1.12), which bridges too: it recognizes models by their names on the hub,
and renders the whole history again for all others. Here a model is a directory with any template, and the
trained model will be served with that template. The template decides, and nothing else has to be kept up to
date.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from asyncrl_cli.base.errors import PreflightError, first_line
from asyncrl_cli.contracts.environment import Answer, EpisodeFailed, Message, ToolSchema
from asyncrl_cli.contracts.item import Item, messages_of
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.envs.answers import EXAMPLE, EXAMPLE_TOOL, Parser

MARK, THOUGHT = "asyncrl-mark", "asyncrl-thought"
QUESTION: Message = {"role": "user", "content": "q"}
ANOTHER_MODEL = (
    'set model.chat_template = "builtin:tools", which adds tools to the model\'s own template, or to the '
    "path of another one, or take a model whose template has tools"
)
PIECE_CHARACTERS = 2**16
"""A text that may be far too long is tokenized in pieces of this length, up to `FAR` times the limit."""
FAR = 2
"""A piece's edges may split a token, so the pieces of a text have a few more tokens than the whole, never
twice as many."""
PREFIX_TOKENS = 64
"""How many of a prompt's last tokens are read to see how it began the answer."""
Tools = Sequence[ToolSchema]


class Style(NamedTuple):
    """How a template takes an assistant's message. Templates differ; test renderings find the first style
    that works."""

    thinks: bool
    """It takes `reasoning_content`. Otherwise thinking is put into `content`, as the model wrote it."""
    says_and_calls: bool = True
    """It takes `content` beside tool calls. Otherwise `content` must be None there."""
    arguments_as_text: bool = False
    writes_calls: bool = True


class Chat:
    """`stop_tokens`: tokens at which the engine ends a response, besides the tokenizer's own. `max_tokens`:
    what callers accept; of a text with more than twice as many only a part is tokenized, which is too long,
    too."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Collection[int] = (),
        max_tokens: int = sys.maxsize,
    ) -> None:
        self.tokenizer = tokenizer
        self._far_tokens = FAR * max_tokens
        self._stops = {*stop_tokens} | ({tokenizer.eos_token_id} - {None})

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text that is a whole prompt. Raises EpisodeFailed if it is not valid Unicode."""
        return self._ids(text, add_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def unknown(self, text: str) -> str:
        """The characters of a text that the vocabulary lacks. Raises as `encode`."""
        unknown = self.tokenizer.unk_token_id
        if unknown is None or unknown not in self._ids(text):
            return ""
        return "".join(one for one in dict.fromkeys(text) if unknown in self._ids(one))

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a conversation, up to where the model's answer begins. Without a chat template: ids of the
        joined contents.

        Raises EpisodeFailed if the template refuses the messages, or cannot be used with tools.
        """
        if tools and self.why_no_tools:
            raise EpisodeFailed("template", f"the model cannot be offered tools: {self.why_no_tools}")
        if not self.has_template:
            return self.encode("".join(message["content"] for message in messages))
        return self._ids(self._text(messages, tools))

    def bridge(
        self, tokens: Sequence[int], messages: Sequence[Message], new: Sequence[Message], tools: Tools = ()
    ) -> list[int] | None:
        """Ids that continue `tokens` with the `new` messages, up to where the next answer begins.

        `messages`: what `tokens` stand for. The last one is an answer, with whose sampled ids `tokens` end.
        Returns None if the template would rewrite these messages. Raises EpisodeFailed if it refuses the new
        ones.
        """
        if not self.has_template:
            return self._ids("".join(message["content"] for message in new))
        *seen, answer = messages
        before, marked = self._text(seen, tools), _marked(answer)
        after = self._text([*seen, marked, *new], tools)
        written, mark, rest = after.removeprefix(before).partition(MARK)
        if not after.startswith(before) or not mark or (_thinks(answer) and THOUGHT not in written):
            return None
        ends = [rest.index(text) for text in self._stop_texts if text in rest] if self._closes else []
        # the template does not close answers with a stop token: take all text after the answer
        if not ends:
            alone = self._text([*seen, marked], tools, add_generation_prompt=False)
            return self._ids(after.removeprefix(alone)) if after.startswith(alone) else None
        added = self._ids(rest[min(ends) :])
        return added[1:] if tokens and tokens[-1] in self._stops else added

    def parse(self, prompt: Sequence[int], completion: Completion, tools: Tools = ()) -> Answer:
        """Parse the model's answer to `prompt`. Calls are parsed only if `tools` were offered."""
        text, reason = self.decode(completion.tokens), completion.finish_reason
        if not self.has_template:
            return Answer(text=text, message={"role": "assistant", "content": text}, finish_reason=reason)
        prefix = str(self.tokenizer.decode(list(prompt[-PREFIX_TOKENS:])))
        is_closed = bool(completion.tokens) and completion.tokens[-1] in self._stops
        tokens = completion.tokens[:-1] if is_closed else completion.tokens
        whole = text if self._specials.isdisjoint(tokens) else str(self.tokenizer.decode(tokens))
        return self.parser.answer(text, whole, reason, prefix, tools)

    @cached_property
    def parser(self) -> Parser:
        """Parses answers in the form that this template writes."""
        call = {"role": "assistant", "content": "", "tool_calls": [EXAMPLE]}
        prompt, written = self._example(call)
        ends = [written.index(text) for text in self._stop_texts if text in written]
        return Parser(self.tokenizer, prompt, written[: min(ends, default=len(written))])

    def check_turns(self) -> None:
        """Raises PreflightError if the template cannot write a second turn."""
        try:
            if self.has_template:
                self._text([QUESTION, {"role": "assistant", "content": "a"}, QUESTION], ())
        except EpisodeFailed as failed:
            why = f"model.path: a second turn is not possible: {failed.text}"
            raise PreflightError(why, hint=ANOTHER_MODEL) from None

    def check_tools(self) -> None:
        """Raises PreflightError if the model cannot be offered tools."""
        if self.why_no_tools:
            why = f"model.path: the model cannot be offered tools: {self.why_no_tools}"
            raise PreflightError(why, hint=ANOTHER_MODEL)

    @cached_property
    def why_no_tools(self) -> str:
        """Why the model cannot be offered tools; "" if it can."""
        if not self.has_template:
            return "its tokenizer has no chat template"
        if not self._style.writes_calls:
            return "its chat template does not write tool calls"
        if not self.parser.reads_calls:
            what = "its chat template writes tool calls in an unknown form"
            return f"{what}, and its tokenizer has no response_template"
        call = {"role": "assistant", "content": "", "tool_calls": [EXAMPLE]}
        name, id = EXAMPLE["function"]["name"], EXAMPLE["id"]
        result = {"role": "tool", "content": MARK, "tool_call_id": id, "name": name}
        try:
            is_written = MARK in self._text([QUESTION, call, result], [EXAMPLE_TOOL])
        except EpisodeFailed as failed:
            return failed.text
        return "" if is_written else "its chat template does not write the results of tools"

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            if len(text) > self._far_tokens:
                # A megabyte at once takes seconds, and 300 MB of memory: stop where the text is far too long.
                tokens: list[int] = []
                for start in range(0, len(text), PIECE_CHARACTERS):
                    piece = text[start : start + PIECE_CHARACTERS]
                    tokens += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
                    if len(tokens) > self._far_tokens:
                        return tokens
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except TypeError as error:  # JSON may hold lone surrogates, which tokenizers reject
            why = f"a text that is not valid Unicode cannot be tokenized: {first_line(error)}"
            raise EpisodeFailed("template", why) from error

    @cached_property
    def _style(self) -> Style:
        thinking = {"role": "assistant", "content": "a", "reasoning_content": THOUGHT}
        thinks = THOUGHT in self._example(thinking, Style(thinks=True))[1]
        call = {**EXAMPLE, "function": {**EXAMPLE["function"], "arguments": {MARK: ""}}}
        for says_and_calls in (True, False):
            for arguments_as_text in (False, True):
                style = Style(thinks, says_and_calls, arguments_as_text)
                calling = {"role": "assistant", "content": "", "tool_calls": [call]}
                if MARK in self._example(calling, style)[1]:
                    return style
        return Style(thinks, writes_calls=False)

    @cached_property
    def _closes(self) -> bool:
        """Whether the template closes an answer with a token at which the model stops."""
        _, _, rest = self._example({"role": "assistant", "content": MARK})[1].partition(MARK)
        return any(text in rest for text in self._stop_texts)

    @cached_property
    def _specials(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        specials = (token for token, piece in added if piece.special)
        return frozenset([*self.tokenizer.all_special_ids, *specials])

    @cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        texts = (self.tokenizer.convert_ids_to_tokens(token) for token in sorted(self._stops))
        return tuple(text for text in texts if text)

    def _example(self, message: Message, style: Style | None = None) -> tuple[str, str]:
        """How the template writes QUESTION, and then the answer `message`; two empty texts if it cannot."""
        try:
            tools = [EXAMPLE_TOOL] if "tool_calls" in message else []
            whole = self._text([QUESTION, message], tools, add_generation_prompt=False, style=style)
            # a <think> that begins the answer may be missing from the history
            for begins_answer in (True, False):
                before = self._text([QUESTION], tools, add_generation_prompt=begins_answer)
                if whole.startswith(before):
                    return before, whole.removeprefix(before)
        except EpisodeFailed:
            pass
        return "", ""

    def _text(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        add_generation_prompt: bool = True,
        style: Style | None = None,
    ) -> str:
        dressed = [
            self._dressed(message, style) if message["role"] == "assistant" else dict(message)
            for message in messages
        ]
        how = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(dressed, tools=list(tools) or None, **how))
        # whatever a template's expressions may raise
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            why = f"the model's chat template refuses these messages: {first_line(error)}"
            raise EpisodeFailed("template", why) from error

    def _dressed(self, message: Message, style: Style | None) -> Message:
        """An assistant's message in the template's style."""
        dressed, calls, thinking = dict(message), message.get("tool_calls"), message.get("reasoning_content")
        if not thinking and not calls:
            return dressed
        style = style or self._style
        if thinking and not style.thinks:
            dressed["content"] = f"<think>\n{thinking}\n</think>\n\n{message.get('content') or ''}"
        if calls:
            dressed["content"] = (dressed.get("content") or "") if style.says_and_calls else None
            dressed["tool_calls"] = []
            for call in calls:
                arguments = call["function"]["arguments"]  # the gateway's clients send text
                if style.arguments_as_text and not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                elif not style.arguments_as_text and isinstance(arguments, str):
                    with contextlib.suppress(ValueError, RecursionError):
                        arguments = json.loads(arguments)
                function = {**call["function"], "arguments": arguments}
                dressed["tool_calls"].append({**call, "function": function})
        return dressed


def load_chat(model_dir: str | Path, *, trust_remote_code: bool, max_tokens: int) -> Chat:
    """The chat of a model's directory, with the stop tokens of its generation config."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    return Chat(tokenizer, stop_tokens_of(model_dir), max_tokens)


def stop_tokens_of(model_dir: str | Path) -> list[int]:
    """The stop tokens of a model's generation config; none if it has no such config."""
    try:
        ends = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except OSError:
        return []
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def render_prompts(tokenizer: PreTrainedTokenizerBase, items: Sequence[Item]) -> list[list[int]]:
    """Ids of the items' prompts, each as the only message of a conversation."""
    chat = Chat(tokenizer)
    return [chat.render(messages_of(item["prompt"])) for item in items]


def _marked(answer: Message) -> Message:
    """The answer with MARK in place of its content, or of its last call's arguments, and THOUGHT in place of
    any thinking."""
    calls, thinking = answer.get("tool_calls"), dict.fromkeys(_thinks(answer), THOUGHT)
    if not calls:
        return {**answer, **thinking, "content": MARK}
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {MARK: ""}}}
    return {**answer, **thinking, "tool_calls": [*calls[:-1], last]}


def _thinks(answer: Message) -> list[str]:
    """The keys under which the answer has thinking."""
    return [name for name in ("reasoning_content", "thinking") if answer.get(name)]
