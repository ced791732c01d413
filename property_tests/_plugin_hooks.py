"""The part of the pytest plugin that is made with pytest: fixtures and the failure section."""

import sys
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from . import plugin

__all__ = ["check_loss", "check_step", "pytest_runtest_makereport"]

_WIDTH = 100


@pytest.fixture(scope="session")
def check_loss(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``numden.property_tests.check_loss`` with the options of the command line."""
    from .loss_checker.check import check_loss

    return _with_options(check_loss, request)


@pytest.fixture(scope="session")
def check_step(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``numden.property_tests.check_step`` with the options of the command line."""
    from .step_checker.check import check_step

    return _with_options(check_step, request)


def _with_options(check: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., Any]:
    given = plugin.given_options(request.config)
    return lambda *args, **options: check(*args, **options | given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the report of a failed check in place of a traceback through the checker.

    A law that is skipped is so at the test, not in here.
    """
    report = yield
    if isinstance(report.longrepr, tuple) and report.longrepr[0] == plugin.__file__:
        report.longrepr = (*_place_of(item), report.longrepr[2])
    # A check that failed has imported this; other sessions need not.
    checker = sys.modules.get(f"{__package__}.reports.report")
    if (
        checker
        and report.failed
        and call.excinfo
        and call.excinfo.errisinstance(checker.CheckFailed)
    ):
        from .reports._layout import headline
        from .reports.rendering import as_text

        error: Any = call.excinfo.value
        width = min(_WIDTH, item.config.get_terminal_writer().fullwidth)
        report.sections.append(("numden", as_text(error.report, width=width)))
        shown: Any = _Headline(_place(item, call.excinfo), headline(error.report))
        report.longrepr = shown
    return report


def _place(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> tuple[str, int]:
    """File and line of the last frame in the test's file, or of the test."""
    path, line = _place_of(item)
    own = [entry for entry in excinfo.traceback if str(entry.path) == str(item.path)]
    return (path, own[-1].lineno + 1) if own else (path, line)


def _place_of(item: pytest.Item) -> tuple[str, int]:
    path, line, _ = item.location
    return path, (line or 0) + 1


class _Headline:
    """What pytest prints of a failure, here and in its summary."""

    def __init__(self, place: tuple[str, int], text: str):
        path, line = place
        # The name and fields by which pytest finds a line for the summary.
        self.reprcrash = SimpleNamespace(path=path, lineno=line, message=text)

    def __str__(self) -> str:
        crash = self.reprcrash
        return f"{crash.path}:{crash.lineno}: {crash.message}"

    def toterminal(self, tw: Any) -> None:
        tw.line(str(self), red=True, bold=True)
