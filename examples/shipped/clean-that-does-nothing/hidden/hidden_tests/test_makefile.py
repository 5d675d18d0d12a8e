import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest


class Makefile(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        shutil.copytree(".", self.folder, dirs_exist_ok=True)
        for folder in ("clean", "test", "all"):
            os.makedirs(os.path.join(self.folder, folder), exist_ok=True)
        self.greet = pathlib.Path(self.folder, "greet")
        for old in ("greet", "greet.o"):
            pathlib.Path(self.folder, old).unlink(missing_ok=True)

    def make(self, *words):
        clean = {key: value for key, value in os.environ.items() if key not in ("CFLAGS", "NAME", "MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(["make", *words], cwd=self.folder, capture_output=True, text=True, timeout=9, env=clean)

    def test_default(self):
        self.assertEqual(self.make().returncode, 0)
        self.assertTrue(self.greet.exists())

    def test_all(self):
        self.assertEqual(self.make("all").returncode, 0)
        self.assertTrue(self.greet.exists())

    def test_clean(self):
        self.make("greet")
        self.assertEqual(self.make("clean").returncode, 0)
        self.assertFalse(self.greet.exists())
        self.assertEqual(self.make("clean").returncode, 0)
        self.assertTrue(pathlib.Path(self.folder, "clean").is_dir())

    def test_test(self):
        done = self.make("test")
        self.assertEqual(done.returncode, 0)
        self.assertIn("Hello, World!", done.stdout.splitlines())
        done = self.make("test")
        self.assertIn("Hello, World!", done.stdout.splitlines())

    def test_name(self):
        done = self.make("NAME=Bo", "test")
        self.assertEqual(done.returncode, 0)
        self.assertIn("Hello, Bo!", done.stdout.splitlines())

    def test_wrong_greeting(self):
        source = pathlib.Path(self.folder, "greet.c")
        source.write_text(source.read_text().replace("Hello", "Hullo"))
        self.assertNotEqual(self.make("test").returncode, 0)

    def test_flags(self):
        self.assertIn("-DODD_FLAG", self.make("CFLAGS=-DODD_FLAG", "greet").stdout)
