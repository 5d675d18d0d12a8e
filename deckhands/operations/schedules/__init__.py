"""Schedules: recurring tasks, as values and in the store.

Start with: schedule.
"""
