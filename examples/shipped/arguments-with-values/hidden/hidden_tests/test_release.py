import subprocess
import unittest


def run(*words):
    return subprocess.run(["bash", "release.sh", *words], capture_output=True, text=True, timeout=2)


def settings(*words):
    done = run(*words)
    assert done.returncode == 0, done.stderr
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    return {key: value for key, value in lines if key != "file"}, [value for key, value in lines if key == "file"]


class Release(unittest.TestCase):
    def test_values(self):
        for words in (["--tag", "v1", "--note", "two  words"], ["--tag=v1", "--note=two  words"]):
            self.assertEqual(settings(*words)[0], {"tag": "v1", "note": "two  words", "dry": "no", "quiet": "no"})

    def test_odd_values(self):
        self.assertEqual(settings("--note", "")[0]["note"], "")
        self.assertEqual(settings("--note=")[0]["note"], "")
        self.assertEqual(settings("--note=a=b")[0]["note"], "a=b")
        self.assertEqual(settings("--note", "--tag")[0]["note"], "--tag")
        self.assertEqual(settings("--note", "*")[0]["note"], "*")

    def test_files(self):
        found, files = settings("a b.txt", "-n", "*", "--", "-q", "--tag", "--")
        self.assertEqual(files, ["a b.txt", "*", "-q", "--tag", "--"])
        self.assertEqual((found["dry"], found["quiet"], found["tag"]), ("yes", "no", "none"))
        self.assertEqual(settings("-")[1], ["-"])

    def test_joined(self):
        found, files = settings("-nq", "x")
        self.assertEqual((found["dry"], found["quiet"], files), ("yes", "yes", ["x"]))

    def test_unknown(self):
        for words, name in ((["--what"], "--what"), (["-nx"], "-x"), (["-x"], "-x")):
            done = run(*words)
            self.assertEqual((done.returncode, done.stderr.strip()), (2, f"unknown option: {name}"))
            self.assertEqual(done.stdout, "")

    def test_missing_value(self):
        for name in ("--tag", "--note"):
            done = run("a", name)
            self.assertEqual((done.returncode, done.stderr.strip(), done.stdout), (2, f"{name} needs a value", ""))
