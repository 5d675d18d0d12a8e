"""What a log means and what is wanted next, as pure functions: one file for each concern.

May import: nothing of this package.
Start with: controller.
"""
