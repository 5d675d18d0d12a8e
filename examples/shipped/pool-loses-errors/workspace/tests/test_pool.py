import unittest

from pool import Pool


class Simple(unittest.TestCase):
    def test_results(self):
        pool = Pool(2, 10)
        results = [pool.submit(pow, n, 2) for n in range(5)]
        self.assertEqual([result.get(2) for result in results], [0, 1, 4, 9, 16])
