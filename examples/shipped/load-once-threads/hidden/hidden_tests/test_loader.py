import faulthandler
import threading
import time
import unittest

from loader import Circular, Loader

faulthandler.dump_traceback_later(9, exit=True)


class Threads:
    """Threads and what happened in them."""

    def __init__(self):
        self.threads = []
        self.results = []

    def start(self, function, *args, **named):
        def run():
            try:
                self.results.append(function(*args, **named))
            except Exception as error:
                self.results.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def all(self, seconds=2):
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a thread hangs"
        return self.results


class Loading(unittest.TestCase):
    def setUp(self):
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)
        self.calls = []
        self.addCleanup(self.gate.set)

    def slow(self, key):
        self.calls.append(key)
        number = len(self.calls)
        self.started.release()
        if key != "quick":
            self.gate.wait(5)
        return (key, number)

    def test_once(self):
        loader, threads = Loader(self.slow), Threads()
        for _ in range(20):
            threads.start(loader.get, "a")
        time.sleep(0.1)
        self.gate.set()
        self.assertEqual(threads.all(), [("a", 1)] * 20)

    def test_falsy_values(self):
        loader = Loader(lambda key: self.calls.append(key))
        self.assertEqual([loader.get(1), loader.get(1), self.calls], [None, None, [1]])

    def test_other_keys(self):
        loader, threads = Loader(self.slow), Threads()
        threads.start(loader.get, "a")
        self.started.acquire(timeout=2)
        others = Threads()
        others.start(loader.get, "quick")
        others.all(1)
        others.start(loader.get, "quick")
        others.all(1)

    def test_errors(self):
        def load(key):
            self.slow(key)
            raise KeyError(key)

        loader, threads = Loader(load), Threads()
        for _ in range(5):
            threads.start(loader.get, "a")
        time.sleep(0.1)
        self.gate.set()
        self.assertEqual([type(result) for result in threads.all()], [KeyError] * 5)
        self.assertEqual(self.calls, ["a"])
        with self.assertRaises(KeyError):
            loader.get("a")
        self.assertEqual(len(self.calls), 2)

    def test_forget_while_loading(self):
        loader, early, late = Loader(self.slow), Threads(), Threads()
        early.start(loader.get, "a")
        self.assertTrue(self.started.acquire(timeout=2))
        loader.forget("a")
        late.start(loader.get, "a")
        self.assertTrue(self.started.acquire(timeout=2))
        self.gate.set()
        early.all()
        self.assertEqual(late.all(), [("a", 2)])
        self.assertEqual(loader.get("a"), ("a", 2))
        loader.forget("a")
        self.assertEqual(loader.get("a"), ("a", 3))

    def test_own_key(self):
        loader = Loader(lambda key: loader.get(key))
        threads = Threads()
        threads.start(loader.get, "a")
        self.assertIsInstance(threads.all()[0], Circular)

    def test_circle_of_one_thread(self):
        loader = Loader(lambda key: loader.get({"a": "b", "b": "c", "c": "a"}[key]))
        threads = Threads()
        threads.start(loader.get, "a")
        self.assertIsInstance(threads.all()[0], Circular)
        threads.start(loader.get, "c")
        self.assertIsInstance(threads.all()[1], Circular)

    def test_circle_of_threads(self):
        for count in (2, 3):
            barrier = threading.Barrier(count)
            keys = list(range(count))

            def load(key):
                barrier.wait(2)
                return loader.get((key + 1) % count)

            loader, threads = Loader(load), Threads()
            for key in keys:
                threads.start(loader.get, key)
            self.assertTrue(any(isinstance(result, Circular) for result in threads.all()))

    def test_shared_need(self):
        def load(key):
            if key == "base":
                return self.slow(key)
            return (key, loader.get("base"))

        loader, threads = Loader(load), Threads()
        for key in "ab":
            threads.start(loader.get, key)
        time.sleep(0.1)
        self.gate.set()
        self.assertEqual(sorted(threads.all()), [("a", ("base", 1)), ("b", ("base", 1))])

    def test_timeout(self):
        loader, threads, waiting = Loader(self.slow), Threads(), Threads()
        threads.start(loader.get, "a")
        self.started.acquire(timeout=2)
        waiting.start(loader.get, "a", timeout=0.05)
        self.assertIsInstance(waiting.all()[0], TimeoutError)
        self.gate.set()
        self.assertEqual(threads.all(), [("a", 1)])
        self.assertEqual(loader.get("a", timeout=0), ("a", 1))

    def test_no_circle_after_a_timeout(self):
        # a waited for b, gave up, and now b may wait for a
        def load(key):
            self.started.release()
            if key == "a":
                try:
                    loader.get("b", timeout=0.05)
                except TimeoutError:
                    self.gate.wait(2)
                return "A"
            time.sleep(0.3)
            threading.Timer(0.1, self.gate.set).start()
            return loader.get("a") + "B"

        loader, threads = Loader(load), Threads()
        threads.start(loader.get, "b")
        self.started.acquire(timeout=2)
        threads.start(loader.get, "a")
        self.assertEqual(sorted(threads.all(3)), ["A", "AB"])
