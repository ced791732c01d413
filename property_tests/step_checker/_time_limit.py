"""A time limit for code that may hang."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["time_limit"]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` inside the ``with`` block when it takes longer than ``seconds``.

    By SIGALRM, so it works in the main thread of a Unix process and has no effect elsewhere; a
    timer that was running goes on afterwards. Code that waits in C without returning to Python
    is interrupted when it returns.

    Examples:
        >>> with time_limit(0.01):
        ...     time.sleep(1)
        Traceback (most recent call last):
            ...
        TimeoutError: took longer than 0.01 s
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def expire(signum: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    start = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = max(left - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
