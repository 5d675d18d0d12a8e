import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

UNITS = "#define PER_METRE 100\nint centimetres(int metres);\n"


class Build(unittest.TestCase):
    def setUp(self):
        self.top = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.top)
        for name in ("Makefile", "src", "include"):
            (shutil.copytree if os.path.isdir(name) else shutil.copy)(name, self.top / name)
        for path in self.top.rglob("*"):
            os.utime(path, (time.time() - 100,) * 2)

    def make(self, *words):
        env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "CFLAGS"}
        return subprocess.run(["make", *words], cwd=self.top, capture_output=True, text=True, timeout=9, env=env)

    def built(self, *words):
        done = self.make(*words)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for path in self.top.rglob("*"):  # what is there now is older than what tests write next
            os.utime(path, (path.stat().st_mtime - 50,) * 2)
        return done.stdout

    def says(self, program):
        return subprocess.run([self.top / "bin" / program], capture_output=True, text=True, check=True).stdout.strip()

    def write(self, name, text):
        (self.top / name).write_text(text)

    def test_fresh_and_parallel(self):
        self.built("-j4")
        self.assertEqual((self.says("area"), self.says("name")), ("90000", "square"))

    def test_nothing_to_do(self):
        self.built()
        self.assertNotIn("-o", self.built())

    def test_indirect_header(self):
        self.built()
        self.write("include/units.h", UNITS.replace("100", "10"))
        output = self.built()
        self.assertEqual(self.says("area"), "900")
        self.assertNotIn("name.c", output)

    def test_other_header(self):
        self.built()
        self.write("include/name.h", '#define NAME "circle"\n')
        output = self.built()
        self.assertEqual(self.says("name"), "circle")
        self.assertNotIn("area.c", output)

    def test_removed_header(self):
        self.built()
        (self.top / "include/shape.h").unlink()
        source = (self.top / "src/area.c").read_text().replace("shape.h", "units.h").replace("SIDE", "4")
        self.write("src/area.c", source)
        self.built()
        self.assertEqual(self.says("area"), "160000")

    def test_new_part(self):
        self.built()
        self.write("src/x_new.c", "int extra(void) { return 7; }\n")
        self.built()
        self.write("src/name.c", '#include <stdio.h>\nint extra(void);\nint main(void) { printf("%d\\n", extra()); return 0; }\n')
        self.built("-j4")
        self.assertEqual(self.says("name"), "7")

    def test_new_part_leads_to_linking(self):
        self.built()
        self.write("src/x_new.c", "int extra(void) { return 7; }\n")
        self.assertIn("bin/area", self.built())

    def test_error(self):
        self.built()
        self.write("src/area.c", "int main(void) { return x; }\n")
        self.assertNotEqual(self.make().returncode, 0)

    def test_clean(self):
        self.built()
        self.built("clean")
        self.assertFalse((self.top / "build").exists() or (self.top / "bin").exists())
