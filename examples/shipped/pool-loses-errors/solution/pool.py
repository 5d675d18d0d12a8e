"""A small pool of threads."""

import threading
from collections import deque

from result import Cancelled, Result

__all__ = ["Cancelled", "Pool"]


class Pool:
    """Run functions in threads, in the order in which they were submitted."""

    def __init__(self, workers, room):
        self.room = room
        self.waiting = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.threads = [threading.Thread(target=self.work, daemon=True) for _ in range(workers)]
        for thread in self.threads:
            thread.start()

    def submit(self, function, *args):
        """Queue a function and return its result-to-be; wait while the queue is full."""
        result = Result(self.drop)
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.waiting) < self.room)
            if self.closed:
                raise RuntimeError("the pool is closed")
            self.waiting.append((result, function, args))
            self.changed.notify_all()
        return result

    def drop(self, result):
        """Take a function out of the queue; return whether it was still there."""
        with self.changed:
            for entry in self.waiting:
                if entry[0] is result:
                    self.waiting.remove(entry)
                    self.changed.notify_all()
                    return True
        return False

    def work(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.waiting)
                if not self.waiting:
                    return
                result, function, args = self.waiting.popleft()
                self.changed.notify_all()
            result.run(function, args)
            del result, function, args

    def close(self):
        """Refuse new functions and wait for the others."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
