import faulthandler
import gc
import threading
import time
import unittest
import weakref

from pool import Cancelled, Pool

faulthandler.dump_traceback_later(9, exit=True)


def fail(error):
    raise error


def in_thread(function):
    """Start a thread; return it and the list which gets what happened."""
    happened = []

    def run():
        try:
            happened.append(function())
        except BaseException as error:
            happened.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, happened


class Pools(unittest.TestCase):
    def setUp(self):
        self.gate = threading.Event()
        self.addCleanup(self.gate.set)

    def blocked(self, workers=1, room=1):
        pool = Pool(workers, room)
        started = threading.Semaphore(0)
        for _ in range(workers):
            pool.submit(lambda: (started.release(), self.gate.wait(5)))
        for _ in range(workers):
            self.assertTrue(started.acquire(timeout=2))
        return pool

    def test_errors(self):
        pool = Pool(2, 10)
        results = [pool.submit(fail, error) for error in (KeyError(1), SystemExit(), KeyboardInterrupt(), ValueError())]
        for result, kind in zip(results, (KeyError, SystemExit, KeyboardInterrupt, ValueError)):
            with self.assertRaises(kind):
                result.get(2)
        self.assertEqual(pool.submit(pow, 2, 3).get(2), 8)

    def test_timeout(self):
        pool = self.blocked()
        result = pool.submit(pow, 2, 2)
        with self.assertRaises(TimeoutError):
            result.get(timeout=0.05)
        with self.assertRaises(TimeoutError):
            result.get(timeout=0)
        self.gate.set()
        self.assertEqual(result.get(2), 4)

    def test_close_finishes(self):
        pool = Pool(2, 100)
        done = []
        for n in range(20):
            pool.submit(lambda n=n: (time.sleep(0.01), done.append(n)))
        before = threading.active_count()
        pool.close()
        self.assertEqual(sorted(done), list(range(20)))
        self.assertEqual(threading.active_count(), before - 2)
        with self.assertRaises(RuntimeError):
            pool.submit(pow, 1, 1)
        pool.close()

    def test_close_of_an_idle_pool(self):
        pool = Pool(3, 1)
        thread, happened = in_thread(pool.close)
        thread.join(2)
        self.assertEqual(happened, [None])

    def test_close_wakes_submit(self):
        pool = self.blocked()
        waiting = pool.submit(pow, 3, 2)
        late, refused = in_thread(lambda: pool.submit(pow, 1, 1))
        time.sleep(0.1)
        self.assertEqual(refused, [])
        closers = [in_thread(pool.close) for _ in range(2)]
        late.join(2)
        self.assertIsInstance(refused[0], RuntimeError)
        self.assertEqual([happened for _, happened in closers], [[], []])
        self.gate.set()
        self.assertEqual(waiting.get(2), 9)
        for thread, happened in closers:
            thread.join(2)
            self.assertEqual(happened, [None])

    def test_close_inside(self):
        pool = Pool(2, 5)
        self.assertIsNone(pool.submit(pool.close).get(2))
        with self.assertRaises(RuntimeError):
            pool.submit(pow, 1, 1)

    def test_room(self):
        pool = self.blocked(2, 2)
        pool.submit(pow, 1, 1)
        pool.submit(pow, 1, 1)
        thread, happened = in_thread(lambda: pool.submit(pow, 2, 2).get(2))
        time.sleep(0.1)
        self.assertEqual(happened, [])
        self.gate.set()
        thread.join(2)
        self.assertEqual(happened, [4])

    def test_cancel(self):
        pool = self.blocked()
        ran = []
        result = pool.submit(ran.append, 1)
        self.assertTrue(result.cancel())
        with self.assertRaises(Cancelled):
            result.get(1)
        thread, happened = in_thread(lambda: pool.submit(pow, 2, 2))
        thread.join(1)
        self.assertEqual(len(happened), 1)  # there was room at once
        self.gate.set()
        self.assertEqual(happened[0].get(2), 4)
        self.assertFalse(happened[0].cancel())
        pool.close()
        self.assertEqual(ran, [])

    def test_cancel_wakes_submit(self):
        pool = self.blocked()
        result = pool.submit(pow, 1, 1)
        thread, happened = in_thread(lambda: pool.submit(pow, 2, 2))
        time.sleep(0.05)
        self.assertTrue(result.cancel())
        thread.join(1)
        self.assertEqual(len(happened), 1)

    def test_cancel_while_running(self):
        pool = Pool(1, 1)
        started = threading.Event()
        result = pool.submit(lambda: (started.set(), self.gate.wait(5), 7)[-1])
        self.assertTrue(started.wait(2))
        self.assertFalse(result.cancel())
        self.gate.set()
        self.assertEqual(result.get(2), 7)

    def test_memory(self):
        class Big:
            pass

        pool = Pool(1, 1)
        big = Big()
        seen = weakref.ref(big)
        result = pool.submit(lambda thing: thing, big)
        result.get(2)
        del result, big
        for _ in range(40):
            gc.collect()
            if seen() is None:
                break
            time.sleep(0.02)
        self.assertIsNone(seen())
