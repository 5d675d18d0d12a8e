"""The pure core: the fold of a log into a state, and the next effect.

Start with: controller.
"""
