"""Where requests with a structured output wait until that is compiled, outside the scheduler.

    input thread --submit--> station --put--> inbox        compiled: the request goes its way
                 --abort---> |       --refuse-->           it cannot be
                             |       --end-->              aborted meanwhile

Each request leaves by exactly one of these. It compiles in threads of its own, and one description
once, however many requests of it wait. Whoever puts a request into the inbox holds the lock, and so
does `abort`: an abort that does not find its request here comes behind it in the inbox.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import RaywireError, RequestFailedError
from engine.grammar.checker import Checker
from engine.grammar.compiler import STACK_BYTES, Compiler, Grammar
from engine.request import Request
from engine.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""One description that takes its two seconds does not hold up the next."""


class Station:
    """Feeds one inbox. Threads and processes start with the first request that needs them.

    Args:
        compiler: of the model.
        put: hands a request on that is ready. Never blocks.
        refuse: ends one that cannot be served, with the error.
        end: ends one that was aborted.
    """

    def __init__(
        self,
        compiler: Compiler,
        *,
        put: Callable[[Request], None],
        refuse: Callable[[Request, RaywireError], None],
        end: Callable[[Request], None],
        make_checker: Callable[[], Checker] = Checker,
    ) -> None:
        self._compiler = compiler
        self._put = put
        self._refuse = refuse
        self._end = end
        self._make_checker = make_checker
        self._checkers: list[Checker] = []
        self._changed = threading.Condition()
        self._jobs: deque[StructuredOutput] = deque()
        self._waiting: dict[StructuredOutput, list[Request]] = {}
        """Of each description that is not compiled yet, whether or not anybody has begun."""
        self._is_closed = False

    def submit(self, request: Request) -> None:
        """Take over a prepared request, which has a structured output."""
        output = request.sampling_params.structured_output
        assert output is not None
        with self._changed:
            if (others := self._waiting.get(output)) is not None:
                others.append(request)
                return
            if not self._has_left(output, request):
                self._waiting[output] = [request]
                self._jobs.append(output)
                self._start_threads()
                self._changed.notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End those requests that wait here. Ids of others are not ours."""
        with self._changed:
            if not self._waiting:
                return
            wanted = set(request_ids)
            for output, requests in self._waiting.items():
                ended = [request for request in requests if request.request_id in wanted]
                if ended:
                    self._waiting[output] = [r for r in requests if r not in ended]
                    for request in ended:
                        self._end(request)

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def close(self) -> None:
        """End the processes. Requests that wait get nothing more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
            checkers = list(self._checkers)
        for checker in checkers:
            checker.kill()

    def _has_left(self, output: StructuredOutput, request: Request) -> bool:
        """Let `request` leave at once, if it is known what becomes of it."""
        try:
            result: Grammar | RaywireError | None = self._compiler.known(output)
        except RaywireError as error:
            result = error
        if result is None or request.num_tokens > request.num_prompt_tokens:
            return False  # to follow output that is there already may take long
        self._leave(request, _outcome(result, request))
        return True

    def _leave(self, request: Request, error: RaywireError | None) -> None:
        if error is None:
            self._put(request)
        else:
            self._refuse(request, error)

    def _start_threads(self) -> None:
        if self._checkers:
            return
        self._checkers = [self._make_checker() for _ in range(NUM_THREADS)]
        former = threading.stack_size(STACK_BYTES)
        try:
            for checker in self._checkers:
                threading.Thread(
                    target=self._run, args=(checker,), name="grammar", daemon=True
                ).start()
        finally:
            threading.stack_size(former)

    def _run(self, checker: Checker) -> None:
        """Compile what is asked for until the station is closed. Its thread lives as long as the
        process: the checker's process ends with it."""
        while (output := self._next_job()) is not None:
            result: Grammar | RaywireError
            try:
                result = self._compiler.compile(output, checker)
            except RaywireError as error:
                result = error
            except BaseException:
                logger.exception("a structured output could not be compiled")
                result = RequestFailedError("the structured output could not be compiled")
            self._finish(output, result)
        checker.close()

    def _next_job(self) -> StructuredOutput | None:
        with self._changed:
            while not self._is_closed:
                if not self._jobs:
                    self._changed.wait()
                elif self._waiting[output := self._jobs.popleft()]:
                    return output
                else:  # all who wanted it have gone
                    del self._waiting[output]
            return None

    def _finish(self, output: StructuredOutput, result: Grammar | RaywireError) -> None:
        """Let all requests of `output` leave, also those that still come meanwhile."""
        outcomes: dict[str, RaywireError | None] = {}
        while True:
            with self._changed:
                waiting = self._waiting.get(output, [])
                new = [r for r in waiting if r.request_id not in outcomes]
                if not new:
                    self._waiting.pop(output, None)
                    for request in waiting:
                        self._leave(request, outcomes[request.request_id])
                    return
            # Without the lock: to follow output that is there already may take long.
            for request in new:
                outcomes[request.request_id] = _outcome(result, request)


def _outcome(result: Grammar | RaywireError, request: Request) -> RaywireError | None:
    """Start `request`, or return why it cannot be."""
    if not isinstance(result, Grammar):
        return result
    try:
        result.start(request)
    except RaywireError as error:
        return error
    return None
