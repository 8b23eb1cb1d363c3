"""Where the script calls the guard: what another attempt would only meet again ends the job, and not the attempt."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.attach import refuse

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refusing(act: Callable[_P, _T]) -> Callable[_P, _T]:
    """`act`, with such an error as a refusal. Other ranks may wait for this one."""

    @functools.wraps(act)
    def refusing_act(*given: _P.args, **others: _P.kwargs) -> _T:
        try:
            return act(*given, **others)
        except (UsageError, RunDoesNotFit) as error:
            refuse(error, status=1)

    return refusing_act
