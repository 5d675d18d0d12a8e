"""Totals of expense reports."""
