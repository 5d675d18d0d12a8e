import unittest

from free_slots.agenda import parse_meeting
from free_slots.intervals import free_slots, merge

NINE_TO_FIVE = (9 * 60, 17 * 60)


def busy(*lines):
    return [parse_meeting(line).interval for line in lines]


class MergeTest(unittest.TestCase):
    def test_joins_what_overlaps_or_touches(self):
        self.assertEqual(merge([(5, 9), (1, 3), (3, 6)]), [(1, 9)])

    def test_keeps_what_is_apart(self):
        self.assertEqual(merge([(7, 9), (1, 3)]), [(1, 3), (7, 9)])


class FreeSlotsTest(unittest.TestCase):
    def test_a_day_without_meetings_is_free(self):
        self.assertEqual(free_slots([], NINE_TO_FIVE), [NINE_TO_FIVE])

    def test_finds_the_gaps_of_the_day(self):
        meetings = busy("08:30-09:30 breakfast", "11:00-12:00 review", "12:10-17:30 workshop")
        self.assertEqual(free_slots(meetings, NINE_TO_FIVE), [(9 * 60 + 30, 11 * 60)])

    def test_a_short_meeting_inside_a_long_one_frees_nobody(self):
        meetings = busy("09:00-12:00 workshop", "10:00-10:30 phone call")
        self.assertEqual(free_slots(meetings, NINE_TO_FIVE), [(12 * 60, 17 * 60)])


class AgendaTest(unittest.TestCase):
    def test_reads_a_line(self):
        meeting = parse_meeting("09:00-09:30  stand-up\n")
        self.assertEqual((meeting.interval, meeting.title), ((540, 570), "stand-up"))

    def test_refuses_a_meeting_that_ends_before_it_starts(self):
        with self.assertRaises(ValueError):
            parse_meeting("10:00-09:00 time travel")
