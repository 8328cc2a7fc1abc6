"""The conversation of a running trajectory: token sequences that only grow, and the messages that they stand
for.

    ask(new messages) ─> the ids so far + ids of the new messages ───> generate ─> take(completion) ─> Answer
                    └──> where the template rewrites what came before,   ^
                         a fork: all messages rendered, as the prompt ───┘
                         of a new segment

Sampled tokens are never tokenized again. Each is trained once, exactly as it was sampled, in the segment in
which it was sampled. The prompt of a fork may repeat sampled tokens as text, which is not trained. So the
segments of a trajectory share its reward, and its tokens count once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl_cli.contracts.environment import Answer, EpisodeFailed, Message
from asyncrl_cli.data.ragged import end_to_end
from asyncrl_cli.data.sample_fields import BUILT_IN, NOT_SAMPLED, OPTIONAL, Schema, Writer
from asyncrl_cli.data.trajectories import Arrays, segment_of
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.envs.chat import Chat, Tools


@dataclass(slots=True, eq=False)
class Context:
    """A growing segment. `messages`: what its tokens stand for, ending with an answer; empty before the first
    answer, and where only the tokens are known."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: Tools = ()
    num_sampled: int = 0
    answers: list[range] = field(default_factory=list)
    """Where the tokens of each answer are."""
    written: list[tuple[str, range, Any]] = field(default_factory=list)
    """Values of further fields: the name, the tokens, and a value for each of them."""

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with all of this context's tokens."""
        return list(tokens[: len(self.tokens)]) == self.tokens

    def segment(self, schema: Schema) -> Arrays:
        """Tokens that were not sampled have mask 0, version -1 and logprob 0. Further fields have their
        `fill` where nobody wrote them."""
        arrays = dict(segment_of(self.tokens, self.logprobs, self.versions))
        for name in dict.fromkeys(name for name, _, _ in self.written):
            declared = schema[name]
            written = {where: values for one, where, values in self.written if one == name}
            if declared.per == "sampled":  # all answers end to end
                parts = [written.get(where, declared.filled(len(where))) for where in self.answers]
                arrays[name] = end_to_end(parts)
                continue
            like = max(written.values(), key=lambda values: values.size)
            arrays[name] = declared.filled(len(self.tokens), like)
            for where, values in written.items():
                if len(where):
                    arrays[name][where.start : where.stop] = values
        return arrays


@dataclass(slots=True, eq=False)
class Conversation:
    """`contexts`: all so far; `ask` continues the last one. A question without an answer leaves no trace.
    `values`: what was written of declared fields of the trajectory."""

    chat: Chat
    schema: Schema = field(default_factory=lambda: BUILT_IN)
    contexts: list[Context] = field(default_factory=list)
    num_turns: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    _asked: Context = field(default_factory=Context)
    _prompt: list[int] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)

    def ask(self, new: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The prompt's ids after these new messages. Raises EpisodeFailed if the chat template refuses
        them."""
        context = self.contexts[-1] if self.contexts else Context()
        self._messages = [*context.messages, *new]
        added = None
        if context.messages and context.tools == tools:
            added = self.chat.bridge(context.tokens, context.messages, new, tools)
        if added is None:
            context, self._prompt = Context(), self.chat.render(self._messages, tools)
        else:
            self._prompt = context.tokens + added
        context.tools, self._asked = tools, context
        return self._prompt

    def take(self, completion: Completion) -> Answer:
        """Add the completion of the last question, and return it as an answer. Raises EpisodeFailed as `keep`
        does."""
        answer = self.chat.parse(self._prompt, completion, self._asked.tools)
        answer = replace(answer, tokens=completion.tokens)
        self.keep(self._asked, self._prompt, completion, [*self._messages, answer.message])
        return answer

    def keep(
        self, context: Context, prompt: list[int], completion: Completion, messages: list[Message]
    ) -> None:
        """Add a whole response to a context, which may be a new one. `messages`: all messages of the context
        from now on. Raises EpisodeFailed if the engine wrote fields that are not declared so."""
        if context not in self.contexts:
            self.contexts.append(context)
        added = list(prompt[len(context.tokens) :])  # what the prompt adds to the tokens so far
        begin = len(context.tokens) + len(added)
        # the last token so far was no input before
        inputs = range(max(len(context.tokens) - 1, 0), begin)
        context.answers.append(range(begin, begin + len(completion.tokens)))
        context.tokens += added + completion.tokens
        context.logprobs += [0.0] * len(added) + completion.logprobs
        context.versions += [NOT_SAMPLED] * len(added) + completion.versions
        context.num_sampled += len(completion.tokens)
        context.messages = messages
        self.num_turns += 1
        try:
            for name, values in completion.prompt_fields.items():
                if inputs:
                    values_T = self.schema[name].array_of(values[inputs.start : inputs.stop], len(inputs))
                    context.written.append((name, inputs, values_T))
            self.write("engine", completion.fields, context)
        except ValueError as error:
            raise EpisodeFailed("engine", f"engine: {error}") from None

    def write(self, by: Writer, fields: Mapping[str, Any], context: Context | None = None) -> None:
        """Add values of further fields: of the trajectory, or one for each token of the last answer. Raises
        ValueError if they are not as declared."""
        for name, values in fields.items():
            declared = self.schema.get(name)
            if declared is None or declared.by != by or name in BUILT_IN.keys() - OPTIONAL:
                why = f"field {name!r} is not declared as written by the {by}"
                raise ValueError(f"{why}; task.fields names the declarations")
            if declared.is_array:
                context = context or self.contexts[-1]
                where = context.answers[-1]
                context.written.append((name, where, declared.array_of(values, len(where))))
                continue
            try:
                json.dumps(values, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"field {name!r} is nothing that JSON can hold: {error}") from None
            self.values[name] = values

    @property
    def num_sampled(self) -> int:
        return sum(context.num_sampled for context in self.contexts)

    @property
    def num_forks(self) -> int:
        return max(len(self.contexts) - 1, 0)

    def version_tokens(self) -> tuple[tuple[int, int], ...]:
        """Sampled tokens per version, ascending by version."""
        versions = Counter(version for context in self.contexts for version in context.versions)
        del versions[NOT_SAMPLED]
        return tuple(sorted(versions.items()))

    @property
    def first_version(self) -> int | None:
        """The version that sampled the trajectory's first token; None before that."""
        versions = self.contexts[0].versions if self.contexts else []
        return next((version for version in versions if version != NOT_SAMPLED), None)

    def segments(self) -> list[Arrays]:
        return [context.segment(self.schema) for context in self.contexts]
