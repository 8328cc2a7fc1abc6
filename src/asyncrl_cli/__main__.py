"""`python -m asyncrl_cli`: the same as `asyncrl`."""

from __future__ import annotations

from asyncrl_cli.cli.app import main

if __name__ == "__main__":
    main()
