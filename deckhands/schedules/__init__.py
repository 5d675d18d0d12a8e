"""Schedules: tasks that are begun again and again, kept in the store and driven by the beat.

May import: broker, deckhands.client, deckhands.jobs.job.
Begin with: schedule.
"""
