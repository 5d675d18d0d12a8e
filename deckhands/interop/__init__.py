"""Files and options of other systems: recordings of OpenHands, its headless mode, solvers of inspect_ai.

Start with: openhands/trajectory_import.
"""
