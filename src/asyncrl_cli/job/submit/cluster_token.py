"""The user's token, for clusters that ask for one.

`ray start --head` turns token authentication on by itself where its user has a token. Ray's clients send that
token only with RAY_AUTH_MODE=token (or to the address `auto`). So the cluster is asked first, without a
token, and gets the token if it wants one.
"""

from __future__ import annotations

import os

from asyncrl_cli.base.errors import PreflightError, first_line

MODE = "RAY_AUTH_MODE"
ASK_TIMEOUT_S = 10.0
HINT = "copy ~/.ray/auth_token of the user who started the cluster to this machine, or set RAY_AUTH_TOKEN"
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first thing that any client asks of a GCS. Neither request nor answer is looked into."""


def user_token(address: str) -> str:
    """The user's token, for a cluster that asks for one. Raises PreflightError if there is none or Ray is set
    up not to send it."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    if (mode := os.environ.get(MODE, "token")).lower() != "token":
        why = f"{address} asks for a token, and {MODE}={mode} keeps it from being sent"
        raise PreflightError(why, hint=f"unset {MODE}")
    try:
        AuthenticationTokenLoader.instance().reset_cache()
        token = str(AuthenticationTokenLoader.instance().get_raw_token(ignore_auth_mode=True))
    except AuthenticationError as error:
        # the note tells to set what is set here when it is needed
        why = first_line(error).partition(" Note:")[0]
        raise PreflightError(f"{address} asks for a token: {why}", hint=HINT) from error
    if not token:
        raise PreflightError(f"{address} asks for a token, and this user has none", hint=HINT)
    return token


def token_variables(gcs_address: str) -> dict[str, str]:
    """Variables that make Ray's client send the token, if the GCS at HOST:PORT asks for one.

    Raises PreflightError if there is no token here, or the GCS refuses it: Ray itself would say only that it
    failed to connect, after 20 s.
    """
    if not _asks_for_token(gcs_address, ""):
        return {}
    if _asks_for_token(gcs_address, user_token(gcs_address)):
        why = "the token of this user is not that of the cluster"
        raise PreflightError(f"{gcs_address} refuses access: {why}", hint=HINT)
    return {MODE: "token"}


def _asks_for_token(gcs_address: str, token: str) -> bool:
    """Whether the GCS refuses a call with this token ("": without one). False if it does not answer: then
    Ray's client says why."""
    import grpc

    with grpc.insecure_channel(gcs_address) as channel:
        try:
            headers = [("authorization", f"Bearer {token}")] if token else None
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=ASK_TIMEOUT_S, metadata=headers)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False
