"""A driver to be ended in every way: a session with an actor whose child left the actor's process group.

python driver.py HOW     HOW: return | raise, once its stdin closes, if no signal ends it before
"""

from __future__ import annotations

import os
import signal
import sys

from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.profile.schema import Profile


class Holder:
    def hold(self) -> int:
        import subprocess

        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return self.child.pid


def main(how: str) -> None:
    import ray

    # tests that a shell runs in the background inherit that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cluster = ClusterResources(nodes=(NodeResources(name="here", cpus=2),), elastic_cpus=True)
    with ray_session(Profile(), cluster=cluster) as plan:
        holder = ray.remote(Holder).options(num_cpus=1).remote()
        ray.get(holder.hold.remote())
        directory = os.path.dirname(os.environ["RAY_AUTH_TOKEN_PATH"])  # ours, around Ray's
        ready = ("ready", directory, plan.cpus)
        try:
            print(*ready, flush=True)  # whoever reads it may send the signal before this returns
            sys.stdin.read()
        except KeyboardInterrupt:
            ray.get(holder.hold.remote())  # a Ctrl-C at the terminal must not reach Ray's processes
            print("went on after Ctrl-C", flush=True)
        if how == "raise":
            raise RuntimeError("the driver failed")


if __name__ == "__main__":
    main(sys.argv[1])
