import os
import pathlib
import subprocess
import tempfile
import unittest


class Rotate(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.top = pathlib.Path(holder.name)
        self.folder = self.top / "my backups"
        self.folder.mkdir()

    def backups(self, *names):
        for age, name in enumerate(names):
            path = self.folder / f"{name}.tar.gz"
            path.write_text("x")
            os.utime(path, (10**9 - age, 10**9 - age))

    def left(self):
        return sorted(path.name.removesuffix(".tar.gz") for path in self.folder.iterdir())

    def rotate(self, *words, cwd=None):
        script = str(pathlib.Path("rotate.sh").resolve())
        return subprocess.run(["bash", script, *words], capture_output=True, text=True, timeout=5, cwd=cwd)

    def test_dates_in_names(self):
        self.backups("db-20261101", "db-20251231", "db-20261103", "db-20261102")
        done = self.rotate(str(self.folder), "2")
        self.assertEqual((done.returncode, done.stdout), (0, "deleted db-20251231.tar.gz\ndeleted db-20261101.tar.gz\n"))
        self.assertEqual(self.left(), ["db-20261102", "db-20261103"])

    def test_each_name(self):
        self.backups("web-20261101", "web-2-20261101", "web-2-20261102", "a b-20261101", "a b-20261102", "a-20261102")
        done = self.rotate(str(self.folder), "1")
        self.assertEqual(done.stdout, "deleted a b-20261101.tar.gz\ndeleted web-2-20261101.tar.gz\n")
        self.assertEqual(self.left(), ["a b-20261102", "a-20261102", "web-2-20261102", "web-20261101"])

    def test_others_are_safe(self):
        self.backups("notes", "db-2026110", "x-2026110a", "db-202611011")
        (self.folder / "db-20261101.tar.gz").mkdir()
        (self.folder / "db-20261101.tar.gz.part").write_text("x")
        done = self.rotate(str(self.folder), "0")
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        self.assertEqual(len(self.left()), 6)

    def test_odd_names(self):
        (self.top / "outside").write_text("x")
        self.backups("-rf-20261101", "* -20261102", "'q'-20261101", "$(touch z)-20261101")
        self.assertEqual(self.rotate(str(self.folder), "0").returncode, 0)
        self.assertEqual(self.left(), [])
        self.assertTrue((self.top / "outside").exists())

    def test_empty(self):
        done = self.rotate(str(self.folder), "3")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_refused(self):
        self.backups("db-20261101")
        for words in (["x"], ["-1"], [""], ["1x"], []):
            done = self.rotate(str(self.folder), *words)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertTrue(done.stderr)
        for folder in (self.top / "none", self.folder / "db-20261101.tar.gz", ""):
            done = self.rotate(str(folder), "0", cwd=self.folder)
            self.assertEqual(done.returncode, 2)
            self.assertTrue(done.stderr)
        self.assertEqual(self.left(), ["db-20261101"])

    def test_eight(self):
        self.backups(*[f"db-202611{day:02}" for day in range(1, 11)])
        self.rotate(str(self.folder), "08")
        self.assertEqual(self.left()[0], "db-20261103")

    def test_dash(self):
        self.folder = self.top / "-x"
        self.folder.mkdir()
        self.backups("db-20261101")
        self.assertEqual(self.rotate("-x", "0", cwd=self.top).returncode, 0)
        self.assertEqual(self.left(), [])
