"""The attempts of an evaluation: which begins when, what people want of them meanwhile, how they stand and have ended.

May import: cli, client, datasets, monitoring, reading.
Start with: driver.
"""
