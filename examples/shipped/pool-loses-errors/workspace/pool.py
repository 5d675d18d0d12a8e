"""A small pool of threads."""

import queue
import threading

from result import Cancelled, Result

__all__ = ["Cancelled", "Pool"]


class Pool:
    """Run functions in threads, in the order in which they were submitted."""

    def __init__(self, workers, room):
        self.queue = queue.Queue(room)
        self.closed = False
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(workers)]
        for thread in self.threads:
            thread.start()

    def submit(self, function, *args):
        """Queue a function and return its result-to-be; wait while the queue is full."""
        if self.closed:
            raise RuntimeError("the pool is closed")
        result = Result()
        self.queue.put((result, function, args))
        return result

    def work(self):
        while not self.closed:
            result, function, args = self.queue.get()
            result.set(function(*args))

    def close(self):
        """Refuse new functions and wait for the others."""
        self.closed = True
