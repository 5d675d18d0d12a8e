import copy
import unittest

from layers import difference, effective


class Effective(unittest.TestCase):
    def test_rules(self):
        for old, patch, new in (
            ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
            ({"a": 1}, {"a": None}, {}),
            ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
            ({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}),
            ({"a": 5}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}),
            ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
            ({"a": {"b": 1}}, {}, {"a": {"b": 1}}),
            ({"a": {"b": 1}}, {"a": [None, {"x": None}]}, {"a": [None, {"x": None}]}),
            ([1], {"a": 1}, {"a": 1}),
            ({"a": 1}, 7, 7),
            ({"a": 1}, None, None),
        ):
            with self.subTest(patch):
                self.assertEqual(effective([old, patch]), new)

    def test_arguments_are_left_alone(self):
        documents = [{"a": {"b": [1]}, "k": {"l": 1}}, {"a": {"c": {"d": 1}}, "m": [{"n": 1}]}, {"k": {"l": None}}]
        before = copy.deepcopy(documents)
        result = effective(documents)
        result["a"]["b"].append(2)
        result["a"]["c"]["d"] = 2
        result["m"][0]["n"] = 2
        result["k"]["z"] = 1
        self.assertEqual(documents, before)

    def test_single(self):
        only = {"a": []}
        effective([only])["a"].append(1)
        self.assertEqual(only, {"a": []})


class Difference(unittest.TestCase):
    def test_small(self):
        for old, new, patch in (
            ({"a": 1, "b": 2}, {"a": 1}, {"b": None}),
            ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"c": 3}}),
            ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": None}}),
            ({"a": 1}, {"a": {}}, {"a": {}}),
            ({"a": {"b": {}}}, {"a": {"b": {}}}, {}),
            ({"a": [1, 2]}, {"a": [1, 3]}, {"a": [1, 3]}),
            ({}, {"a": {}}, {"a": {}}),
        ):
            with self.subTest(patch):
                self.assertEqual(difference(old, new), patch)
                self.assertEqual(effective([old, difference(old, new)]), new)

    def test_kinds_of_numbers(self):
        self.assertIs(difference({"a": 1}, {"a": True})["a"], True)
        self.assertIs(type(difference({"a": 1}, {"a": 1.0})["a"]), float)
        self.assertIs(difference({"a": [0]}, {"a": [False]})["a"][0], False)
        self.assertIs(difference({"a": [{"x": 0}]}, {"a": [{"x": False}]})["a"][0]["x"], False)
        self.assertEqual(difference({"a": [1, {"b": 1.5}]}, {"a": [1, {"b": 1.5}]}), {})
