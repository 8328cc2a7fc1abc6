"""A scorer that runs in its own processes (`ref`, `prox`, `critic`, the reward model): `ScorerActor` is one
process, `RayScorer` is the loop's view of all of them.

    group main     one thread: start, load, score, judge. All processes get the same calls in the same order, except `judge`: one
                   process alone scores an eval's trajectories
    group control  report, meeting_point: answered at once, whatever else runs

Who waits for whom: collectives in `main` wait for the other processes' `main`; the driver waits for each
call, at most rollout.call_timeout_s (weights.timeout_s for a load).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost
from asyncrl_cli.contracts.ports import EvalResult
from asyncrl_cli.contracts.prompt_group import GroupResult
from asyncrl_cli.contracts.trajectories import GroupPayload, joined
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.job.calls import Limit, all_of, answer
from asyncrl_cli.job.rank_actors import RankActor, RayRanks
from asyncrl_cli.job.transports import arriving, merging
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.profile.sharing import CRITIC, PROX, REWARD
from asyncrl_cli.train.step_plan import split_by_tokens

if TYPE_CHECKING:
    from asyncrl_cli.train.ranks import Ranks
    from asyncrl_cli.weights.versions import Manifest


class ScorerActor(RankActor):
    """One process. Its methods mirror `loop.ports.Scorer`; `RayScorer` calls them on all processes."""

    ROLE, INPUT = "scorer", "finished groups"

    def __init__(
        self, rank: int, task: str, profile: Profile, place: ProcessPlace, *, log_path: Path
    ) -> None:
        super().__init__(task, rank, profile, place, log_path)
        self.NEEDS = f"asyncrl_cli.train.{'reward_model' if task == REWARD else 'critic'}"
        self._ranks: Ranks | None = None

    def _start(self, init_method: str) -> None:
        task, profile, place = self._name, self._profile, self._place
        self._whole = merging(profile, place) if task == PROX else iter
        if task == REWARD:
            from asyncrl_cli.envs.chat import load_tokenizer
            from asyncrl_cli.train.reward_model import RewardModel

            policys = load_tokenizer(place.model_dir, trust_remote_code=profile.model.trust_remote_code)
            self._scorer: Any = RewardModel(profile, place, partial(policys.decode, skip_special_tokens=True))
            return
        from asyncrl_cli.train.critic import CriticApart
        from asyncrl_cli.train.policy_model import frozen_model
        from asyncrl_cli.train.ranks import Ranks

        ranks = self._ranks = Ranks(profile, place, rank=self._rank, init_method=init_method)
        self._scorer = (
            CriticApart(profile, place, ranks)
            if task == CRITIC
            else frozen_model(task, profile, place, ranks)
        )

    @ray.method(concurrency_group="main")
    def load(self, manifest: Manifest, bucket_refs: list[Any]) -> None:
        """Fetch a version's buckets and load this process's part of it."""
        with self._meter.doing(State.LOADING, "weights"):
            self._scorer.load(manifest, self._whole(arriving(manifest, bucket_refs)))

    @ray.method(concurrency_group="main")
    def score(self, num_tokens: int, items: Sequence[Mapping[str, Any]], *parts: GroupPayload) -> Any:
        """Returns this process's report, then the column of each group. A group is one or more of `parts`.
        `num_tokens`: sampled tokens that all processes together score in this call."""
        with self._meter.doing(State.BUSY):
            columns = self._scorer.score(joined(parts), items)
            self._meter.add(scored_tokens=num_tokens)
        report = self._meter.report()
        return (report, *columns) if columns else report

    @ray.method(concurrency_group="main")
    def judge(self, items: Sequence[Mapping[str, Any]], groups: Sequence[GroupPayload]) -> list[float]:
        """The reward model's scores of an eval's trajectories, each a group of its own."""
        with self._meter.doing(State.BUSY):
            return [score for (score,) in self._scorer.score(groups, items)]

    @ray.method(concurrency_group="main")
    def stop(self) -> None:
        if self._ranks is not None:
            self._ranks.close()


class RayScorer(RayRanks):
    """`loop.ports.Scorer` on all `ScorerActor`s. A column's handle is its ObjectRef. The driver owns it, so
    it outlives the process that made it, but the column goes straight to the trainer's ranks. (Only rewards
    come to the driver.)"""

    def __init__(self, name: str, make_actors: Callable[[], list[Any]], profile: Profile) -> None:
        """`make_actors()` creates the actors of all processes in their bundles, now and at every restart."""
        super().__init__(name, make_actors(), profile)
        self.call_tokens = len(self.actors) * profile.trainer.max_tokens_per_microbatch
        self._make_actors = make_actors
        self._num_judged = 0

    async def load(self, published: Published) -> None:
        manifest, bucket_refs = published.handle
        await self.collective(f"the load of version {published.version}", "load", manifest, list(bucket_refs))

    async def score(
        self, groups: Sequence[GroupResult], items: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Any], ExecutorReport]:
        """Divide the groups between the processes by their number of tokens, and score them."""
        lengths = [
            sum(meta.prompt_tokens + meta.response_tokens for meta in group.trajectories) for group in groups
        ]
        shares = split_by_tokens(lengths, len(self.actors))
        num_tokens = sum(group.response_tokens for group in groups)
        reports, columns = [], dict[int, Any]()
        for actor, share in zip(self.actors, shares, strict=True):
            own = [items[index] for index in share] if self.name == REWARD else []
            parts = chain.from_iterable(groups[index].payload for index in share)
            made = actor.score.options(num_returns=1 + len(share)).remote(num_tokens, own, *parts)
            report, *of_groups = made if share else [made]
            reports.append(report)
            columns |= dict(zip(share, of_groups, strict=True))
        call = f"the scores of {len(groups)} groups"
        told = await self._answers(call, reports, self._calls)
        handles = [columns[index] for index in range(len(groups))]
        if self.name == REWARD:
            handles = await all_of(self._answer(handle, call) for handle in handles)
        return handles, told[0]

    async def judge(self, result: EvalResult, items: Sequence[Mapping[str, Any]]) -> Sequence[float]:
        """An eval's calls go to the processes in turn."""
        self._num_judged += 1
        index = self._num_judged % len(self.actors)
        call = f"the scores of {len(items)} trajectories of an eval"
        return await self._answer(self.actors[index].judge.remote(items, result.payload), call, index)

    async def restart(self) -> None:
        """Kill all actors, dead or alive, and start new ones, which get their bundles once the old actors are
        gone."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = self._make_actors()
        await self.start()

    async def _answer(self, ref: Any, call: str, rank: int = 0, limit: Limit | None = None) -> Any:
        """The limit is `rollout.call_timeout_s` by default. Errors name the whole scorer, which is restarted
        as a whole. (When a process is lost, the others' collectives fail, and their error may come first.)"""
        try:
            host = self._hosts.get(rank, "")
            return await answer(
                ref,
                executor=self.name,
                call=f"{call} (process {rank})",
                limit=limit or self._calls,
                host=host,
            )
        except ExecutorLost:
            raise
        except ExecutorFailed as error:
            raise ExecutorLost(error.cause, hint=error.hint, executor=self.name) from error
