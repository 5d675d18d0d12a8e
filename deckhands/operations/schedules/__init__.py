"""Schedules: tasks that are begun again and again, as values and as the store keeps them.

Start with: schedule.
"""
