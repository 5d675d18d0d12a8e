"""What a log means and what is wanted next, as pure functions over the concerns.

May import: concerns.
Start with: controller.
"""
