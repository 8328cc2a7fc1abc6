"""Shell completion: `asyncrl completion SHELL` prints a script, which calls the functions of this module.

Typer drops suggestions that do not begin with the incomplete word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

EXAMPLES = """
  eval "$(asyncrl completion bash)"      in ~/.bashrc
  eval "$(asyncrl completion zsh)"       in ~/.zshrc, after compinit

Completes commands, options, profiles (also after a +), runs, templates, and
the keys and values of --set."""
VARIABLE = "_ASYNCRL_COMPLETE"
"""The scripts set this variable; its value tells Typer what to do."""
BASH = """\
_asyncrl() {
    local line="${COMP_LINE:0:COMP_POINT}" words cword
    local word="${line##* }"
    IFS=' ' read -ra words <<< "$line"
    cword=$(( ${#words[@]} - (${#word} > 0) ))
    local IFS=$'\\n'
    COMPREPLY=( $(COMP_WORDS="$line" COMP_CWORD=$cword _ASYNCRL_COMPLETE=complete_bash "$1" 2>/dev/null) )
    # Bash takes "=" for the end of a word, and replaces only what follows it.
    [[ $word == *=* ]] && COMPREPLY=( "${COMPREPLY[@]#"${word%%=*}="}" )
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -F _asyncrl asyncrl
"""
ZSH = """\
_asyncrl() {
    local -a found
    local -x COMP_WORDS="${words[1,CURRENT]}" COMP_CWORD=$(( CURRENT - 1 )) _ASYNCRL_COMPLETE=complete_bash
    found=( ${(f)"$("$words[1]" 2>/dev/null)"} )
    (( $#found )) || { _files; return }
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
}
compdef _asyncrl asyncrl
"""


def completion(
    shell: Annotated[
        Literal["bash", "zsh"],
        typer.Argument(metavar="bash|zsh", help="The shell that will evaluate the script."),
    ],
) -> None:
    """Print a script that makes the shell complete asyncrl's commands, profiles, runs and keys."""
    typer.echo(BASH if shell == "bash" else ZSH, nl=False)


def make_ready(environ: Mapping[str, str]) -> None:
    """If a shell asks for completions, register the shells with Typer."""
    if VARIABLE in environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def profiles(incomplete: str) -> list[str]:
    """Shipped profiles; after the `+` of `A+B`, those that may be laid over A."""
    from asyncrl_cli.profile.toml_files import shipped_profiles

    below, plus, _ = incomplete.rpartition("+")
    return [f"{below}{plus}{name}" for name in shipped_profiles()]


def runs(context: typer.Context) -> list[str]:
    """The runs in `--runs-dir`, newest first."""
    from asyncrl_cli.checkpoint.lookup import run_names

    return run_names(Path(context.params.get("runs_dir") or "runs"))


def workloads() -> list[str]:
    from asyncrl_cli.profile.toml_files import shipped_workloads

    return list(shipped_workloads())


def templates() -> list[str]:
    from asyncrl_cli.profile.toml_files import shipped_templates

    return list(shipped_templates())


def sets(incomplete: str) -> list[str]:
    """`section.key=`, and after the `=` the key's values if it has a fixed list of them."""
    from asyncrl_cli.profile.keys import keys
    from asyncrl_cli.profile.validation import choices

    key, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in keys()]
    return [f"{key}={choice}" for choice in choices(key)] if key in keys() else []


def sections() -> list[str]:
    from asyncrl_cli.profile import keys

    return [*keys.sections(), *keys.keys()]
