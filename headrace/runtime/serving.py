"""The thread that serves central inference, from before the actors ask until after the last of them has left."""

import threading
from collections.abc import Callable

from headrace.inference.central import InferenceServer

POLL_S = 0.2
"""How long a wait for requests lasts before it looks whether it is to hurry."""
JOIN_S = 5.0
"""How long the batch being served is waited for at the end."""


class Serving:
    """Serves ``server`` on a thread named ``inference``."""

    def __init__(
        self, server: InferenceServer, hurry: Callable[[], bool], failed: Callable[[BaseException], None]
    ) -> None:
        """Nothing runs before ``start``.

        Args:
            server: to be served.
            hurry: whether the actors settle, so that waiting for more requests gains nothing.
            failed: is told of the error that ended the thread.
        """
        self._server, self._hurry, self._failed = server, hurry, failed
        self._thread = threading.Thread(target=self._serve, name="inference", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; to be called when nobody asks any more. What is asked all the same ends with an error."""
        self._server.close()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _serve(self) -> None:
        try:
            while not self._server.closed:
                self._server.serve(POLL_S, self._hurry())
        except BaseException as error:  # whatever it is, the run must hear of it
            self._failed(error)
        finally:
            self._server.close()
