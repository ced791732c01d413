"""The pytest plugin ``numden``: laws as tests, and reports instead of tracebacks.

It is active in each session of an environment that has numden (``-p no:numden`` turns it off), and
so costs next to nothing until it is used. Beside ``law_tests`` it gives

- the fixtures ``check_loss`` and ``check_step``, as the functions of these names;
- the options ``--numden-examples`` and ``--numden-seed``, which override what tests say;
- of a check that fails, the report in a section of its own.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["law_tests"]


def law_tests(
    *, params: Any, batches: Any, laws: Sequence[str] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turn a loss function into tests, one for each law: ``test_loss[additivity]`` and so on.

    A law that does not apply, or that needs an option which is not given, is skipped with the
    reason. pytest collects the tests by the name that they are given, so let it begin with
    ``test``. The loss function itself is the attribute ``loss_fn``.

    Args:
        params: a pytree of tensors or an ``nn.Module``, or a function without arguments that makes
            them, called once for each law.
        batches: batches or a strategy for them, as of ``report_loss``, or a function that makes
            them.
        laws: names of laws; all if not given.
        options: further options of ``report_loss``, such as ``pad_row`` and ``exact``.

    Examples:
        >>> import torch
        >>> from numden.pure import LossTerms
        >>> batch = {"x": torch.tensor([8.0, 2.0])}
        >>> @law_tests(params=torch.tensor(1.0), batches=[batch])
        ... def test_my_loss(w, batch):
        ...     return LossTerms((w * batch["x"]).sum(), batch["x"].numel())
        >>> test_my_loss.pytestmark[0].args[1][:2]
        ['additivity', 'permutation']
    """

    def as_tests(loss_fn: Callable[..., Any]) -> Callable[..., None]:
        import pytest

        from .loss_checker.trials import LAWS

        @pytest.mark.parametrize("law", list(laws or LAWS))
        def test(law: str, request: pytest.FixtureRequest) -> None:
            given = options | given_options(request.config)
            _try_law(law, loss_fn, params, batches, given)

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(loss_fn, name, None))
        # ``place_as`` is where pytest says that the test is.
        vars(test).update(loss_fn=loss_fn, place_as=loss_fn)
        return test

    return as_tests


def given_options(config: "pytest.Config") -> dict[str, Any]:
    """The options of a check that the command line of pytest gives."""
    given = {
        "max_examples": config.getoption("--numden-examples", None),
        "seed": config.getoption("--numden-seed", None),
    }
    return {name: value for name, value in given.items() if value is not None}


def pytest_addoption(parser: "pytest.Parser", pluginmanager: "pytest.PytestPluginManager") -> None:
    """Add the options, and what needs pytest itself to be defined."""
    from . import _plugin_hooks

    group = parser.getgroup("numden", "numden: laws of loss functions and training steps")
    group.addoption("--numden-examples", type=int, metavar="N", help="how many examples to draw")
    group.addoption("--numden-seed", type=int, metavar="N", help="of every draw")
    pluginmanager.register(_plugin_hooks, "numden_hooks")


def _try_law(
    law: str, loss_fn: Callable[..., Any], params: Any, batches: Any, options: dict[str, Any]
) -> None:
    import pytest

    from ._targets import made
    from .loss_checker.check import report_loss

    report = report_loss(loss_fn, made(params), made(batches), laws=[law], **options).require()
    if all(verdict.status == "skipped" for verdict in report.verdicts):
        pytest.skip("; ".join(verdict.words for verdict in report.verdicts))
