"""Submits runs as jobs to the job server of a Ray cluster, and runs commands there, where the files of such a
run are. Runs in the process of the command, outside the cluster.

    here                                  on the cluster's head
    asyncrl submit ─> JobServer.submit ─> keep what was shipped; exec asyncrl train    a run's driver
    asyncrl status, logs, stop, watch ──> exec asyncrl status ...     a short job: we print its output

A run's job has the run's name and directory in its metadata, so it can be found from anywhere. Every answer
has limits (job_client.py), and a job that is followed is polled while it prints nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl_cli import __version__
from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted, PreflightError, first_line
from asyncrl_cli.base.paths import ADDRESS_VARIABLE
from asyncrl_cli.job.ray.session import is_job_server
from asyncrl_cli.job.submit.cargo import PROFILE, Cargo
from asyncrl_cli.job.submit.cluster_token import HINT

START_S = 120.0
"""How long a command may wait for its job to start; the server needs some seconds for one."""
LOOK_EVERY_S = 5.0
FAILED = "FAILED"
GOES_ON = ("PENDING", "RUNNING")
"""States of a job that has not ended."""
LONGEST_COMMAND_S = 3600
"""Time limit on the cluster for a command that follows a run: nobody may be listening any more. Here,
`START_S` more."""
LONGEST_LINE = 16 * 2**20
TIMED_OUT = 124
"""The exit code of timeout(1)."""
MARK = "@asyncrl"
"""The line in a job's log after which its own output begins; the lines before are Ray's."""
COMMAND = "python3 -m asyncrl_cli"
VARIABLES = {"RAY_JOB_STOP_WAIT_TIME_S": "3600"}
"""Seconds between SIGTERM and SIGKILL when Ray stops a job (default: 3). The driver itself keeps to
the limit of a stop (`run.stop_grace_s`)."""
RUN_KEY, RUNS_DIR_KEY = "asyncrl_run", "asyncrl_runs_dir"
"""Keys of a job's metadata."""
Write = Callable[[str], None]


class JobDetails(Protocol):
    """What Ray tells of a job, as far as we read it."""

    submission_id: str
    status: str
    message: str | None
    driver_exit_code: int | None
    metadata: Mapping[str, str]
    start_time: int | None


def new_id() -> str:
    return f"asyncrl-{secrets.token_hex(5)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A driver to be submitted: `arguments` of asyncrl, the run's name, and the directory of runs on the
    cluster."""

    arguments: Sequence[str]
    run: str
    runs_dir: Path
    cargo: Cargo | None = None
    id: str = field(default_factory=new_id)

    @property
    def entrypoint(self) -> str:
        """A shell command. Ray removes a job's working directory when the job ends, so the files that a
        resume needs again are copied to a place beside the runs."""
        words = shlex.join([*self.arguments, "--runs-dir", str(self.runs_dir), "--ui", "plain"])
        shipped = shlex.quote(str(self.runs_dir / ".shipped" / self.id))
        keep = "" if self.cargo is None else f"mkdir -p {shipped} && cp -R . {shipped} && cd {shipped} && "
        return f"echo {MARK}; {keep}exec {COMMAND} {words}"

    @property
    def metadata(self) -> dict[str, str]:
        return {RUN_KEY: self.run, RUNS_DIR_KEY: str(self.runs_dir), "asyncrl_version": __version__}

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run` prints."""
        shipped = None
        if self.cargo is not None:
            files = [str(file) for file in self.cargo.files]
            shipped = {"files": files, PROFILE: self.cargo.profile_toml}
        return {
            "submission_id": self.id,
            "entrypoint": self.entrypoint,
            "metadata": self.metadata,
            "runtime_env": {"env_vars": VARIABLES, "working_dir": shipped},
        }


class JobServer:
    """The job server of a cluster. Methods raise PreflightError if it does not answer or refuses."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError if `address` is not that of a job server."""
        if not is_job_server(address):
            behind = "behind a firewall `ssh -L 8265:localhost:8265 HEAD`"
            hint = f"give that of the cluster's dashboard, http://HEAD:8265; {behind}"
            raise ConfigError(f"--address {address}: not the address of a job server", hint=hint)
        self.address = address
        with self._asking():
            from ray.dashboard.modules import dashboard_sdk
            from ray.dashboard.modules.job import sdk

            from asyncrl_cli.job.submit.job_client import BoundedClient

            for module in (sdk, dashboard_sdk):  # they log each upload and each connection
                module.logger.setLevel(logging.WARNING)
            logging.getLogger("ray").setLevel(logging.WARNING)

            self._client = BoundedClient(address)

    def submit(self, job: Job) -> None:
        with tempfile.TemporaryDirectory(prefix="asyncrl-job-") as directory:
            environment: dict[str, Any] = {"env_vars": VARIABLES}
            if job.cargo is not None:
                job.cargo.write(Path(directory))
                environment["working_dir"] = directory
            self._submit(job.entrypoint, job.id, environment, job.metadata)

    def started(self, job: str, watched_s: float) -> JobDetails:
        """Wait until the job runs, for `START_S` at most, then watch it for `watched_s`. Returns Ray's
        details of it."""
        until_s = time.monotonic() + START_S
        while (found := self.details(job)).status == "PENDING" and time.monotonic() < until_s:
            time.sleep(0.5)
        until_s = time.monotonic() + watched_s
        while found.status == "RUNNING" and time.monotonic() < until_s:
            time.sleep(0.5)
            found = self.details(job)
        return found

    def details(self, job: str) -> JobDetails:
        with self._asking():
            found: JobDetails = self._client.get_job_info(job)
            return found

    def runs(self) -> list[JobDetails]:
        """Ray's details of the jobs that are runs, the newest first."""
        with self._asking():
            jobs: list[JobDetails] = self._client.list_jobs()
            # a job that is no run may have no metadata
            runs = [job for job in jobs if {RUN_KEY, RUNS_DIR_KEY} <= (job.metadata or {}).keys()]
        return sorted(runs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, run: str | None, otherwise: Path) -> tuple[str, Path]:
        """Returns a run's name (default: the newest run) and the directory of runs that it is in: `otherwise`
        if unknown here."""
        for job in self.runs():
            if run in (None, job.metadata[RUN_KEY]):
                return job.metadata[RUN_KEY], Path(job.metadata[RUNS_DIR_KEY])
        if run is None:
            hint = f"asyncrl submit --address {self.address} -p NAME"
            raise PreflightError(f"no run was submitted to {self.address}", hint=hint)
        return run, otherwise.absolute()

    def check_version(self) -> None:
        """Raises PreflightError unless the cluster has this very version of asyncrl."""
        output: list[str] = []
        code = self.call(["--version"], output.append)
        there = output[-1].strip() if output else "nothing"
        if code == 0 and there == f"asyncrl {__version__}":
            return
        why = f"{self.address} has {there}"
        if code != 0:
            why = f"asyncrl cannot be run at {self.address}: {there}"
        install = f"`pip install asyncrl-cli=={__version__}`"
        hint = f"{install} into the Python that runs `ray start`, on every node"
        raise PreflightError(f"{why}; this machine has asyncrl {__version__}", hint=hint)

    def call(self, arguments: Sequence[str], write: Write, *, columns: int = 100) -> int:
        """Run `asyncrl ARGUMENTS` on the cluster, hand each line of its output to `write`, and return its
        exit code."""
        entrypoint = f"echo {MARK}; exec timeout {LONGEST_COMMAND_S} {COMMAND} {shlex.join(arguments)}"
        job = new_id()
        environment = {"env_vars": {"COLUMNS": str(columns)}}
        self._submit(entrypoint, job, environment, {"asyncrl_command": arguments[0]})
        try:
            found = self.started(job, 0.0)
            if found.status == "PENDING":
                late = f"{self.address} has not started the command within {START_S:g} s"
                why = f"{late}: {first_line(found.message or '')}"
                raise PreflightError(why, hint="a busy head starts jobs late: try again")
            return self.follow(job, write, most_s=LONGEST_COMMAND_S + START_S)
        finally:
            with contextlib.suppress(AsyncrlError), self._asking():  # an earlier error is raised instead
                self._client.stop_job(job)
                self._client.delete_job(job)  # only one that has ended leaves the list

    def follow(
        self, job: str, write: Write, warn: Write | None = None, *, most_s: float | None = None
    ) -> int:
        """Hand each line of the job's output to `write` until the job ends. Returns its exit code. Raises
        PreflightError if that takes longer than `most_s`, or if the end of the log cannot be fetched; with
        `warn` the latter is a warning, for callers to whom the exit code matters more.

        Even a log that closes without an error may not have been read to its end: a proxy may have closed it
        just before."""
        write = _without_ray_lines(write)
        try:
            num_written = asyncio.run(asyncio.wait_for(self._follow(job, write), most_s))
        except TimeoutError as error:
            why = f"{self.address} says after {most_s:g} s that the command still runs"
            raise PreflightError(why, hint="it is ended there: give the command again") from error
        try:
            with self._asking():
                log = self._client.get_job_logs(job)
            for line in log.removesuffix("\n").split("\n")[num_written:]:
                write(line)
        except PreflightError as error:
            if warn is None:
                raise
            warn(f"the last lines of the job's log may be missing: {error}")
        found = self.details(job)
        if found.status == "STOPPED":  # Ray does not say how the driver has ended
            return Interrupted.exit_code
        if found.driver_exit_code is None:
            why = f"the job {job} could not be run: {first_line(found.message or '')}"
            raise PreflightError(why, hint=f"`ray job logs {job}` shows more")
        return found.driver_exit_code

    async def _follow(self, job: str, write: Write) -> int:
        """Write whole lines of the log until the job ends. Returns how many. A log that closes or breaks off
        while the job goes on (a proxy's time limit, a busy head) is opened again."""
        num_written = 0
        while True:
            num_read = 0
            try:
                async for line in self._lines(job):
                    num_read += 1
                    if num_read > num_written:
                        write(line)
                        num_written = num_read
            except PreflightError:
                if num_written == 0:
                    raise
            if (await asyncio.to_thread(self.details, job)).status not in GOES_ON:
                return num_written
            await asyncio.sleep(LOOK_EVERY_S)

    async def _lines(self, job: str) -> AsyncIterator[str]:
        """The whole lines of the log, from its beginning until it closes: the server closes the log of an
        ended job when all of it is sent. The log's chunks may end within a line. PreflightError if it breaks
        off.

        A lost connection may never raise an error, so the job's state is polled meanwhile.
        """
        rest, chunks = "", self._client.tail_job_logs(job)
        coming = asyncio.ensure_future(anext(chunks, None))
        try:
            while True:
                done, _ = await asyncio.wait({coming}, timeout=LOOK_EVERY_S)
                if done:
                    with self._asking():
                        chunk = coming.result()
                    if chunk is None:
                        return
                    *lines, rest = (rest + chunk).split("\n")
                    if len(rest) > LONGEST_LINE:
                        why = f"the log of job {job} has a line of more than {LONGEST_LINE:,} characters"
                        raise PreflightError(why, hint=f"`ray job logs {job}` shows it")
                    for line in lines:
                        yield line
                    coming = asyncio.ensure_future(anext(chunks, None))
                elif (await asyncio.to_thread(self.details, job)).status not in GOES_ON:
                    return
        finally:
            coming.cancel()

    def _submit(
        self, entrypoint: str, job: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        environment = {**runtime_env, "env_vars": {**runtime_env["env_vars"], ADDRESS_VARIABLE: self.address}}
        with self._asking():
            self._client.submit_job(
                entrypoint=entrypoint, submission_id=job, runtime_env=environment, metadata=dict(metadata)
            )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Within the block errors of Ray's client are raised as our own."""
        import aiohttp
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            raise PreflightError(f"{self.address} refuses access: {first_line(error)}", hint=HINT) from error
        except (requests.RequestException, aiohttp.ClientError, OSError) as error:
            start = "`ray start --head --dashboard-host 0.0.0.0`, with ray[default]"
            hint = f"is the dashboard up there ({start})?"
            why = f"no job server answers at {self.address}: {first_line(error)}"
            raise PreflightError(why, hint=hint) from error
        except (RuntimeError, ValueError) as error:
            why = f"the job server at {self.address} fails: {first_line(error)}"
            raise PreflightError(why, hint="dashboard.log on the head node says more") from error
        # from Ray's client, which takes an answer's form for granted
        except (AttributeError, KeyError, TypeError) as error:
            why = f"{self.address} does not answer as a job server of Ray does: {first_line(error)}"
            raise PreflightError(why, hint="--address is that of its dashboard: http://HEAD:8265") from error


def _without_ray_lines(write: Write) -> Write:
    """Leaves out what Ray writes into a job's log: lines before the mark, and the entrypoint, which may come
    after it."""
    is_behind = False

    def write_behind(line: str) -> None:
        nonlocal is_behind
        if is_behind and not line.startswith("Running entrypoint for job "):
            write(line)
        is_behind = is_behind or line == MARK

    return write_behind
