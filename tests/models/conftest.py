from tests.builtin.conftest import built, task

__all__ = ["built", "task"]
