import unittest
from datetime import date

from billing_dates.months import add_months
from billing_dates.plans import Subscription


class AddMonthsTest(unittest.TestCase):
    def test_moves_over_the_end_of_the_year(self):
        self.assertEqual(add_months(date(2023, 11, 15), 3), date(2024, 2, 15))

    def test_stops_at_the_last_day_of_a_short_month(self):
        self.assertEqual(add_months(date(2024, 1, 31), 1), date(2024, 2, 29))


class SubscriptionTest(unittest.TestCase):
    def test_is_charged_on_the_same_day_of_each_period(self):
        charges = Subscription(date(2024, 1, 15), months=3).charges(count=3)
        self.assertEqual(charges, [date(2024, 1, 15), date(2024, 4, 15), date(2024, 7, 15)])

    def test_returns_to_its_day_after_a_short_month(self):
        charges = Subscription(date(2023, 1, 31)).charges(count=4)
        self.assertEqual(charges, [date(2023, 1, 31), date(2023, 2, 28), date(2023, 3, 31), date(2023, 4, 30)])

    def test_next_charge_is_after_today(self):
        subscription = Subscription(date(2024, 1, 15))
        self.assertEqual(subscription.next_charge(date(2024, 3, 15)), date(2024, 4, 15))

    def test_next_charge_returns_to_its_day_too(self):
        subscription = Subscription(date(2022, 12, 31))
        self.assertEqual(subscription.next_charge(date(2023, 4, 30)), date(2023, 5, 31))

    def test_a_cancelled_subscription_is_charged_no_more(self):
        subscription = Subscription(date(2024, 1, 15), cancelled=date(2024, 3, 1))
        self.assertEqual(len(subscription.charges(count=12)), 2)
        self.assertIsNone(subscription.next_charge(date(2024, 2, 15)))
