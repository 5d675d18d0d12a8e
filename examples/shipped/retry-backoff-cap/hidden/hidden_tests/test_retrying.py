import unittest

from policy import Policy
from retrying import call


class Flaky:
    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class Busy(OSError):
    def __init__(self, retry_after):
        super().__init__("busy")
        self.retry_after = retry_after


class Retrying(unittest.TestCase):
    def setUp(self):
        self.slept = []

    def test_third_attempt(self):
        flaky = Flaky(OSError(1), OSError(2))
        self.assertEqual(call(flaky, Policy(attempts=3, first=1), self.slept.append), "done")
        self.assertEqual(self.slept, [1, 2])

    def test_last_error(self):
        last = OSError("last")
        with self.assertRaises(OSError) as caught:
            call(Flaky(OSError(1), OSError(2), last), Policy(attempts=3, first=1), self.slept.append)
        self.assertIs(caught.exception, last)
        self.assertEqual(self.slept, [1, 2])

    def test_longest(self):
        call(Flaky(*[OSError()] * 5), Policy(attempts=6, first=1, longest=3), self.slept.append)
        self.assertEqual(self.slept, [1, 2, 3, 3, 3])

    def test_first_is_longer_than_longest(self):
        call(Flaky(OSError()), Policy(first=9, longest=3), self.slept.append)
        self.assertEqual(self.slept, [3])

    def test_once(self):
        flaky = Flaky(OSError())
        with self.assertRaises(OSError):
            call(flaky, Policy(attempts=1), self.slept.append)
        self.assertEqual((flaky.calls, self.slept), (1, []))

    def test_other_errors_pass(self):
        for error in (KeyboardInterrupt(), ValueError()):
            flaky = Flaky(error)
            with self.assertRaises(type(error)):
                call(flaky, Policy(), self.slept.append)
            self.assertEqual((flaky.calls, self.slept), (1, []))

    def test_retry_after(self):
        call(Flaky(Busy(30), Busy(0.1), Busy(None)), Policy(first=1, longest=3), self.slept.append)
        self.assertEqual(self.slept, [30, 2, 3])
