"""Which charts a page has. page.js draws them; a chart for which no run has data is left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["lines", "reward", "parts", "histogram", "quantiles", "any", "timeline"]
Unit = Literal["share", "seconds", "", "tokens/s", "tokens", "nats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`series`: metric -> label. `prefix`: of the metrics that are stacked (parts). `limit`: the name of a run's limit, which is
    drawn as a line, and its label."""

    section: str
    title: str
    note: str
    kind: Kind = "lines"
    unit: Unit = ""
    series: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    log: bool = False
    limit: tuple[str, str] = ("", "")


LEARNING, IDLE, STALE, SYNC, CORRECTION, WORK = (
    "Learning",
    "Who works, who waits",
    "Staleness",
    "Weight syncs",
    "Corrections",
    "Work",
)
CHARTS = (
    Chart(
        section=LEARNING,
        title="Reward",
        note="Mean reward of each train step's samples; points are evals on held-out prompts.",
        kind="reward",
        series=(("reward/mean", "train"),),
    ),
    Chart(
        section=LEARNING,
        title="Response length",
        note="Sampled tokens per trajectory: median, the middle half, and 5% to 95%.",
        kind="quantiles",
        unit="tokens",
        series=(("response_tokens/quantiles", ""),),
    ),
    Chart(
        section=LEARNING,
        title="Entropy",
        note="Of the policy, per sampled token.",
        unit="nats",
        series=(("train/entropy", "entropy"),),
    ),
    Chart(
        section=IDLE,
        title="Trainer: where its time goes",
        note="Share of each train step's time by state. All but busy is idle.",
        kind="parts",
        unit="share",
        prefix="states/trainer/",
    ),
    Chart(
        section=IDLE,
        title="Rollout workers: where their time goes",
        note="Share of time by state, mean over workers. All but busy is idle.",
        kind="parts",
        unit="share",
        prefix="states/rollout/",
    ),
    Chart(
        section=IDLE,
        title="Scorers: where their time goes",
        note="Share of time by state, mean over the scorers (placement.tasks). All but busy is idle.",
        kind="parts",
        unit="share",
        prefix="states/scorer/",
    ),
    Chart(
        section=IDLE,
        title="Idle and overlap",
        note="Overlap: time in which both sides are busy, relative to the less busy one.",
        unit="share",
        series=(("trainer/idle_ratio", "trainer idle"), ("rollouter/idle_ratio", "rollouter idle"), ("overlap_ratio", "overlap")),
    ),
    Chart(
        section=IDLE,
        title="Slots used",
        note="Running sequences over slots: what a long tail really costs. Trajectories that wait for tools hold slots too.",
        unit="share",
        series=(("rollouter/slot_utilization", "slots used"), ("rollouter/tool_waiting_ratio", "waiting for tools")),
    ),
    Chart(
        section=IDLE,
        title="Step time by part",
        note="Seconds of each train step. wait_data: too few groups were ready; gather: collecting new weights.",
        kind="parts",
        unit="seconds",
        prefix="timing/",
    ),
    Chart(
        section=IDLE,
        title="Tokens per second",
        note="Sampled by all workers (evals and discarded ones too), and trained; waits included.",
        unit="tokens/s",
        series=(("rollouter/tokens_per_s", "rollouter"), ("trainer/tokens_per_s", "trainer")),
    ),
    Chart(
        section=STALE,
        title="Staleness of the samples",
        note="Share of the step's trajectories by the age of their oldest token, in versions.",
        kind="histogram",
        series=(("staleness/histogram", "age"),),
        limit=("staleness", "bound"),
    ),
    Chart(
        section=STALE,
        title="Staleness of the tokens",
        note="Versions between the window in which a token is trained and the version that sampled it.",
        series=(
            ("staleness/mean", "mean"),
            ("staleness/newest_mean", "newest"),
            ("staleness/oldest_mean", "oldest"),
            ("staleness/max", "max"),
        ),
        limit=("staleness", "bound"),
    ),
    Chart(
        section=STALE,
        title="Versions within a trajectory",
        note="Share of the step's trajectories by their span: newest version minus oldest; 0 is sampled by one version.",
        kind="histogram",
        series=(("staleness/span_histogram", "span"),),
    ),
    Chart(
        section=STALE,
        title="Partial rollouts",
        note="Share of the window's trajectories so far that were sampled by more than one version.",
        unit="share",
        series=(("fully_async/partial/partial_ratio", "partial ratio"),),
    ),
    Chart(
        section=SYNC,
        title="Phases of a weight sync",
        note="Of the last version that all workers hold, maxima over workers. pause: no sequence ran.",
        unit="seconds",
        log=True,
        series=(("sync/gather_s", "gather"), ("sync/send_s", "send"), ("sync/load_s", "load"), ("sync/pause_s", "pause")),
    ),
    Chart(
        section=SYNC,
        title="Trainer against worker",
        note="Mean absolute difference of the probe sequences' logprobs after a load. Above the limit a warning is written.",
        log=True,
        series=(("sync/logprob_abs_diff", "logprob difference"),),
        limit=("logprob_diff", "limit"),
    ),
    Chart(
        section=CORRECTION,
        title="Distance of policy and sampler",
        note="KL(sampler, policy in training) per token; fresh tokens, and those that are one, and two or more versions old.",
        unit="nats",
        series=(
            ("correction/kl", "all"),
            ("correction/kl/stale_0", "fresh"),
            ("correction/kl/stale_1", "1 old"),
            ("correction/kl/stale_2_up", "2+ old"),
        ),
    ),
    Chart(
        section=CORRECTION,
        title="Clipped and rejected tokens",
        note="Share of tokens whose loss the clip decided, whose importance weight was cut, or that were kept out.",
        unit="share",
        series=(
            ("correction/clipped_ratio", "clipped"),
            ("correction/truncated_ratio", "weight cut"),
            ("correction/masked_ratio", "masked"),
            ("correction/rejected_ratio", "rejected"),
        ),
    ),
    Chart(
        section=CORRECTION,
        title="Importance weights",
        note="Effective sample size: 1 means that all tokens weigh the same.",
        series=(("correction/weight_mean", "mean weight"), ("correction/effective_ratio", "effective size")),
    ),
    Chart(
        section=CORRECTION,
        title="Distance from the reference",
        note="KL(policy, reference) per sampled token.",
        unit="nats",
        series=(("ref/kl", "KL"),),
    ),
    Chart(
        section=WORK,
        title="Groups in the ledger",
        note="At the end of each train step. Requeued and dropped ones count from the run's beginning.",
        series=(
            ("ledger/running", "running"),
            ("ledger/finished", "finished"),
            ("ledger/requeued", "requeued"),
            ("ledger/dropped", "dropped"),
        ),
    ),
    Chart(
        section=WORK,
        title="Turns and tool calls",
        note="Answers of the model per trajectory, and its tool calls that failed.",
        series=(("env/turns_mean", "turns"), ("env/turns_max", "max"), ("env/failed_calls", "failed calls")),
    ),
    Chart(
        section=WORK,
        title="Any figure",
        note="Any figure of metrics.jsonl that is a number.",
        kind="any",
    ),
    Chart(
        section="Timeline",
        title="What every executor did",
        note="starved: nothing to work on; blocked: nobody takes what is ready; dotted: a new version was published. "
        "Drag to zoom, double-click to see all again.",
        kind="timeline",
    ),
)


def charts_json() -> list[dict[str, Any]]:
    return [asdict(chart) for chart in CHARTS]
